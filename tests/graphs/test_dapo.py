"""DAPO: its differences from GRPO, its ablations, and its masks and scores in a step."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import graphs
from flowrl.operators import Collect, MaskOverlong, OverlongPenalty, PPOClip, Spread
from tests.support.jobs import PROMPTS, job_of
from tests.support.kernel import exact
from tests.support.rewards import digits
from tests.support.runs import walk


def test_dapo_differs_from_grpo_by_the_changes_of_the_paper() -> None:
    dapo = graphs.dapo(exact, n=8, max_new_tokens=100)
    lines = str(graphs.grpo(exact, n=8, max_new_tokens=100, kl_coef=0.0).diff(dapo)).splitlines()[1:]
    assert [line for line in lines if " <- " not in line or line[0] != "~"] == [
        "+ collect: Collect(predicate=Spread(least=0.0), groups=32)  <- reward, generate, repeat",
        "+ overlong_penalty: OverlongPenalty(most=100, buffer=20)  <- collect",
        "+ mask_overlong: MaskOverlong(most=99)  <- collect",
        "~ update_actor.loss.clip_high: None -> 0.28",
    ]
    assert dapo["update_actor"].operator.aggregation == "token-mean"


def test_every_setting_reaches_its_operator() -> None:
    graph = graphs.dapo(
        exact, groups=4, n=3, max_new_tokens=50, overlong_buffer=7, clip=0.1, clip_high=0.3, kl_coef=0.5, mini_batch=6
    )
    assert graph["collect"].operator.predicate == Spread() and graph["collect"].operator.groups == 4
    assert graph["overlong_penalty"].operator == OverlongPenalty(50, 7)
    assert graph["mask_overlong"].operator == MaskOverlong(49)
    update = graph["update_actor"].operator
    assert (update.loss, update.mini_batch, update.kl.coef) == (PPOClip(0.1, 0.3), 6, 0.5)
    assert graph["repeat"].operator.n == 3 and graph["generate"].operator.max_new_tokens == 50
    assert graph.check(prompts=4) == []


@pytest.mark.parametrize("without", ["collect", "overlong_penalty", "mask_overlong"])
def test_each_part_of_dapo_can_be_dropped(without: str) -> None:
    graph = graphs.dapo(exact).edit(drop=[without])
    assert graph.check(prompts=8) == [] and without not in graph.nodes
    assert {"collect", "overlong_penalty", "mask_overlong"} - {without} <= set(graph.nodes)


def nearly(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Right where at least a quarter is digits."""
    return float(digits(data_source, solution_str, ground_truth) >= 0.25)


def test_a_step_masks_truncated_responses(tiny: str) -> None:
    """Groups are chosen by raw scores; the penalty is off these, and rows of full length are off the update's mask."""
    job = job_of("dapo", tiny, nearly, n=5, groups=1, max_new_tokens=20, overlong_buffer=10)
    steps = walk(job.graph, **job.build(0))
    steps.sync()
    result = steps.step(PROMPTS, 0, return_nodes=["collect", "overlong_penalty", "mask_overlong"])
    raw, shaped = (result.columns[name]["token_level_scores"] for name in ("collect", "overlong_penalty"))
    mask, trained = (result.columns[name]["response_mask"] for name in ("collect", "mask_overlong"))
    lengths, found = mask.sum(1), result.metrics.compute()
    assert 0.0 < raw.sum(1).mean() < 1.0 and 0 < (lengths == 20).sum() < 5
    assert (raw - shaped).sum(1).tolist() == pytest.approx(((lengths - 10) / 10).clamp(0, 1).tolist())
    assert trained.any(1).tolist() == (lengths < 20).tolist()
    assert found["overlong/masked"] == pytest.approx(float((lengths == 20).float().mean()))
    assert isinstance(job.graph["collect"].operator, Collect)
