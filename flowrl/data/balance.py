"""Distribute work over ranks in about equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def deal(weights: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the heaviest first, each to the rank with the smallest load (Graham 1969).

    No load exceeds the mean by more than the heaviest item. Ties go to the earlier item and the lower rank.
    """
    loads = [(0, rank) for rank in range(ranks)]
    rank_of = [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        load, rank = min(loads)
        rank_of[item] = rank
        loads[rank] = (load + weights[item], rank)
    return rank_of


class Shard(NamedTuple):
    """The rows of one of several data ranks.

    Args:
        data_rank, data_ranks: the number of this data rank, and how many there are.
        rows: int64, ascending, its rows; None for all.
        tokens: int64 ``[rows of the step]``, the attended tokens of every row; None if unknown.
    """

    data_rank: int
    data_ranks: int
    rows: Tensor | None
    tokens: Tensor | None


def weights_of(tokens: Tensor) -> Tensor:
    """The weight of each row for `deal`, from its number of tokens: int64 ``[rows]``.

    A token outweighs all rows together, so the number of rows only breaks ties.
    """
    return tokens.long() * (len(tokens) + 1) + 1


def split_rows(tokens: Tensor, ranks: int) -> list[Tensor]:
    """Distribute rows over ranks by tokens (int64 ``[rows]``), then by rows; per rank the int64 row numbers, ascending.

    Some are empty if there are fewer rows than ranks.
    """
    rank_of = torch.tensor(deal(weights_of(tokens).tolist(), ranks), dtype=torch.int64)
    return [(rank_of == rank).nonzero().flatten() for rank in range(ranks)]
