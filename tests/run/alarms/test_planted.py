"""Planted faults in real runs: the alarm that names each, with the rows and the command that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import flowrl
from flowrl import After
from flowrl.backends import AdamW
from flowrl.operators import Reward, WeighRewards
from flowrl.schedules import Schedule
from tests.support.jobs import job_of
from tests.support.models import EOS, tiny_folder
from tests.support.rewards import brief, brief_and_length, constant, digits, length, long
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


@pytest.fixture(scope="module")
def brief_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model of which about one token in six ends the response."""
    folder = tiny_folder(tmp_path_factory.mktemp("brief"), "phi")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.bias[EOS] = 3.0
    model.save_pretrained(folder)
    return folder


def loophole(model: str, weighed: bool) -> Any:
    """GRPO on a sound reward of weight 1 and the length of weight 3, as two nodes or in one function."""
    settings = {"optimizer": AdamW(lr=1e-3), "n": 8, "mini_batch": 32, "max_new_tokens": 16}
    if not weighed:
        return job_of("grpo", model, brief_and_length, **settings)
    return job_of("grpo", model, brief, **settings).edit(
        insert={
            "length": After("generate", Reward(length, log="reward/long")),
            "weigh_rewards": After("reward", WeighRewards({"brief": 1.0, "length": 3.0})),
        },
        wire={
            "weigh_rewards.brief": "reward.token_level_scores",
            "weigh_rewards.length": "length.token_level_scores",
        },
        set={"reward.log": "reward/sound"},
    )


@pytest.mark.parametrize("weighed", [True, False], ids=["weighed", "one function"])
def test_a_reward_that_pays_for_length_is_found_and_the_sound_reward_lists_the_rows(
    brief_model: str, prompts_file: str, tmp_path: Path, weighed: bool
) -> None:
    train(loophole(brief_model, weighed), prompts_file, tmp_path, steps=6, prompts=8)
    run = flowrl.open(tmp_path, imports=True)
    before, after = (run.metrics["reward/brief"][step].as_py() for step in (0, -1))
    assert after < before  # the policy has learned the loophole
    alarm = alarmed(run)["OneComponent()"]
    assert alarm["metric"] == "reward/length" and alarm["value"] > 0.9 and alarm["step"] in (5, 6)
    rows = {row["row_id"]: row for row in run.rows(alarm["step"]).to_pylist()}
    paid = sorted((row["reward/length"] for row in rows.values()), reverse=True)
    assert [rows[name]["reward/length"] for name in alarm["rows"]] == paid[: len(alarm["rows"])]

    node, sound = (
        ("weigh_rewards", {"weights": {"brief": 1.0, "length": 0.0}}) if weighed else ("reward", {"fn": brief})
    )
    found = run.replay(alarm["step"], set={f"{node}.{key}": value for key, value in sound.items()})
    [change] = [change for change in found.changes if change.after.node == node]
    listed = {row.row_id: (row.before, row.after) for row in change.rows}
    texts = run.texts(alarm["step"])
    assert listed.keys() == {name for name, row in rows.items() if row["reward/length"] > 0}
    for name, (paid_before, paid_after) in listed.items():
        assert paid_before == pytest.approx(rows[name]["score"])
        assert paid_after == pytest.approx(brief("", str(texts[name]["response"]), ""))
