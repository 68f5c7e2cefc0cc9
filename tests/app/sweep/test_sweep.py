"""``flowrl sweep``: run folders, an interruption, failures, the table, JSON and the picture.

Covers also `flowrl/app/sweep/command.py` and `flowrl/app/sweep/runs.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.command_line import Command, is_paragraph, write
from tests.support.runs import lines

pytestmark = pytest.mark.runs

MORE = """
import os
from pathlib import Path
from flowrl import Validation

class Ends(Operator):
    '''Ends the run by an error, or once by Ctrl-C, if a file asks for it.'''
    n: int

    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        if Path(f"fail-{self.n}").exists():
            raise ValueError("it diverges")
        if Path("interrupt").exists():
            Path("interrupt").unlink()
            raise KeyboardInterrupt
        return token_level_scores

job = job.edit(insert={"ends": After("reward", Ends(n=0))}, set={"generate.max_new_tokens": 2})
swept = replace(training, job=job, steps=1, folder=None, seed=5)
"""


@pytest.fixture
def target(training: Path) -> str:
    return f"{write(training.with_name('swept.py'), training.read_text() + MORE)}:swept"


def result(command: Command, *arguments: str) -> Any:
    answer = command("sweep", *arguments, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


def started(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["started"]


def test_an_interrupted_grid_continues_and_repeats_no_finished_run(command: Command, target: str) -> None:
    arguments = [target, "--set", "actor.optimizer.lr=0.1,0.2", "--set", "ends.n=1", "--seeds", "2", "--folder", "grid"]
    Path("interrupt").touch()
    answer = command("sweep", *arguments)
    assert answer.code == 130 and answer.err == "flowrl: interrupted; the same command continues the sweep in grid.\n"
    answer = command("sweep", *arguments)
    assert answer.code == 0, answer
    runs = sorted(path.parent for path in Path("grid").rglob("run.json"))
    assert [str(run) for run in runs] == [f"grid/trial-00{t}/seed-{s}" for t in range(2) for s in range(2)]
    found = [json.loads((run / "run.json").read_text()) for run in runs]
    assert [one["training"]["seed"] for one in found] == [5, 6, 5, 6]
    assert [one["graph"]["bindings"]["actor"]["optimizer"]["lr"] for one in found] == [0.1, 0.1, 0.2, 0.2]
    assert {one["graph"]["nodes"]["ends"]["operator"]["n"] for one in found} == {1}
    before = [started(run) for run in runs]
    shown = result(command, *arguments)
    assert [started(run) for run in runs] == before
    rewards = [lines(run / "metrics.jsonl")[-1]["reward/mean"] for run in runs]
    means = {0: (rewards[0] + rewards[1]) / 2, 1: (rewards[2] + rewards[3]) / 2}
    assert {one["trial"]: one["value"] for one in shown["trials"]} == pytest.approx(means)
    assert shown["best"] == max(means, key=lambda trial: means[trial]) or means[0] == means[1]
    assert (shown["metric"], shown["mode"]) == ("reward/mean", "max")
    listed = json.loads(command("runs", "grid", "--json").out)
    assert {run["name"] for run in listed} == {str(run.relative_to("grid")) for run in runs}
    ElementTree.parse("grid/sweep.svg")


def test_ranges_are_sampled_and_a_failed_trial_is_shown(command: Command, target: str) -> None:
    Path("fail-3").touch()
    arguments = [target, "--set", "actor.optimizer.lr=log:1e-3..1e-1", "--set", "ends.n=3,4", "--trials", "3"]
    answer = command("sweep", *arguments, "--minimize", "response_length/mean")
    assert "response_length/mean" in answer.out and "sweeps/grpo/sweep.svg" in answer.out
    records = json.loads(command("sweep", *arguments, "--minimize", "response_length/mean", "--json").out)
    states = [(one["settings"]["ends.n"], one["state"]) for one in records["trials"]]
    assert set(states) == {("3", "failed"), ("4", "finished")} and len(states) == 3
    assert records["mode"] == "min" and answer.code == 1
    assert "trial" in answer.err and "it diverges" in answer.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "actor.lr=1,2"], "did you mean actor.optimizer.lr?"),
        (["--set", "actor.optimizer.lr=log:1e-7..1e-5"], "--trials 20"),
        (["--set", "seed=1,2", "--seeds", "2"], "both --seeds and --set seed"),
        (["--maximize", "a", "--minimize", "b"], "both --maximize and --minimize"),
        (["--n", "2"], "neither an option of this command"),
    ],
)
def test_a_wrong_option_prints_one_paragraph_and_writes_nothing(
    command: Command, target: str, arguments: list[str], words: str
) -> None:
    answer = command("sweep", target, *arguments)
    assert answer.code == 2 and is_paragraph(answer) and words in answer.err
    assert not Path("sweeps/grpo/sweep.db").exists()


def test_a_metric_that_no_run_reports_names_the_nearest(command: Command, target: str) -> None:
    answer = command("sweep", target, "--maximize", "reward/men", "--folder", "other")
    assert answer.code == 2 and "did you mean 'reward/mean'?" in answer.err
