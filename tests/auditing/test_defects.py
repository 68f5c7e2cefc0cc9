"""Common mistakes in advantages and losses: an audit finds each, and accepts the correct version."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from flowrl import AuditTask, Graph, Loss, Operator, audit, operator
from flowrl.columns import (
    Advantages,
    LogProbs,
    OldLogProbs,
    RefLogProbs,
    ResponseMask,
    TokenLevelRewards,
)
from flowrl.core.operators.loss import Unit
from flowrl.graphs import rloo
from flowrl.operators import ReturnToGo
from tests.auditing.listed import ONE, unread, with_advantage
from tests.nightly import nightly_except


def others(scores: Tensor) -> Tensor:
    """For each row the mean score of the others; there is one group."""
    return (scores.sum() - scores) / (len(scores) - 1)


def spread(per_row: Tensor, response_mask: Tensor) -> Tensor:
    return torch.where(response_mask, per_row[:, None], 0.0)


@operator
def signed(token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False) -> Advantages:
    """Baseline less score."""
    scores = token_level_rewards.sum(-1)
    better = scores - others(scores)
    return spread(-better if wrong else better, response_mask)


@operator
def leaked(token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False) -> Advantages:
    """A baseline that knows the row's own score: the best of the group, with it in."""
    scores = token_level_rewards.sum(-1)
    whole = scores.expand(len(scores), -1)
    own = torch.eye(len(scores), dtype=torch.bool)
    best = (whole if wrong else whole.masked_fill(own, -torch.inf)).amax(-1)
    return spread(scores - best, response_mask)


@operator
def unmasked(token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False) -> Advantages:
    """The mean over the tokens of a row, padding included, in the place of the sum."""
    width = response_mask.shape[1] if wrong else 1
    scores = token_level_rewards.sum(-1) / width
    return spread(scores - others(scores), response_mask)


@operator
def stale(token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False) -> Advantages:
    """The mask of another row."""
    mask = response_mask & response_mask.roll(1, 0) if wrong else response_mask
    scores = token_level_rewards.sum(-1)
    return torch.where(mask, (scores - others(scores))[:, None], 0.0)


@operator
def shifted(token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False) -> Advantages:
    """Off by one: a token is paid for what comes behind the next."""
    to_go = ReturnToGo()(token_level_rewards, response_mask)
    late = torch.nn.functional.pad(to_go, (0, 1))[:, 1:]
    return torch.where(response_mask, late if wrong else to_go, 0.0)


@operator
def backwards(
    token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False
) -> Advantages:
    """What a token was paid so far, in place of what it is still paid."""
    to_go = token_level_rewards.flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask, token_level_rewards.cumsum(-1) if wrong else to_go, 0.0)


@operator
def shuffled(token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False) -> Advantages:
    """The score of another row."""
    scores = token_level_rewards.sum(-1)
    return spread(scores.roll(1) if wrong else scores, response_mask)


@operator
def kept_positive(
    token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, *, wrong: bool = False
) -> Advantages:
    """What is worse than the others does not count."""
    scores = token_level_rewards.sum(-1)
    better = scores - others(scores)
    return spread(better.clamp(min=0) if wrong else better, response_mask)


@operator
def with_kl(
    token_level_rewards: TokenLevelRewards,
    response_mask: ResponseMask,
    old_log_probs: OldLogProbs,
    ref_log_prob: RefLogProbs,
    *,
    wrong: bool = False,
) -> Advantages:
    """KL in the advantage, where it is in the reward already."""
    to_go = ReturnToGo()(token_level_rewards, response_mask)
    log_ratio = torch.where(response_mask, old_log_probs - ref_log_prob, 0.0).flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask, to_go - 0.5 * log_ratio if wrong else to_go, 0.0)


class Undetached(Loss):
    """Clipped weights of which the gradient goes through the weight, too."""

    wrong: bool = False

    def __call__(self, log_probs: LogProbs, old_log_probs: OldLogProbs, advantages: Advantages) -> Tensor:
        weight = (log_probs - old_log_probs).exp()
        return -(weight if self.wrong else weight.detach()) * advantages * log_probs


class Padded(Loss):
    """A mean over the tokens of a row, padding included, where it should be their sum."""

    unit: ClassVar[Unit] = "row"

    wrong: bool = False

    def __call__(self, log_probs: LogProbs, advantages: Advantages) -> Tensor:
        each = -advantages * log_probs
        return each.mean(-1) if self.wrong else each.sum(-1)


class OfProbabilities(Loss):
    """Probabilities in the place of log-probs."""

    wrong: bool = False

    def __call__(self, log_probs: LogProbs, advantages: Advantages) -> Tensor:
        return -advantages * (log_probs.exp() if self.wrong else log_probs)


def with_loss(loss: Loss) -> Graph:
    """RLOO with another loss; one of rows is the same at each of its tokens, so it is their mean."""
    aggregation = "seq-mean-token-mean" if loss.unit == "row" else "seq-mean-token-sum"
    return rloo(unread).edit(set={"update_actor.loss": loss, "update_actor.aggregation": aggregation})


def advantages(name: Operator, wrong: bool) -> Graph:
    return with_advantage(name(wrong=wrong), kl_coef=0.2)  # type: ignore[operator]


OPERATORS = (signed, leaked, unmasked, stale, shifted, backwards, shuffled, kept_positive, with_kl)
LOSSES = (Undetached, Padded, OfProbabilities)
TWO_LONG = AuditTask(prompts=1, tokens=2, steps=2)


@pytest.mark.parametrize("made", nightly_except([leaked, shifted, with_kl], OPERATORS), ids=lambda made: made.__name__)
def test_a_wrong_advantage_is_found(made: Operator) -> None:
    assert audit(advantages(made, wrong=True), ONE, n=2, explain=False).biased
    assert audit(advantages(made, wrong=False), ONE, n=2, explain=False).biased is False


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_wrong_loss_is_found(loss: type[Loss]) -> None:
    assert audit(with_loss(loss(wrong=True)), ONE, n=2, explain=False).biased  # type: ignore[call-arg]
    assert audit(with_loss(loss(wrong=False)), ONE, n=2, explain=False).biased is False  # type: ignore[call-arg]


def test_a_sign_error_points_against_the_true_gradient() -> None:
    found = audit(advantages(signed, wrong=True), ONE, n=2)
    assert found.whole.against
    assert found.whole.cosine.value == pytest.approx(-1.0)
    assert found.whole.scale.value == pytest.approx(-1.0, abs=1e-5)
    assert "points against the true gradient" in str(found)


def test_shuffled_rewards_have_an_expected_update_of_zero() -> None:
    found = audit(with_advantage(shuffled(wrong=True), kl_coef=0.0), ONE, n=2)  # type: ignore[operator]
    assert found.whole.follows_nothing
    assert found.variance is None
    assert "follows nothing: its mean is 0" in str(found)


def test_kl_counted_twice_is_found_as_a_bias() -> None:
    found = audit(advantages(with_kl, wrong=True), TWO_LONG, n=1, explain=False)
    assert found.biased
    assert found.objective == "expected reward - 0.2 · KL(actor || ref)"
