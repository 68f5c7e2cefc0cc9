"""Planted faults in real runs: the alarm that names each, with the rows and the command that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.backends import AdamW
from flowrl.schedules import Schedule
from tests.support.jobs import job_of
from tests.support.rewards import digits
from tests.support.runs import train

pytestmark = pytest.mark.runs


class TwentyFold(Schedule):
    """The learning rate is multiplied by 20 from an optimizer step on."""

    since: int

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, self.since - 1, self.since)

    def at(self, step: int) -> float:
        return 20.0 if step >= self.since else 1.0


class Still(Schedule):
    """The learning rate is 0 in the first thousand optimizer steps."""

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, 1000)

    def at(self, step: int) -> float:
        return float(step >= 1000)


def constant(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that parses nothing."""
    return 0.5


def long(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward for responses longer than the limit allows."""
    return float(len(solution_str) > 20)


def alarmed(run: flowrl.RecordedRun) -> dict[str, dict[str, Any]]:
    """The first alarm of each rule."""
    return {alarm["rule"]: alarm for alarm in reversed(run.alarms)}


def run_of(tiny: str, data: str, folder: Path, reward: Any = digits, steps: int = 4, **settings: Any) -> Any:
    optimizer = AdamW(lr=settings.pop("lr", 1e-4))
    job = job_of("grpo", tiny, reward, optimizer=optimizer, trainer=settings.pop("trainer", None), n=8, **settings)
    train(job, data, folder, steps=steps, prompts=8)
    return flowrl.open(folder)


def test_a_learning_rate_of_0_updates_nothing(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    run = run_of(tiny, prompts_file, tmp_path, trainer={"schedule": Still()})
    assert alarmed(run)["NothingUpdated()"]["step"] == 3


def test_a_constant_reward_is_named_in_the_second_step(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    found = alarmed(run_of(tiny, prompts_file, tmp_path, constant))
    assert found["ConstantReward()"]["step"] == 2 and found["GroupsAlike()"]["step"] == 3


def test_responses_cut_at_the_limit_are_named_with_their_rows(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    run = run_of(tiny, prompts_file, tmp_path, long)
    alarm = alarmed(run)["Truncated()"]
    rows = {row["row_id"]: row for row in run.rows(alarm["step"]).to_pylist()}
    assert alarm["step"] == 1 and all(rows[name]["truncated"] for name in alarm["rows"])


def test_a_learning_rate_that_is_far_too_large_diverges(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    run = run_of(tiny, prompts_file, tmp_path, lr=1.0)
    assert next(alarm for alarm in run.alarms if alarm["metric"] == "kl/ref")["step"] == 2


def test_a_learning_rate_that_is_multiplied_by_20_is_found_with_the_rows_that_make_the_change(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    run = run_of(tiny, prompts_file, tmp_path, steps=7, lr=5e-4, trainer={"schedule": TwentyFold(since=3)})
    kl = dict(zip(run.steps, run.metrics["kl/ref"].to_pylist(), strict=True))
    left = next(step for step in run.steps if step > 3 and kl[step] > 0.2)
    alarm = next(alarm for alarm in run.alarms if alarm["metric"] == "kl/ref")
    assert left <= alarm["step"] <= left + 2
    blamed = run.blame("kl/ref", alarm["step"], against=alarm["step"] - 1)
    assert sum(blamed.rows["share"].to_pylist()[: blamed.half]) >= 0.5
    assert set(alarm["rows"]) <= set(blamed.rows["row_id"].to_pylist()[: blamed.half])
