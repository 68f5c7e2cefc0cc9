"""Runs of episodes with segments: lag, resume, mini-batches and groups count episodes.

Tests `in_flight.py` and `steps.py` with `operators/engines/interact.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import After, Lag
from flowrl.backends import TorchRollout
from flowrl.errors import RuleError
from flowrl.operators import Collect, Interact, RolloutCorrection, Spread, TurnGroupAdvantage
from flowrl.run.training.job import Job
from tests.operators.engines.test_interact import rewrites
from tests.run.training.interrupted import cut_off, equal, flat, run, without_times
from tests.support.jobs import job_of
from tests.support.runs import train

pytestmark = pytest.mark.runs


def job(folder: str, mini_batch: int | None = 5, **settings: Any) -> Job:
    interact = Interact(rewrites, rewrites="segment", max_turns=5, context=200, max_new_tokens=6)
    graph = job_of("grpo", folder, n=2, mini_batch=mini_batch).edit(
        replace={"generate": interact}, drop=["reward"], bind={"rollout": TorchRollout(folder, device="cpu")}
    )
    return graph.edit(replace={"group_advantage": TurnGroupAdvantage()}, **settings)


def without_waiting(folder: Path) -> list[dict[str, Any]]:
    lines = without_times(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "episodes/waiting"} for line in lines]


CORRECTED = After("turn_group_advantage", RolloutCorrection("token", "truncate", high=2.0))


@pytest.mark.parametrize("edit", [{}, {"lag": Lag(2, spans=True), "insert": {"correction": CORRECTED}}])
def test_a_resumed_run_has_the_same_numbers(edit: dict[str, Any], tiny: str, prompts_file: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"validation": (), "checkpoint_every": 1}
    whole = run(job(tiny).edit(**edit), prompts_file, tmp_path / "whole", **settings)
    cut_off(job(tiny).edit(**edit), prompts_file, tmp_path / "cut", 4, **settings)
    found = run(job(tiny).edit(**edit), prompts_file, tmp_path / "cut", resume=True, **settings)
    assert without_waiting(found.folder) == without_waiting(whole.folder)
    assert found.metrics[0]["episodes/segments"] == 3
    a, b = (flat(one.engines["actor"].state_dict()) for one in (found, whole))
    assert a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def test_mini_batches_and_groups_count_episodes(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """3 groups of 2 episodes with 3 segments each: 6 rows in 3 mini-batches."""
    collected = job(tiny, mini_batch=2, insert={"collect": After("interact", Collect(Spread(), groups=3))})
    found = train(collected, prompts_file, tmp_path / "run", steps=1, prompts=3)
    assert found.metrics[0]["collect/kept"] == 3 and found.metrics[0]["episodes/segments"] == 3
    assert found.engines["actor"].state_dict()["steps"] == 3
    with pytest.raises(RuleError, match="FR004 update_actor: mini_batch=4 does not divide the 6 rows"):
        train(job(tiny, mini_batch=4), prompts_file, tmp_path / "refused", steps=1, prompts=3)
    assert torch.isfinite(torch.tensor(found.metrics[0]["actor/grad_norm"]))
