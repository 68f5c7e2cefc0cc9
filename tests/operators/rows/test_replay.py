"""Replay of rows of earlier steps (`replay.py`): what is stored and drawn, the version gate, rules, and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import After, Key, Metrics
from flowrl.errors import NodeError
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.operators import PPOClip, Replay
from flowrl.records import RolloutBatch
from tests.support.jobs import bind_tiny
from tests.support.kernel import exact
from tests.support.rewards import digits
from tests.support.runs import Recorder, train, without_times


def rows(version: int, sizes: list[float]) -> tuple[RolloutBatch, torch.Tensor]:
    """One row per advantage, whose response is as long as its number."""
    responses = [[10 * version + i] * (i + 1) for i in range(len(sizes))]
    log_probs = [[-0.125 * (version + 1)] * len(row) for row in responses]
    prompts = [[1] * (1 + version) for _ in sizes]
    batch = RolloutBatch.of(prompts, responses, log_probs=log_probs, policy_version=version, temperature=0.5)
    return batch, torch.tensor(sizes)[:, None] * batch.response_mask


def test_rows_of_earlier_steps_return_as_they_were() -> None:
    replay = Replay(rows=2, max_age=2)
    first, advantages = rows(0, [1.0, 0.0, -2.0])
    found = replay(first, advantages, key=Key.of(0))
    for column in ("input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs", "temperature"):
        assert torch.equal(getattr(found, column), getattr(first, column))  # nothing to replay yet
    second, later = rows(1, [0.5])
    metrics = Metrics()
    found = replay(second, later, key=Key.of(1), metrics=metrics)
    assert found.policy_version.tolist() == [1, 0, 0]  # the row without an advantage was not stored
    assert [row[mask].tolist() for row, mask in zip(found.responses, found.response_mask, strict=True)] == [
        [10],
        [0],
        [2, 2, 2],
    ]
    assert found.prompts.tolist() == [[1, 1], [0, 1], [0, 1]] and found.temperature.tolist() == [0.5] * 3
    assert found.rollout_log_probs.tolist() == [[-0.25, 0, 0], [-0.125, 0, 0], [-0.125] * 3]
    assert found.advantages.tolist() == [[0.5, 0, 0], [1.0, 0, 0], [-2.0] * 3]
    assert metrics.compute() == {"replay/stored": 3, "replay/replayed": 2, "replay/age_max": 1}


def test_old_rows_are_dropped_by_age_and_by_capacity() -> None:
    replay = Replay(rows=9, max_age=1, capacity=3)
    for version in range(4):
        found = replay(*rows(version, [1.0, 1.0]), key=Key.of(version))
        expected = [version] * 2 + ([version - 1] * 2 if version else [])
        assert found.policy_version.tolist() == expected if version < 2 else True
        assert int(found.policy_version.min()) >= version - 1
        assert len(replay.stored.value) == min(3, 2 * (version + 1))


def test_rows_are_drawn_in_proportion_to_their_priority() -> None:
    """Draws of one row follow ``priority ** alpha``, within four standard deviations."""
    sizes, draws = [1.0, 2.0, 4.0], 2000
    for alpha in (0.0, 1.0):
        counts = [0] * 3
        for number in range(draws):
            replay = Replay(rows=1, max_age=1, alpha=alpha)
            replay.stored.value = [{"priority": size, "number": i} for i, size in enumerate(sizes)]
            [drawn] = replay._drawn(replay.stored.value, Key.of(number))
            counts[drawn["number"]] += 1
        total = sum(size**alpha for size in sizes)
        for size, count in zip(sizes, counts, strict=True):
            share = size**alpha / total
            assert abs(count - share * draws) < 4 * (draws * share * (1 - share)) ** 0.5


def replaying(max_age: int = 3, replayed: int = 3, ratio_to: Any = "rollout", reward: Any = digits) -> Graph:
    wired = {f"update_actor.rollout.{name}": f"replay.{name}" for name in ROLLOUT}
    old = "replay.rollout_log_probs" if ratio_to == "rollout" else "old_log_prob.old_log_probs"
    wired |= {"update_actor.advantages": "replay.advantages", "update_actor.old_log_probs": old}
    if ratio_to == "old":
        wired |= {f"old_log_prob.rollout.{name}": f"replay.{name}" for name in ROLLOUT if name != "policy_version"}
    return grpo(reward, n=4, max_new_tokens=6, kl_coef=0.0).edit(
        insert={"replay": After("group_advantage", Replay(rows=6, max_age=max_age))},
        set={"update_actor.replayed": replayed, "update_actor.loss": PPOClip(ratio_to=ratio_to)},
        wire=wired,
        drop=["mismatch"],
    )


ROLLOUT = ("input_ids", "attention_mask", "position_ids", "response_mask", "temperature", "policy_version")


def test_rules_ask_for_a_correction_and_for_the_age_of_the_rows() -> None:
    assert replaying(reward=exact).check(prompts=4) == []
    [corrected] = replaying(ratio_to="old", reward=exact).check(prompts=4)
    assert (corrected.rule, corrected.node) == ("FR006", "update_actor")
    for replayed in (0, 5):
        [bound] = replaying(replayed=replayed, reward=exact).check(prompts=4)
        assert (bound.rule, bound.node) == ("FR043", "update_actor") and "replayed': 3" in bound.message
    [none] = grpo(exact, n=4).edit(set={"update_actor.replayed": 2}).check(prompts=4)[-1:]
    assert "no node replays" in none.message


@pytest.mark.runs
def test_replayed_rows_are_trained_on_up_to_their_age_and_no_older(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    run = train(bind_tiny(replaying(), tiny), prompts_file, tmp_path / "run", steps=6)
    ages = [step.get("replay/age_max", 0) for step in run.metrics]
    assert ages[0] == 0 and max(ages) == 3 and all(step["actor/grad_norm"] > 0 for step in run.metrics)
    low = bind_tiny(replaying(replayed=1), tiny).edit(allow={"FR043": "the refusal of the update is tested"})
    with pytest.raises(NodeError) as caught:
        train(low, prompts_file, tmp_path / "low", steps=6)
    assert caught.value.code == "update.stale-rows"


@pytest.mark.runs
def test_a_resumed_run_replays_the_same_rows(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    class Killer(Recorder):
        def step(self, step: int, metrics: Any) -> None:
            if step == 4:
                raise KeyboardInterrupt

    job = bind_tiny(replaying(), tiny)
    whole = train(job, prompts_file, tmp_path / "whole", steps=5, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(job, prompts_file, tmp_path / "killed", [Killer()], steps=5, checkpoint_every=1)
    resumed = train(job, prompts_file, tmp_path / "killed", steps=5, checkpoint_every=1, resume=True)
    assert without_times(list(resumed.metrics)) == without_times(list(whole.metrics))
