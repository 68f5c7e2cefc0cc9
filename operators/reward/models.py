"""Reward models: `ModelReward` reads tokens, `TextModelReward` text; `PreferenceAccuracy` validates one."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from flowrl.columns import RawPrompt, ResponseMask, TokenLevelScores, Uid
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError
from flowrl.operators.losses.preferences import pairs_of, report_margins
from flowrl.operators.reward.operator import Scorable, place_scores
from flowrl.operators.rows.held_out import Estimated
from flowrl.protocols.scorers import RewardScorer, TextRewardScorer
from flowrl.records import Tokens


class ModelReward(Operator):
    """Score each response by a reward model that reads the policy's tokens, on the last token on the mask.

    The model must have the policy's vocabulary, which is checked before launch; use `TextModelReward` for others. Fully
    masked rows get no score. Reports ``<log>/mean``, ``<log>/min`` and ``<log>/max``.

    Args:
        log: prefix of the metrics.
        reward_model: the model.

    Raises:
        DataError: the model cannot read a row, or its score is not finite.
    """

    granularity: ClassVar[Granularity] = "row"
    log: str = "reward"
    reward_model: Reads[RewardScorer] = Role("reward_model")

    def __call__(self, rollout: Tokens, metrics: Metrics = INJECTED) -> TokenLevelScores:
        return place_row_scores(self.name, self.log, self.reward_model.rewards(rollout), rollout.response_mask, metrics)


class HasMessages(Protocol):
    """The columns of the prompt that a reward model of text reads."""

    @property
    def raw_prompt(self) -> RawPrompt: ...


class TextModelReward(Operator):
    """Score each response by a reward model with its own tokenizer and chat template, otherwise like `ModelReward`.

    The model reads the prompt's messages and the text of the response (`response_text`, without special tokens) as the
    assistant's message. Conversations are never truncated.

    Args:
        log, reward_model: as in `ModelReward`.

    Raises:
        DataError: the chat template rejects a conversation, it is too long for the model, or a score is not finite.
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
        return place_row_scores(self.name, self.log, scores, rollout.response_mask, metrics)


class PreferenceAccuracy(Operator):
    """Score pairs of responses by a reward model, and compare it with the preferences: for a validation.

    Of each group, the response with the highest of the given scores is preferred to that with the lowest. Reports
    ``<log>/accuracy`` (share of pairs whose preferred response the model scores higher) and ``<log>/margin``, the mean
    lead of the preferred response.

    Args:
        log: prefix of the metrics.
        reward_model: the model.
    """

    granularity: ClassVar[Granularity] = "group"
    log: str = "reward_model"
    reward_model: Reads[RewardScorer] = Role("reward_model")

    def __call__(
        self, rollout: Tokens, token_level_scores: TokenLevelScores, uid: Uid, metrics: Metrics = INJECTED
    ) -> Estimated:
        scores = self.reward_model.rewards(rollout).to(token_level_scores.device)
        best, worst, _ = pairs_of(token_level_scores.sum(-1), uid)
        lead, pairs = scores[best] - scores[worst], best != worst
        report_margins(f"{self.log}/", lead, pairs, metrics)
        return Estimated(float((lead > 0)[pairs].double().mean()))


def place_row_scores(node: str, log: str, scores: Tensor, response_mask: ResponseMask, metrics: Metrics) -> Tensor:
    """`place_scores`, with metrics over the rows that have a token on the mask."""
    live = response_mask.any(-1)
    scores = scores.to(response_mask.device)
    if bad := (live & ~scores.isfinite()).nonzero().flatten().tolist():
        raise DataError(
            f"{node}: the model's score of row {bad[0]} of {len(scores)} is {float(scores[bad[0]])} ({len(bad)} are "
            f"not finite). Look for an overflow in the reward model, for example in bfloat16, or use another model.",
            code="reward.not-finite",
            node=node,
            row=bad[0],
            found=str(float(scores[bad[0]])),
        )
    report(log, scores[live], metrics)
    return place_scores(scores, response_mask)


def report(log: str, scores: Tensor, metrics: Metrics) -> None:
    """Report mean, minimum and maximum of the scores of rows."""
    if len(scores):
        metrics.mean(f"{log}/mean", scores.double().sum(), len(scores))
        metrics.min(f"{log}/min", scores.min())
        metrics.max(f"{log}/max", scores.max())
