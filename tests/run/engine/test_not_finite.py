"""A failed step names the first node whose output is NaN or infinite under the mask, not the update that it reaches."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from flowrl import INJECTED, After, Now, Operator
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Granularity
from flowrl.operators import Collect
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.not_finite import not_finite
from flowrl.run.engine.result import StepResult
from flowrl.run.training.job import Job
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of, prompt_batch, proto


class Broken(Operator):
    """A division that went wrong: every score is NaN."""

    def __call__(self, scores: c.TokenLevelScores) -> c.TokenLevelScores:
        return scores * float("nan")


class Spoils(Operator):
    """Writes an infinity on a sampled token of row 1."""

    def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
        spoiled = advantages.clone()
        spoiled[1, response_mask[1].nonzero()[-1]] = float("inf")
        return spoiled


class OffTheMask(Operator):
    """Writes NaN where no token was sampled."""

    def __call__(self, scores: c.TokenLevelScores, response_mask: c.ResponseMask) -> c.TokenLevelScores:
        return scores.masked_fill(~response_mask, float("nan"))


class ShortMask(Operator):
    """Takes the last tokens of all rows off the mask."""

    def __call__(self, response_mask: c.ResponseMask) -> c.ResponseMask:
        mask = response_mask.clone()
        mask[:, 3:] = False
        return mask


class Stops(Operator):
    """Fails for a reason of its own."""

    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        raise RuntimeError("out of patience")


class Everything(Operator):
    """Selects all rows."""

    granularity: ClassVar[Granularity] = "group"

    def __call__(self, scores: c.TokenLevelScores) -> c.RowMask:
        return torch.ones(len(scores), dtype=torch.bool)


class FirstRound(Operator):
    """Writes NaN in the first round; the first group is then dropped."""

    def __call__(self, scores: c.TokenLevelScores, now: Now = INJECTED) -> c.TokenLevelScores:
        return scores if now.round.number else scores.index_fill(0, torch.arange(4), float("nan"))


class Finite(Operator):
    """Selects the groups without NaN."""

    granularity: ClassVar[Granularity] = "group"

    def __call__(self, scores: c.TokenLevelScores) -> c.RowMask:
        return scores.isfinite().all(1)


class SecondRound(Operator):
    """Fails in the second round."""

    def __call__(self, scores: c.TokenLevelScores, now: Now = INJECTED) -> c.TokenLevelScores:
        if now.round.number:
            raise RuntimeError("out of patience")
        return scores


def edited(folder: str, **insert: Any) -> Job:
    return job_of("grpo", folder).edit(insert=insert)


def step(job: Job, optimize: bool = True) -> StepResult:
    steps = local_steps(Plan(job.runs if optimize else job.graph), job.build(0), 0)
    steps.sync()
    return steps.step(PROMPTS, 0)


@pytest.mark.parametrize("optimize", [True, False])
def test_the_first_node_that_wrote_nan_is_named(tiny: str, optimize: bool) -> None:
    """Also if the update that fails is fused: the error speaks of the update that the user wrote."""
    job = edited(tiny, broken=After("reward", Broken()))
    assert "old_log_prob" not in job.runs
    with raises("trainer.not-finite-gradient", node="update_actor", origin="broken.token_level_scores") as caught:
        step(job, optimize)
    assert (caught.value.facts["row"], caught.value.facts["token"], caught.value.facts["step"]) == (0, 0, 1)
    message = caught.value.message
    assert message.startswith("broken wrote nan in step 1: token_level_scores at row 0, token 0 (")
    assert ". Then update_actor failed in step 1: DataError: The actor's gradient norm is nan" in message
    assert "\n  operator: UpdateActor(" in message and "ScoringUpdate" not in message


def test_the_place_is_the_first_under_the_mask(tiny: str) -> None:
    """And the numbers under the mask are counted, not those of the padding."""
    job = edited(tiny, spoils=After("group_advantage", Spoils()))
    with raises("trainer.not-finite-gradient", origin="spoils.advantages", row=1) as caught:
        step(job)
    assert "spoils wrote inf in step 1: advantages at row 1, token " in caught.value.message
    assert "(1 of " in caught.value.message and "under response_mask" in caught.value.message


def test_nan_off_the_mask_is_legal_and_not_blamed(tiny: str) -> None:
    job = edited(tiny, off_the_mask=After("reward", OffTheMask()))
    plain, masked = step(job_of("grpo", tiny)).metrics, step(job).metrics
    assert masked.compute() == plain.compute()
    job = edited(tiny, off_the_mask=After("reward", OffTheMask()), spoils=After("group_advantage", Spoils()))
    with raises("trainer.not-finite-gradient", origin="spoils.advantages", row=1):
        step(job)


def test_a_failure_for_another_reason_names_no_other_node(tiny: str) -> None:
    job = edited(tiny, off_the_mask=After("reward", OffTheMask()), stops=After("group_advantage", Stops()))
    with raises("step.node-failed", node="stops") as caught:
        step(job)
    assert caught.value.message.startswith("stops failed in step 1: RuntimeError: out of patience")
    assert "origin" not in caught.value.facts


def test_a_node_that_runs_in_rounds_is_named(tiny: str) -> None:
    job = edited(tiny, broken=After("reward", Broken()))
    job = job.edit(insert={"collect": After("broken", Collect(Everything(), groups=len(PROMPTS)))})
    with raises("trainer.not-finite-gradient", origin="broken.token_level_scores"):
        step(job)


@pytest.mark.parametrize("later", [None, "in its round", "after all rounds"])
def test_dropped_rows_of_an_earlier_round_are_not_blamed(tiny: str, later: str | None) -> None:
    """Neither for a failure in the next round, nor for one after it."""
    job = edited(tiny, first_round=After("reward", FirstRound()))
    job = job.edit(insert={"collect": After("first_round", Collect(Finite(), groups=len(PROMPTS)))})
    if later == "in its round":
        job = job.edit(insert={"second_round": After("first_round", SecondRound())})
    if later == "after all rounds":
        job = job.edit(insert={"stops": After("group_advantage", Stops())})
    steps = local_steps(Plan(job.runs), job.build(0), 0)
    steps.sync()
    run = steps.run(lambda step: PROMPTS, range(1), more=lambda n: proto(prompt_batch([[20 + i] for i in range(n)])))
    if later is None:
        assert len(list(run)) == 1
        return
    with raises("step.node-failed", step=1) as caught:
        list(run)
    assert "origin" not in caught.value.facts and caught.value.message.startswith(caught.value.facts["node"])


def test_large_numbers_whose_sum_overflows_are_finite() -> None:
    columns = {"large": torch.full((2, 3), 3e38), "ids": torch.ones(2, dtype=torch.int64), "none": torch.zeros(0)}
    assert not_finite(columns) == ()
    assert not_finite({**columns, "cancels": torch.tensor([torch.inf, -torch.inf])}) == ("cancels",)
