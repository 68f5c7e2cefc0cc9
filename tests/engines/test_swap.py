"""The demo learns to think with rollouts of each of three engines; only the binding changes.

Engines sample different tokens, so the tests use bounds on the rewards: over eight seeds of `TorchRollout`
the mean reward was 0.28 to 0.32 in the first two steps, and 0.91 to 0.95 in the last three.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flowrl.backends import TorchRollout
from flowrl.backends.sglang.engine import SGLang
from flowrl.backends.vllm.engine import VLLM
from flowrl.demo.model import build
from flowrl.demo.run import graphs, training
from flowrl.demo.task import write_dataset
from flowrl.references import load_object
from flowrl.run.training.loop import Run
from flowrl.run.training.training import Training
from tests import ROOT
from tests.engines.vllm.vllm_slot import VLLMSlot

STEPS = 14
LENGTH = 64
"""Tokens of the longest prompt and response, with room to spare."""


def backend(engine: str, model: str) -> Any:
    """The backend bound to the rollout role."""
    match engine:
        case "torch":
            return TorchRollout(model)
        case "vllm":
            return VLLM(model, dtype="float32", max_model_len=LENGTH, kv_cache_bytes=64 << 20)
        case "sglang":
            return SGLang(model, dtype="float32", max_model_len=LENGTH, cache_tokens=256 * LENGTH)
    raise ValueError(f"no engine {engine!r}")


def demo(model: Path, data: Path, folder: Path) -> Training:
    """GRPO as the demo runs it, with the rollout sharing the actor's weights."""
    return replace(training(graphs()[0], model, data, folder, STEPS, seed=0), validation=(), save_model=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("swap") / "model", seed=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("swap") / "data", seed=0)[0].parent


@pytest.fixture(params=["torch", "vllm", "sglang"])
def run(request: pytest.FixtureRequest, model: Path, data: Path, tmp_path: Path, vllm_slot: VLLMSlot) -> Iterator[Run]:
    vllm_slot.free()
    before = demo(model, data, tmp_path / "run")
    after = replace(before, job=before.job.edit(bind={"rollout": backend(request.param, str(model))}))
    run = after.run()
    yield run
    run.engines.clear()  # a process can have one vLLM only
    gc.collect()


@pytest.mark.engines("vllm", "sglang")
@pytest.mark.nightly
@pytest.mark.timeout(480)
def test_the_demo_learns_to_think_on_every_engine(run: Run, model: Path) -> None:
    def column(name: str) -> list[float]:
        return [metrics[name] for metrics in run.metrics]

    rewards, lengths, thinking = column("reward/mean"), column("response_length/mean"), column("reward/thinks")
    assert statistics.mean(rewards[:2]) < 0.4
    assert statistics.mean(rewards[-3:]) > 0.8
    assert statistics.mean(thinking[-3:]) > 0.9
    assert lengths[-1] > 1.5 * lengths[0]
    assert column("sync/version") == [*range(1, STEPS + 1)]
    weights = load_file(model / "model.safetensors").values()
    assert set(column("sync/bytes")) == {sum(tensor.nbytes for tensor in weights)}
    assert max(column("rollout/logp_diff_max")) < 1e-4
    assert not any(column("rollout/ratio_outside"))


def by_vllm(example: str, model: Path, folder: Path) -> dict[str, Any]:
    """The metrics of the first step of an example with vLLM."""
    command = [sys.executable, str(ROOT / "examples" / example)]
    environment = os.environ | {"MODEL": str(model), "STEPS": "1", "ENGINE": "vllm"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [metrics] = (folder / "runs").glob("*/metrics.jsonl")
    step: dict[str, Any] = json.loads(metrics.read_text().splitlines()[1])
    return step


@pytest.mark.engines("vllm")
@pytest.mark.nightly
def test_the_example_trains_with_vllm(model: Path, tmp_path: Path) -> None:
    trained = by_vllm("think_by_engine.py", model, tmp_path)
    assert trained["sync/version"] == 1 and trained["sync/bytes"] > 0


@pytest.mark.engines("vllm")
@pytest.mark.nightly
def test_vllm_plays_the_triage_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/develop/engine-notes.md has the learning curves of triage on each engine."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    model = load_object(f"{ROOT / 'examples' / 'triage_environment.py'}:build")(tmp_path / "model", steps=40, rows=32)
    trained = by_vllm("triage.py", model, tmp_path)
    assert trained["episodes/turns"] == 2 and trained["episodes/failed"] == 0
    assert trained["rollout/logp_diff_max"] < 1e-4 and not trained["rollout/ratio_outside"]
    assert trained["sync/version"] == 1 and trained["sync/bytes"] > 0


def test_swapping_the_engine_changes_only_the_binding(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    before = demo(tmp_path / "model", tmp_path, tmp_path / "run")
    model = str(tmp_path / "model")
    shown = {
        "torch": f"TorchRollout(model={model!r})",
        "vllm": f"VLLM(model={model!r}, dtype='float32', max_model_len=64, kv_cache_bytes=67108864)",
        "sglang": f"SGLang(model={model!r}, dtype='float32', max_model_len=64, cache_tokens=16384)",
    }
    jobs, was = [before.job], "TorchRollout()"
    for engine, text in shown.items():
        jobs.append(jobs[-1].edit(bind={"rollout": backend(engine, model)}))
        assert str(jobs[-2].graph.diff(jobs[-1].graph)) == f"grpo -> grpo\n~ role rollout: {was} -> {text}"
        assert replace(before, job=jobs[-1]).identity() == before.identity()  # of data, seed and graph
        was = text
    back = jobs[-1].edit(bind={"rollout": TorchRollout()})
    assert back.graph.fingerprint() == before.job.graph.fingerprint()
    assert len({job.graph.fingerprint() for job in jobs}) == len(jobs)  # a run's folder tells which engine it had
