"""Runs of models by name (`training.py`, `job.py`, `identity.py`): the commit that is resolved, recorded and resumed.

A stand-in of the Hub serves the models; `huggingface_hub` is the real one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from flowrl import PromptData, Training, graphs
from flowrl.backends import SGD, LoRA, TorchRewardModel, TorchRollout, TorchScorer, TorchTrainer
from flowrl.hub.repositories import Commits
from flowrl.run.engine.build import EngineBuilder
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture
from tests.support.rewards import digits


def training(model: str, prompts: str, folder: Path, revision: str | None = None, **settings: Any) -> Training:
    """Two steps of GRPO from a model."""
    job = graphs.grpo(digits, n=2, max_new_tokens=4).bind(
        actor=TorchTrainer(model, SGD(lr=0.1), device="cpu", revision=revision),
        ref=TorchScorer(model, device="cpu", revision=revision),
        rollout=TorchRollout(),
    )
    settings = {"steps": 2, "checkpoint_every": 1} | settings
    return Training(job, PromptData(prompts), prompts=2, folder=str(folder), **settings)


def recorded(folder: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return described


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "actor" / "model.safetensors")


def test_a_model_by_name_trains_to_the_bits_of_its_folder_and_the_commit_is_recorded(
    hub: Hub, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    commit = hub.add("org/tiny", tiny)
    by_name, by_folder = tmp_path / "name", tmp_path / "folder"
    training("org/tiny", prompts_file, by_name).run()
    training(tiny, prompts_file, by_folder).run()
    one, other = weights(by_name), weights(by_folder)
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    described = recorded(by_name)
    pin = {"kind": "model", "repository": "org/tiny", "revision": None, "commit": commit}
    assert described["commits"] == [pin]
    assert described["identity"]["starting model"] == {"actor": f"org/tiny@{commit}", "ref": f"org/tiny@{commit}"}
    assert described["graph"]["bindings"]["actor"]["revision"] == commit
    assert "commits" not in recorded(by_folder)
    assert len([url for url in hub.requests if url.startswith("GET /api/models/org/tiny") and "tree" not in url]) == 1
    assert hub.downloads().count("model.safetensors") == 1


def test_a_resumed_run_uses_the_recorded_commit_when_the_branch_has_moved(
    hub: Hub, tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("org/tiny", tiny)
    training("org/tiny", prompts_file, tmp_path / "run", steps=1).run()
    hub.add("org/tiny", {"config.json": b"{}"})
    training("org/tiny", prompts_file, tmp_path / "run", resume=True).run()
    training(tiny, prompts_file, tmp_path / "whole").run()
    one, other = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert recorded(tmp_path / "run")["commits"][0]["commit"] == commit
    other_commit = hub.add("org/tiny", tiny)
    with raises("resume.other-run", changed="starting model"):
        training("org/tiny", prompts_file, tmp_path / "run", other_commit, steps=3, resume=True).run()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    training("org/tiny", prompts_file, tmp_path / "run", steps=3, resume=True).run()
    assert recorded(tmp_path / "run")["status"] == "finished"


def test_a_name_that_cannot_be_resolved_is_refused_before_the_run_folder_exists(
    hub: Hub, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    with raises("hub.unknown-repository", repository="org/none", role="actor"):
        training("org/none", prompts_file, tmp_path / "run").run()
    with raises("hub.unknown-revision", repository="org/tiny", revision="v2"):
        hub.add("org/tiny", tiny)
        training("org/tiny", prompts_file, tmp_path / "run", "v2").run()
    with raises("hub.revision-of-folder", path=tiny, revision="v2"):
        training(tiny, prompts_file, tmp_path / "run", "v2").run()
    assert not (tmp_path / "run").exists()


def test_remote_code_is_refused_as_in_a_folder(hub: Hub, tiny: str) -> None:
    files = {path.name: path.read_bytes() for path in Path(tiny).iterdir()}
    config = {**json.loads(files["config.json"]), "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    hub.add("org/own", {**files, "config.json": json.dumps(config).encode(), "own.py": b"raise SystemExit"})
    with raises("model.not-loadable"):
        EngineBuilder({"ref": TorchScorer("org/own", device="cpu")}, seed=0).all()
    assert "own.py" not in hub.downloads()


def test_a_reward_model_by_name_is_checked_from_its_metadata(hub: Hub, tiny: str) -> None:
    hub.add("org/tiny", tiny)
    spec = TorchRewardModel("org/tiny", device="cpu", head="random", label=9).pinned(Commits())
    with raises("model.label"):
        spec.refuse_missing()
    assert "model.safetensors" not in hub.downloads()


def test_the_commit_of_an_adapter_is_recorded_and_used_again(
    hub: Hub, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    first = TorchTrainer(tiny, lora=LoRA(r=2), device="cpu").build(EngineBuilder({}, seed=0))
    first.save_pretrained(str(tmp_path / "first"))
    commit = hub.add("org/adapter", tmp_path / "first" / "adapter")

    def run(steps: int, **settings: Any) -> dict[str, Any]:
        actor = TorchTrainer(tiny, SGD(lr=0.1), device="cpu", lora=LoRA(r=2, adapter_path="org/adapter"))
        one = training(tiny, prompts_file, tmp_path / "run", steps=steps, **settings)
        dataclasses.replace(one, job=one.job.edit(bind={"actor": actor})).run()
        return recorded(tmp_path / "run")

    described = run(1)
    assert described["commits"] == [{"kind": "model", "repository": "org/adapter", "revision": None, "commit": commit}]
    assert described["identity"]["starting model"]["adapter of actor"] == f"org/adapter@{commit}"
    hub.add("org/adapter", {"adapter_config.json": b"{}"})
    assert run(2, resume=True)["commits"] == described["commits"]
