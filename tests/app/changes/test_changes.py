"""``flowrl run`` with changes: ``--set``, ``--epochs``, arguments, a training's file, and a resume with others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.app.targets import load_target
from tests.support.command_line import Command, is_paragraph, write
from tests.support.runs import lines

pytestmark = pytest.mark.runs


def recorded(folder: str) -> Any:
    return json.loads((Path(folder) / "run.json").read_text())


@pytest.fixture
def source(training: Path) -> Path:
    """The user's file, with a function that takes arguments and saves the training as a file."""
    more = """
    def make(n: int, rate=0.1, folder: str | None = None):
        changed = job.edit(set={"repeat.n": n}, bind={"actor": TorchTrainer(model, SGD(lr=rate))})
        return replace(training, job=changed, folder=folder, checkpoint_every=1, steps=1)
    """
    return write(training, training.read_text() + write(training.with_name("more"), more).read_text())


def test_a_file_of_a_training_runs_with_settings_and_says_what_a_resume_changes(command: Command, source: Path) -> None:
    run = source.with_name("run.yaml")
    flowrl.save(load_target(f"{source}:make", arguments={"n": "2"}), run)
    sys.path.remove(str(source.parent))
    for name in [name for name, module in sys.modules.items() if str(source.parent) in str(module)]:
        del sys.modules[name]  # as in a fresh process
    refused = command("run", run)
    assert refused.code == 2 and is_paragraph(refused) and "--import" in refused.err
    given = ["--import", "--set", "actor.optimizer.lr=0.2", "--set=generate.max_new_tokens=2", "--folder", "first"]
    answer = command("run", run, *given)
    assert answer.code == 0, answer
    found = recorded("first")
    assert found["graph"]["bindings"]["actor"]["optimizer"]["lr"] == 0.2
    assert found["graph"]["nodes"]["generate"]["operator"]["max_new_tokens"] == 2
    given[2] = "actor.optimizer.lr=0.3"
    answer = command("run", run, *given, "--resume", "--epochs", "1", "--set", "prompts=2")
    assert answer.code == 0, answer
    assert "--set actor.optimizer.lr: 0.2 in the recorded run, 0.3 from now on" in answer.out.splitlines()
    assert [line["step"] for line in lines(Path("first/metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]
    answer = command("run", run, "--import", "--folder=first", "--resume", "--set=generate.max_new_tokens=3")
    assert answer.code == 2 and is_paragraph(answer) and "--set generate.max_new_tokens=3 is not possible" in answer.err
    assert len(lines(Path("first/metrics.jsonl"))) == 6


def test_arguments_of_a_function_and_settings_reach_the_run(command: Command, source: Path) -> None:
    answer = command("run", f"{source}:make", "--n=3", "--rate", "0.5", "--set", "seed=9", "--folder", "out")
    assert answer.code == 0, answer
    found = recorded("out")
    assert found["graph"]["nodes"]["repeat"]["operator"]["n"] == 3 and found["training"]["seed"] == 9
    assert found["graph"]["bindings"]["actor"]["optimizer"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["make"], "--n=..."),
        (["make", "--n=2", "--stepz=3"], "did you mean 'steps'?"),
        (["training", "--n=2"], "--n=2 is neither an option"),
        (["training", "--set", "seed"], "--set seed has no value"),
        (["training", "--set", "seed=1", "--set", "seed=2"], "set twice"),
        (["training", "--set", "actor.lr=1"], "did you mean actor.optimizer.lr?"),
        (["training", "--engine", "vlm"], "vllm, sglang or torch"),
        (["training", "--steps=1", "--epochs=1"], "both --steps and --epochs"),
    ],
)
def test_a_wrong_option_prints_one_paragraph(command: Command, source: Path, arguments: list[str], words: str) -> None:
    answer = command("run", f"{source}:{arguments[0]}", *arguments[1:])
    assert answer.code == 2 and is_paragraph(answer) and words in answer.err
    assert not Path("own").exists()
