"""Which rows go on: `Filter`, and operators that decide, one bool a row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from flowrl.columns import Kept, ResponseMask, TokenLevelScores, Uid
from flowrl.core.gate import Gate, pick, refuse_none
from flowrl.core.operator import Granularity, Operator
from flowrl.data.metrics import Metrics


class Spread(Operator):
    """Groups whose scores differ: in the others no answer teaches anything (DAPO: Yu et al. 2025, arXiv:2503.14476,
    eq. 11).

    A row's score is the sum of its token-level scores. Rows that are masked entirely have none; they go with their
    group, and do not count in it.

    Args:
        least: how far apart the best and the worst score of a group are at least; a group whose scores are all the same
            never passes.

    Returns:
        bool ``[batch]``, the same for all rows of a group.
    """

    granularity: ClassVar[Granularity] = "group"
    least: float = Field(default=0.0, ge=0)

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid) -> Kept:
        names: dict[object, int] = {}
        group = torch.tensor([names.setdefault(name, len(names)) for name in uid.tolist()], dtype=torch.int64)
        scores = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64).cpu()
        live = response_mask.any(-1).cpu()
        worst = torch.full((len(names),), torch.inf, dtype=torch.float64)
        best = -worst
        worst.scatter_reduce_(0, group[live], scores[live], "amin")
        best.scatter_reduce_(0, group[live], scores[live], "amax")
        apart = best - worst  # -inf for a group without a score
        return ((apart > 0) & (apart >= self.least))[group]


class Length(Operator):
    """Rows whose response is of a length within bounds, in tokens on the mask.

    ``Length(most=1023)`` leaves out what was cut off at 1024.

    Args:
        least, most: tokens, bounds included; None is no upper bound.
    """

    granularity: ClassVar[Granularity] = "row"
    least: int = Field(default=1, ge=0)
    most: int | None = Field(default=None, ge=0)

    def __call__(self, response_mask: ResponseMask) -> Kept:
        lengths = response_mask.sum(-1)
        kept = lengths >= self.least
        return kept if self.most is None else kept & (lengths <= self.most)


class Filter(Gate):
    """Lets rows through: the same records out as in, on rows of their own.

    ``edit(insert={"filter": After("reward", Filter(Spread()))})`` leads all through it that is read behind ``reward``
    and was made before. How many rows remain is known once it has run, so ``mini_batch`` behind it is refused (FR004);
    a validation runs without it, on all rows.

    Args:
        keep: an operator that writes one bool a row, such as `Spread` or one of your own.

    Reads:
        what `keep` reads, and all that passes.

    Returns:
        what passes. Metrics: ``<node>/offered`` and ``<node>/kept`` in rows; ``reward/kept_mean`` where scores pass.

    Raises:
        DataError: no row is kept.
    """

    def passed(self, rows: Any, metrics: Metrics, **given: Any) -> Any:
        """The rows that `keep` keeps."""
        kept = self.kept(metrics, given)
        if not kept.any():
            refuse_none(self, len(kept), "rows")
        out = type(rows)(*(pick(column, kept) for column in rows))
        metrics.sum(f"{self.name}/offered", len(kept))
        metrics.sum(f"{self.name}/kept", kept.sum())
        report_scores(out, metrics)
        return out


def report_scores(rows: Any, metrics: Metrics) -> None:
    """Report ``reward/kept_mean`` of what passes, where it has scores: the mean over rows with a token on the mask, as
    ``reward/mean`` is over those that were offered."""
    if {"token_level_scores", "response_mask"} <= set(rows._fields):
        live = rows.response_mask.any(-1)
        metrics.mean("reward/kept_mean", rows.token_level_scores[live].double().sum(), live.sum())
