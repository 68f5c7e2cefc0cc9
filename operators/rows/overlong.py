"""Overlong responses: a soft penalty, or no loss (DAPO: Yu et al. 2025, arXiv:2503.14476, §3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.per_token import select_rewards
from flowrl.operators.explains import exact, tokens_on


class OverlongPenalty(Operator):
    """Subtract a penalty that grows linearly near the maximum length (DAPO: Yu et al. 2025, arXiv:2503.14476, eq. 13).

    For a row of l tokens on the mask, it adds ``weight * clip((most - buffer - l) / buffer, -1, 0)`` to the score of
    the last token: 0 up to ``most - buffer`` tokens, then linear, and ``-weight`` from `most` tokens on.

    Reports ``overlong/penalty``, the mean over rows with a token on the mask.

    Args:
        most: length of the full penalty in tokens: ``max_new_tokens``.
        buffer: tokens over which the penalty grows, at most `most`.
        weight: the full penalty.

    Raises:
        ParameterError: `buffer` is larger than `most`.
        DataError: a score is off the mask.
    """

    granularity: ClassVar[Granularity] = "row"

    most: int = Field(ge=1)
    buffer: int = Field(ge=1)
    weight: float = Field(default=1.0, gt=0)

    def __post_init__(self) -> None:
        if self.buffer > self.most:
            raise ParameterError(
                f"OverlongPenalty needs buffer <= most, given buffer={self.buffer}, most={self.most}, which penalizes "
                f"even an empty response. Pass a part of most, such as buffer={max(1, self.most // 5)}.",
                code="rows.invalid-settings",
                buffer=self.buffer,
                most=self.most,
            )

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, metrics: Metrics = INJECTED
    ) -> TokenLevelScores:
        scores = select_rewards(token_level_scores, response_mask, "token_level_scores")
        lengths, live = response_mask.sum(-1), response_mask.any(-1)
        change = self.weight * ((self.most - self.buffer - lengths) / self.buffer).clamp(-1.0, 0.0)
        metrics.mean("overlong/penalty", -change[live].sum(), live.sum())
        last = response_mask & (response_mask.cumsum(-1) == lengths[:, None])
        return scores + torch.where(last, change[:, None], 0.0)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not (on := tokens_on(inputs["response_mask"], row)):
            return ""
        before, after = (c["token_level_scores"][row, on[-1]] for c in (inputs, outputs))
        length = f"({self.most} - {self.buffer} - {len(on)}) / {self.buffer}"
        penalty = f"{exact(before)} + {self.weight} * clip({length}, -1, 0)"
        return f"score + weight * clip((most - buffer - length) / buffer, -1, 0) = {penalty} = {exact(after)}"


class MaskOverlong(Operator):
    """Mask rows of more than `most` tokens: overlong filtering (DAPO: Yu et al. 2025, arXiv:2503.14476, §3.4).

    An update that reads this mask does not train on these rows. They remain in the batch, so mini-batches and groups do
    not change. ``wire={"update_actor.rollout.response_mask": "mask_overlong.response_mask"}``.

    Reports ``overlong/masked``, the share of masked rows.

    Args:
        most: maximum length in tokens; ``max_new_tokens - 1`` masks truncated responses.
    """

    granularity: ClassVar[Granularity] = "row"

    most: int = Field(ge=0)

    def __call__(self, response_mask: ResponseMask, metrics: Metrics = INJECTED) -> ResponseMask:
        longer = response_mask.sum(-1) > self.most
        metrics.mean("overlong/masked", longer.sum(), len(longer))
        return response_mask & ~longer[:, None]
