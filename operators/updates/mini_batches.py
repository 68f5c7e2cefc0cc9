"""The mini-batches of an update: which rows each has, and which part of them each rank computes."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.data.balance import Share, split_rows
from flowrl.data.keys import Key
from flowrl.data.proto.column_math import rows_of_groups
from flowrl.errors import DataError
from flowrl.protocols.protocols import MiniBatch, WholeMiniBatch


def draw_rows(
    rows: int, mini_batch: int | None, epochs: int, key: Key, groups: np.ndarray | None = None
) -> list[Tensor]:
    """The rows of each optimiser step of one update: per epoch, a seeded permutation that is cut into mini-batches.

    Args:
        rows: how many there are.
        mini_batch: rows of a mini-batch; None takes all rows at once, in their order.
        epochs: passes over the rows.
        key: what the permutations are drawn from.
        groups: ``[rows]``, the group of each row, where groups must stay together; they are permuted as wholes.

    Raises:
        DataError: there are no rows, or `mini_batch` does not divide them, or it cuts a group.
    """
    size = rows if mini_batch is None else mini_batch
    if rows == 0 or rows % size:
        raise DataError(
            f"{rows} rows cannot be cut into equal mini-batches (mini_batch={mini_batch}); expected at least one row, "
            f"and a divisor of prompts x n: change mini_batch, the prompts a step, or Repeat(n)."
        )
    drawn: list[Tensor] = []
    for epoch in range(epochs):
        generator = key.derive("epoch", epoch).generator()
        if size == rows:
            # One mini-batch of all rows keeps their order, and so the micro-batches of OldLogProb: ratios are 1.
            drawn.append(torch.arange(rows))
        elif groups is None:
            drawn += torch.randperm(rows, generator=generator).split(size)
        else:
            drawn += _permuted(groups, size, generator).split(size)
    return drawn


def _permuted(groups: np.ndarray, size: int, generator: torch.Generator) -> Tensor:
    """All rows, group after group in drawn order, where no group stands on both sides of a cut."""
    members = rows_of_groups(groups)
    names = list(members)
    order = [row for index in torch.randperm(len(names), generator=generator).tolist() for row in members[names[index]]]
    for cut in range(size, len(order), size):
        if groups[order[cut - 1]] == groups[order[cut]]:
            group = groups[order[cut]]
            raise DataError(
                f"mini_batch={size} cuts the group {str(group)!r} of {len(members[group])} rows, and the loss is over "
                f"whole groups; expected a multiple of the rows that each group has: mini_batch="
                f"{-(-size // len(members[group])) * len(members[group])}, or None for all rows."
            )
    return torch.tensor(order)


def rank_rows(rows: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    """The rows that each rank computes on, given those of all mini-batches: int64, ascending, for each rank."""
    parts = [[index[own] for own in split_rows(tokens[index], ranks)] for index in rows]
    return [torch.cat([part[rank] for part in parts]).unique() for rank in range(ranks)]


def rank_parts(
    drawn: Sequence[Tensor],
    weigh: Callable[[Tensor], Tensor],
    response_mask: Tensor,
    attention_mask: Tensor,
    share: Share | None,
    whole: Mapping[str, Any] | None = None,
) -> list[MiniBatch]:
    """The part that a rank has in each mini-batch; the weights of its tokens are those of the whole.

    Args:
        drawn: the rows of whole mini-batches, by the rows of the step.
        weigh: the weights of the tokens of a whole mini-batch, given its mask.
        response_mask: bool ``[rows of the step, response]``.
        attention_mask: bool ``[rows of the rank, sequence]``, or any that says how long rows are.
        share: what the rank is given; None is everything.
        whole: the columns of all rows of the step, of a loss that sees whole mini-batches.

    Returns:
        mini-batches by the rows of the rank.
    """
    if share is not None:
        tokens = attention_mask.sum(1) if share.tokens is None else share.tokens
        rows = torch.arange(len(tokens)) if share.rows is None else share.rows
    parts = []
    for index in drawn:
        weights = weigh(response_mask[index])
        own = torch.arange(len(index)) if share is None else split_rows(tokens[index].cpu(), share.ranks)[share.rank]
        mine = index if share is None else torch.searchsorted(rows, index[own])
        seen = (
            None
            if whole is None
            else WholeMiniBatch(record({n: _at(x, index) for n, x in whole.items()}), weights, own)
        )
        parts.append(MiniBatch(mine, weights[own], seen))
    return parts


def own_rows(column: Any, share: Share | None) -> Any:
    """The rows of a rank, of a column that it is given whole."""
    return column if share is None or share.rows is None else _at(column, share.rows)


def _at(column: Any, rows: Tensor) -> Any:
    if isinstance(column, Tensor):
        return column[rows]
    return column[rows.numpy()] if isinstance(column, np.ndarray) else column  # a value is the same for all rows


def record(columns: Mapping[str, Any]) -> Any:
    """The columns as a NamedTuple, which trainers cut into micro-batches."""
    return _record_class(tuple(columns))(**columns)


@functools.lru_cache(maxsize=64)
def _record_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Columns", names)
