"""Rejection of rows on which the rollout engine and the trainer disagree: they leave the mask, as in verl."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from flowrl.columns import OldLogProbs, ResponseMask, RolloutLogProbs
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.corrections import Level, bound_ratios, importance_ratios


class MaskMismatch(Operator):
    """Mask tokens or rows whose importance ratio is out of bounds; see `importance_ratios`.

    It rejects what ``RolloutCorrection(level, "reject", ...)`` rejects. That has weight 0 but stays in the counts by
    which a loss is divided; here it leaves the mask of an update that reads it, and so the counts, as in verl's
    ``rollout_rs``: ``wire={"update_actor.rollout.response_mask": "mask_mismatch.response_mask"}``.

    Reports ``mask_mismatch/masked``, the share of tokens that leave the mask.

    Args:
        level: ``token`` for single tokens; for rows ``sequence``, ``geometric``, ``minimum``, ``maximum``, ``k2`` or
            ``k3``.
        low: smallest ratio within the bounds; None is no bound.
        high: largest ratio within the bounds; None is no bound.

    Raises:
        ParameterError: there is no bound, or `low` is above `high`.
        DataError: a log-prob on the mask is NaN.
    """

    granularity: ClassVar[Granularity] = "row"

    level: Level = "token"
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=2.0, gt=0)

    def __post_init__(self) -> None:
        if (self.low, self.high) == (None, None) or (self.low or 0.0) > (self.high or float("inf")):
            raise ParameterError(
                f"low={self.low!r}, high={self.high!r} is not a range. Set at least one of them, with low <= high.",
                code="correction.invalid-settings",
                low=self.low,
                high=self.high,
            )

    def __call__(
        self,
        old_log_probs: OldLogProbs,
        rollout_log_probs: RolloutLogProbs,
        response_mask: ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> ResponseMask:
        ratios = importance_ratios(old_log_probs, rollout_log_probs, response_mask, self.level)
        _, outside = bound_ratios(ratios, "reject", self.low, self.high)
        kept = response_mask & ~outside
        metrics.mean("mask_mismatch/masked", (response_mask & outside).sum(), response_mask.sum())
        return kept
