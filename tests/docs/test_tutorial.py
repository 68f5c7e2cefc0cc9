"""The tutorial works: its blocks are typed, in order, in a new folder, with the model that `make demo` writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.demo import task
from flowrl.demo.model import build, make_tokenizer
from flowrl.demo.task import write_dataset
from flowrl.graphs import grpo, ppo
from tests import ROOT

pytestmark = pytest.mark.timeout(480)  # it trains for as long as it takes to learn

TUTORIAL = ROOT / "docs" / "tutorial" / "tutorial.md"
SAY = """
import json
right = [v["val/reward/mean"] for v in run.validations]
pictures = [g.mermaid() for g in (graph, job.graph, faster.graph)]
diffs = [str(a.diff(b)) for a, b in ((graph, grpo), (job.graph, faster.graph))]
print(json.dumps({"right": right, "pictures": pictures, "diffs": diffs}))
"""


class Typed(NamedTuple):
    """What a session wrote to stdout and stderr, what its objects were at the end, and its folder."""

    out: str
    errors: str
    found: dict[str, object]
    folder: Path


def blocks(language: str) -> list[str]:
    """The blocks of a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for label, text in found if label == language]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `make demo`, in the folder where the page expects it."""
    return build(tmp_path_factory.mktemp("repository") / "runs" / "demo" / "model-seed0", seed=0)


@pytest.fixture(scope="module")
def typed(model_folder: Path) -> Typed:
    """The whole page, typed after `make demo`."""
    root = model_folder.parents[2]
    write_dataset(root / "runs" / "demo" / "data")
    [prepare] = [block for block in blocks("sh") if block.startswith("mkdir first")]
    commands, _, python = prepare.rstrip("\n").rpartition("\n")
    assert python == "../.venv/bin/python"
    subprocess.run(["bash", "-euc", commands], cwd=root, check=True)
    folder = root / "first"
    lines = []
    for block in blocks("python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")
        else:
            lines.append(f"{block}\n")  # an empty line ends a function, as the Enter key does
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-i", "-q"],  # as from a keyboard, line by line: it continues after an error
        input="".join([*lines, SAY]),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return Typed(done.stdout, done.stderr, json.loads(done.stdout.splitlines()[-1]), folder)


def test_no_block_of_the_tutorial_raises(typed: Typed) -> None:
    assert "Traceback" not in typed.errors and "Error" not in typed.errors, typed.errors


def test_the_model_of_the_tutorial_learns(typed: Typed) -> None:
    before, *_, after = typed.found["right"]  # type: ignore[misc]
    assert before < 0.4
    assert after > 0.9
    described = json.loads((typed.folder / "runs" / "grpo-001" / "run.json").read_text())
    assert described["status"] == "finished"
    assert (typed.folder / "runs" / "grpo-001" / "actor" / "config.json").is_file()


def test_the_tutorial_prints_what_the_page_shows(typed: Typed) -> None:
    shown = blocks("")
    assert len(shown) == 4 and all(text in typed.out for text in shown)
    assert [f"{diff}\n" for diff in typed.found["diffs"]] == [shown[0], shown[3]]  # type: ignore[attr-defined]


def test_the_pictures_are_drawn_by_the_code(typed: Typed) -> None:
    before, bound, swapped = (f"{text}\n" for text in typed.found["pictures"])  # type: ignore[attr-defined]
    assert blocks("mermaid") == [before, swapped]
    assert bound.replace('"rollout: TorchRollout"', '"rollout: VLLM"') == swapped != bound


def test_the_algorithms_of_the_tutorial_equal_those_of_the_package(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(typed.folder)
    before, after = (make("my_reward.py:score", max_new_tokens=28) for make in (ppo, grpo))
    assert f"{before.mermaid()}\n" == blocks("mermaid")[0]
    assert f"{before.diff(after)}\n" == blocks("")[0]


def test_warm_started_model_has_something_to_learn(model_folder: Path) -> None:
    """On held-out prompts it answers mostly directly and mostly wrongly, sometimes thinks and is then mostly right.

    Exact, without sampling: the probability of each whole response under the model, at temperature 1.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), make_tokenizer()
    problems = task.split().heldout
    users = [[{"role": "user", "content": p.prompt}] for p in problems]
    prompts = tokenizer.apply_chat_template(users, add_generation_prompt=True, return_dict=False)

    def probability(texts: list[str]) -> torch.Tensor:
        responses = tokenizer([t + tokenizer.eos_token for t in texts], add_special_tokens=False)["input_ids"]
        rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        with torch.no_grad():
            log_probs = model(input_ids=ids.clamp(min=0)).logits[:, 8:-1].log_softmax(-1)
        chosen = log_probs.gather(2, ids[:, 9:, None].clamp(min=0))[..., 0]
        return torch.where(ids[:, 9:] >= 0, chosen, 0.0).sum(1).exp()

    with torch.no_grad():
        first = model(input_ids=torch.tensor(prompts)).logits[:, -1].softmax(-1)
    thinks = first[:, tokenizer.convert_tokens_to_ids("<think>")].mean()
    direct = probability([p.answer for p in problems]).mean() / (1 - thinks)
    worked = probability([p.worked for p in problems]).mean() / thinks
    assert 0.2 < thinks < 0.4
    assert direct < 0.2
    assert worked > 0.6
