"""Rewards brought to a common scale: normalized over a run or a batch, and clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.session import State
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.per_token import select_rewards
from flowrl.operators.explains import exact, tokens_on
from flowrl.operators.reward.operator import place_scores


def with_row_scores(scores: Tensor, response_mask: Tensor, new: Tensor) -> Tensor:
    """Scores whose sum over each row is `new`: the last token on the mask takes the difference.

    Args:
        scores: float ``[batch response]``; zero off the mask.
        response_mask: bool ``[batch response]``.
        new: float ``[batch]``.
    """
    last = place_scores(torch.ones_like(new), response_mask) > 0
    others = torch.where(last, 0.0, scores).sum(-1, dtype=torch.float64)
    return torch.where(last, (new - others).float()[:, None], scores)


class Moments:
    """Number, mean and sum of squared deviations of the scores so far, updated by Chan et al.'s (1983) formula."""

    def __init__(self, count: float, mean: float, squares: float) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def with_scores(self, scores: Tensor) -> Moments:
        """The moments after further scores, float64 ``[n]``."""
        if not len(scores):
            return self
        mean, n = float(scores.mean()), len(scores)
        total, shift = self.count + n, mean - self.mean
        squares = self.squares + float((scores - mean).square().sum()) + shift**2 * self.count * n / total
        return Moments(total, self.mean + shift * n / total, squares)

    @property
    def std(self) -> float:
        """The sample standard deviation; 1 if all scores are equal."""
        return float((self.squares / (self.count - 1)) ** 0.5) if self.count > 1 and self.squares > 0 else 1.0


class NormalizeReward(Operator):
    """Divide the scores of rows by their standard deviation, after subtracting their mean: over the run or the batch.

    ``over="run"`` counts all rows so far, those of this step included, so one large score does not change the scale of
    a step much; with ``shift_mean=False`` it is trlX's ``scale_reward="running"``. ``over="batch"`` is for rewards
    whose scale drifts. If all scores are equal, the standard deviation counts as 1.

    The score of a row is the sum over its tokens; all its tokens are divided, and the last one takes the mean.

    Reports ``normalize_reward/mean`` and ``normalize_reward/std``, over the rows that count.

    Args:
        over: ``"run"`` or ``"batch"``.
        shift_mean: subtract the mean.
        eps: added to the standard deviation.

    Raises:
        DataError: a score is off the mask.
    """

    granularity: ClassVar[Granularity] = "batch"

    over: Literal["run", "batch"] = "run"
    shift_mean: bool = True
    eps: float = Field(default=1e-8, ge=0)

    moments = State(lambda self: [0.0, 0.0, 0.0])

    @property
    def effects(self) -> frozenset[str]:
        """``{"scaled"}``."""
        return frozenset({Effect.SCALED})

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, metrics: Metrics = INJECTED
    ) -> TokenLevelScores:
        scores = select_rewards(token_level_scores, response_mask, "token_level_scores")
        rows = scores.sum(-1, dtype=torch.float64)
        moments = self._moments(rows, response_mask)
        if self.over == "run":
            self.moments.value = [moments.count, moments.mean, moments.squares]
        metrics.mean("normalize_reward/mean", moments.mean)
        metrics.mean("normalize_reward/std", moments.std)
        std = moments.std + self.eps
        new = (rows - moments.mean * self.shift_mean) / std
        return with_row_scores((scores / std).float(), response_mask, new)

    def _moments(self, rows: Tensor, response_mask: Tensor) -> Moments:
        """The moments after the scores of this step, or of them alone."""
        before = Moments(*self.moments.value) if self.over == "run" else Moments(0.0, 0.0, 0.0)
        return before.with_scores(rows[response_mask.any(-1)])

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not tokens_on(inputs["response_mask"], row):
            return ""
        rows = inputs["token_level_scores"].sum(-1, dtype=torch.float64)
        moments = self._moments(rows, inputs["response_mask"])
        scaled = f"({exact(rows[row])} - {moments.mean * self.shift_mean}) / ({moments.std} + {self.eps})"
        after = f"{exact(outputs['token_level_scores'][row].sum())}; over {moments.count:.0f} rows of the {self.over}"
        return f"(score - mean) / (std + eps) = {scaled} = {after}"


class ClipReward(Operator):
    """Clip the score of each row to a range, as ``reward_clip_range`` of TRL and OpenRLHF.

    The score of a row is the sum over its tokens; the last one takes the difference.

    Reports ``clip_reward/clipped``, the share of rows that change.

    Args:
        low: the smallest score.
        high: the largest score.

    Raises:
        ParameterError: `low` is not below `high`.
        DataError: a score is off the mask.
    """

    granularity: ClassVar[Granularity] = "row"

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ParameterError(
                f"ClipReward needs low < high, given low={self.low}, high={self.high}. Swap them.",
                code="reward.invalid-settings",
                given=(self.low, self.high),
            )

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, metrics: Metrics = INJECTED
    ) -> TokenLevelScores:
        scores = select_rewards(token_level_scores, response_mask, "token_level_scores")
        rows, live = scores.sum(-1, dtype=torch.float64), response_mask.any(-1)
        new = rows.clamp(self.low, self.high)
        changed = live & (new != rows)
        metrics.mean("clip_reward/clipped", changed.sum(), live.sum())
        return torch.where(changed[:, None], with_row_scores(scores, response_mask, new), scores)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not tokens_on(inputs["response_mask"], row):
            return ""
        before, after = (columns["token_level_scores"][row].sum() for columns in (inputs, outputs))
        return f"clip(score, {self.low}, {self.high}) = clip({exact(before)}, {self.low}, {self.high}) = {exact(after)}"
