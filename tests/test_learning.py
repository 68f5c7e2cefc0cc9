"""PPO and GRPO train a tiny random model in seconds to solve a task that only the reward defines.

The task cannot be solved without reading the prompt: half of the prompts ask for digits, half for letters, so training
that pairs responses with the scores of other rows reaches about a half at most.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import INJECTED, Key, Operator, PromptData, Training
from flowrl import columns as c
from flowrl.backends import AdamW, TorchRollout
from flowrl.core.graphs.after import After
from flowrl.operators.reward.operator import place_scores
from flowrl.run.training.job import Job
from flowrl.run.training.loop import Run
from tests.nightly import nightly
from tests.support.jobs import job_of
from tests.support.rewards import asked_for

pytestmark = pytest.mark.runs

ALGORITHMS = ["grpo", "ppo"]


class ShuffleScores(Operator):
    """Gives each response the score of a random other one, so there is nothing to learn."""

    def __call__(
        self, token_level_scores: c.TokenLevelScores, response_mask: c.ResponseMask, key: Key = INJECTED
    ) -> c.TokenLevelScores:
        order = torch.randperm(len(token_level_scores), generator=key.generator())
        return place_scores(token_level_scores.sum(-1)[order], response_mask)


def write_task(file: Path) -> str:
    """Write the prompts of the task to a file; returns its path."""
    with file.open("w") as lines:
        for i in range(8):
            wanted = ("digits", "letters")[i % 2]
            record = {
                "prompt": [{"role": "user", "content": f"{wanted[0]}{i}"}],
                "data_source": "asked_for",
                "reward_model": {"ground_truth": wanted},
            }
            lines.write(json.dumps(record) + "\n")
    return str(file)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_task(tmp_path_factory.mktemp("task") / "prompts.jsonl")


def job(name: str, folder: str, **parameters: Any) -> Job:
    """64 rows a step, in two mini-batches."""
    n = {"grpo": 8, "ppo": 1}[name]
    parameters = {"n": n, "mini_batch": 32, "max_new_tokens": 8} | parameters
    return job_of(name, folder, asked_for, optimizer=AdamW(lr=3e-3), **parameters)


def train(job: Job, task: str, folder: Path, steps: int, seed: int) -> Run:
    prompts = 64 // job.graph["repeat"].operator.n  # type: ignore[attr-defined]
    return Training(
        job, PromptData(task), steps=steps, prompts=prompts, seed=seed, folder=str(folder), save_model=False
    ).run()


def rewards(run: Run) -> tuple[float, float]:
    """Mean reward over the first two steps and over the last five."""
    scores = [metrics["reward/mean"] for metrics in run.metrics]
    return sum(scores[:2]) / 2, sum(scores[-5:]) / 5


@pytest.mark.parametrize("seed", [0, nightly(1)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ppo_and_grpo_raise_the_reward(tiny: str, task: str, tmp_path: Path, name: str, seed: int) -> None:
    run = train(job(name, tiny), task, tmp_path, steps=30, seed=seed)
    first, last = rewards(run)
    assert first < 0.45
    assert last > 0.85
    assert run.metrics[-1]["kl/ref"] > 0.1  # it went somewhere
    assert not flowrl.open(run.folder).alarms  # a healthy run


@pytest.mark.parametrize("name", ["grpo", nightly("ppo")])
def test_nothing_is_learned_from_shuffled_scores(tiny: str, task: str, tmp_path: Path, name: str) -> None:
    shuffled = job(name, tiny).edit(insert={"shuffle_scores": After("reward", ShuffleScores())})
    first, last = rewards(train(shuffled, task, tmp_path, steps=30, seed=0))
    assert first < 0.45
    assert last < 0.5


def test_training_learns_with_an_engine_that_copies_weights(tiny: str, task: str, tmp_path: Path) -> None:
    copied = job("grpo", tiny).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    run = train(copied, task, tmp_path, steps=30, seed=0)
    assert rewards(run)[1] > 0.85
    assert all(metrics["sync/bytes"] > 0 for metrics in run.metrics)
    assert not flowrl.open(run.folder).alarms


@pytest.mark.parametrize("name", [nightly("grpo"), "ppo"])
def test_training_learns_with_several_epochs_and_some_clipped_tokens(
    tiny: str, task: str, tmp_path: Path, name: str
) -> None:
    run = train(job(name, tiny, ppo_epochs=3), task, tmp_path, steps=25, seed=0)
    assert rewards(run)[1] > 0.75
    assert max(metrics["actor/pg_clipfrac"] for metrics in run.metrics) > 0.01
    assert not flowrl.open(run.folder).alarms


@pytest.mark.parametrize("name", ["grpo", nightly("ppo")])
def test_kl_holds_the_policy_near_its_reference(tiny: str, task: str, tmp_path: Path, name: str) -> None:
    free = train(job(name, tiny, kl_coef=0.001), task, tmp_path / "free", steps=20, seed=0)
    held = train(job(name, tiny, kl_coef=1.0), task, tmp_path / "held", steps=20, seed=0)
    assert 0 <= held.metrics[-1]["kl/ref"] < 0.5 * free.metrics[-1]["kl/ref"]
    assert rewards(held)[1] < rewards(free)[1]
