"""Dealing out work to ranks in about equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def deal(weights: Sequence[int], ranks: int) -> list[int]:
    """The rank that each item goes to: the heaviest first, each to the rank that has the least yet (Graham 1969).

    So no rank has more than the average and the heaviest item together. Of equal items the earlier is dealt first, and
    of equal ranks the lower one takes it.

    Args:
        weights: of the items.
        ranks: how many there are.
    """
    loads = [(0, rank) for rank in range(ranks)]
    rank_of = [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        load, rank = min(loads)
        rank_of[item] = rank
        loads[rank] = (load + weights[item], rank)
    return rank_of


class Share(NamedTuple):
    """What one of several ranks is given of an operator's rows.

    Args:
        rank, ranks: which of how many.
        rows: int64, ascending, the rows that it is given; None where it is given all.
        tokens: int64 ``[rows of the step]``, the attended tokens of every row; None where they are not known.
    """

    rank: int
    ranks: int
    rows: Tensor | None
    tokens: Tensor | None


def weights_of(tokens: Tensor) -> Tensor:
    """What rows of so many tokens weigh where they are dealt out: int64 ``[rows]``.

    A token weighs more than all rows together, so rows only decide between ranks of equally many tokens.
    """
    return tokens.long() * (len(tokens) + 1) + 1


def split_rows(tokens: Tensor, ranks: int) -> list[Tensor]:
    """Deal rows to ranks so that each has about as many tokens, and of equal ones as many rows.

    Args:
        tokens: int64 ``[rows]``.
        ranks: how many shares.

    Returns:
        one int64 tensor of row numbers, ascending, per rank; some are empty where there are fewer rows than ranks.
    """
    rank_of = torch.tensor(deal(weights_of(tokens).tolist(), ranks), dtype=torch.int64)
    return [(rank_of == rank).nonzero().flatten() for rank in range(ranks)]
