"""Answers that are too long: taken off the score softly, or left out of the loss (DAPO: Yu et al. 2025,
arXiv:2503.14476, §3.4)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.per_token import select_rewards


class OverlongPenalty(Operator):
    """Scores less a penalty that grows over the last tokens of the length that is allowed (DAPO: Yu et al. 2025,
    arXiv:2503.14476, eq. 13).

    With l tokens on the mask, the score of a row's last token changes by ``weight * clip((most - buffer - l) / buffer,
    -1, 0)``: nothing up to ``most - buffer`` tokens, then a straight line, and ``-weight`` from `most` on.

    Reports ``overlong/penalty``, the mean over rows with a token on the mask.

    Args:
        most: the length at which the penalty is whole, in tokens: ``max_new_tokens``.
        buffer: over how many tokens it grows, at most `most`.
        weight: the whole penalty.

    Raises:
        ParameterError: `buffer` is larger than `most`.
        DataError: a score off the mask.
    """

    granularity: ClassVar[Granularity] = "row"

    most: int = Field(ge=1)
    buffer: int = Field(ge=1)
    weight: float = Field(default=1.0, gt=0)

    def __post_init__(self) -> None:
        if self.buffer > self.most:
            raise ParameterError(
                f"buffer={self.buffer} is more than most={self.most}, so an answer without tokens would be punished; "
                f"expected a part of it, such as buffer={max(1, self.most // 5)}"
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


class MaskOverlong(Operator):
    """A mask without the rows of more tokens than `most`: overlong filtering (DAPO: Yu et al. 2025, arXiv:2503.14476,
    §3.4).

    An update that reads it does not train on them; they stay where they are, so mini-batches and groups keep their
    rows. ``wire={"update_actor.rollout.response_mask": "mask_overlong.response_mask"}``.

    Reports ``overlong/masked``, the share of rows that it takes out.

    Args:
        most: tokens; ``max_new_tokens - 1`` takes out what was cut off.
    """

    granularity: ClassVar[Granularity] = "row"

    most: int = Field(ge=0)

    def __call__(self, response_mask: ResponseMask, metrics: Metrics = INJECTED) -> ResponseMask:
        longer = response_mask.sum(-1) > self.most
        metrics.mean("overlong/masked", longer.sum(), len(longer))
        return response_mask & ~longer[:, None]
