"""Rewards that a model gives: `ModelReward` by tokens, `TextModelReward` by text."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from flowrl.columns import RawPrompt, ResponseMask, TokenLevelScores
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError
from flowrl.operators.reward.operator import Scorable, place_scores
from flowrl.protocols.scorers import RewardScorer, TextRewardScorer
from flowrl.records import Tokens


class ModelReward(Operator):
    """Score each response by a reward model that reads the policy's own tokens, on the last token on the mask.

    The model must have the policy's vocabulary, which is checked before launch; one with another reads text, by
    `TextModelReward`. A row that is masked entirely has no token to put a score on.

    Args:
        log: what metrics begin with: ``<log>/mean``, ``<log>/min`` and ``<log>/max``.
        reward_model: the model.

    Raises:
        DataError: the model cannot read a row, or its score is not finite.
    """

    granularity: ClassVar[Granularity] = "row"
    log: str = "reward"
    reward_model: Reads[RewardScorer] = Role("reward_model")

    def __call__(self, rollout: Tokens, metrics: Metrics = INJECTED) -> TokenLevelScores:
        return placed(self.name, self.log, self.reward_model.rewards(rollout), rollout.response_mask, metrics)


class HasMessages(Protocol):
    """What a response answers."""

    @property
    def raw_prompt(self) -> RawPrompt: ...


class TextModelReward(Operator):
    """Score each response by a reward model with a tokeniser and chat template of its own, as `ModelReward` otherwise.

    It reads the prompt's messages and, as the assistant's, the text of the response (`response_text`, which has no
    special tokens). Nothing is cut off: a conversation that the model cannot read whole is an error.

    Args:
        log, reward_model: as in `ModelReward`.

    Raises:
        DataError: the model's template does not take a conversation, this is too long, or its score is not finite.
    """

    granularity: ClassVar[Granularity] = "row"
    log: str = "reward"
    reward_model: Reads[TextRewardScorer] = Role("reward_model")

    def __call__(self, rollout: Scorable, prompts: HasMessages, metrics: Metrics = INJECTED) -> TokenLevelScores:
        conversations = [
            [*messages, {"role": "assistant", "content": text}]
            for messages, text in zip(prompts.raw_prompt, rollout.response_text, strict=True)
        ]
        scores = self.reward_model.rewards_of(conversations)
        return placed(self.name, self.log, scores, rollout.response_mask, metrics)


def placed(node: str, log: str, scores: Tensor, response_mask: ResponseMask, metrics: Metrics) -> Tensor:
    """`place_scores`, with metrics over the rows that have a token on the mask.

    Raises:
        DataError: a score is not finite.
    """
    live = response_mask.any(-1)
    scores = scores.to(response_mask.device)
    if bad := (live & ~scores.isfinite()).nonzero().flatten().tolist():
        raise DataError(
            f"{node} got the score {float(scores[bad[0]])} for row {bad[0]} of {len(scores)} ({len(bad)} are not "
            f"finite); expected numbers: look for overflow, as in a reward model in bfloat16, or take another copy."
        )
    report(log, scores[live], metrics)
    return place_scores(scores, response_mask)


def report(log: str, scores: Tensor, metrics: Metrics) -> None:
    """Report mean, least and greatest of the scores of rows."""
    if len(scores):
        metrics.mean(f"{log}/mean", scores.double().sum(), len(scores))
        metrics.min(f"{log}/min", scores.min())
        metrics.max(f"{log}/max", scores.max())
