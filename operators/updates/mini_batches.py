"""The mini-batches of an update, and the rows of them that each rank computes."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.data.balance import Shard, split_rows
from flowrl.data.keys import Key
from flowrl.data.proto.column_math import rows_of_groups
from flowrl.errors import DataError
from flowrl.protocols.protocols import MiniBatch, ReplicatedMiniBatch


def mini_batch_rows(
    rows: int, mini_batch: int | None, epochs: int, key: Key, groups: np.ndarray | None = None
) -> list[Tensor]:
    """The rows of each optimizer step of an update: per epoch, a seeded permutation split into mini-batches.

    Args:
        rows: number of rows.
        mini_batch: rows per mini-batch; None is a single mini-batch of all rows, in order.
        epochs: passes over the rows.
        key: random key of the permutations.
        groups: ``[rows]``, the group of each row, for losses over groups: groups are permuted as units.
    """
    size = rows if mini_batch is None else mini_batch
    if rows == 0 or rows % size:
        raise DataError(
            f"{rows} rows cannot be split into equal mini-batches (mini_batch={mini_batch}), expected at least one row "
            f"and a divisor of prompts x n. Change mini_batch, the prompts per step, or Repeat(n).",
            code="update.invalid-mini-batch",
            given=mini_batch,
            rows=rows,
        )
    mini_batches: list[Tensor] = []
    for epoch in range(epochs):
        generator = key.derive("epoch", epoch).generator()
        if size == rows:
            # Keep the order of the rows, and so the micro-batches of OldLogProb: ratios are exactly 1.
            mini_batches.append(torch.arange(rows))
        elif groups is None:
            mini_batches += torch.randperm(rows, generator=generator).split(size)
        else:
            mini_batches += _permuted(groups, size, generator).split(size)
    return mini_batches


def _permuted(groups: np.ndarray, size: int, generator: torch.Generator) -> Tensor:
    """All rows, by groups in random order; refuses a mini-batch size that splits a group."""
    members = rows_of_groups(groups)
    names = list(members)
    order = [row for index in torch.randperm(len(names), generator=generator).tolist() for row in members[names[index]]]
    for cut in range(size, len(order), size):
        if groups[order[cut - 1]] == groups[order[cut]]:
            group = groups[order[cut]]
            multiple = -(-size // len(members[group])) * len(members[group])
            raise DataError(
                f"mini_batch={size} splits the group {str(group)!r} of {len(members[group])} rows, and the loss needs "
                f"complete groups. Pass a multiple of the group size, mini_batch={multiple}, or None for all rows.",
                code="update.invalid-mini-batch",
                given=size,
                rows=len(order),
                uid=str(group),
            )
    return torch.tensor(order)


def rank_rows(rows: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    """The rows of each rank, given those of all mini-batches: int64 in ascending order."""
    parts = [[index[own] for own in split_rows(tokens[index], ranks)] for index in rows]
    return [torch.cat([part[rank] for part in parts]).unique() for rank in range(ranks)]


def rank_parts(
    mini_batches: Sequence[Tensor],
    weigh: Callable[[Tensor], Tensor],
    response_mask: Tensor,
    attention_mask: Tensor,
    shard: Shard | None,
    all_rows: Mapping[str, Any] | None = None,
) -> list[MiniBatch]:
    """The part of each mini-batch that a rank computes, by the row numbers of the rank.

    Args:
        mini_batches: row numbers of the mini-batches, in the step.
        weigh: computes the token weights of a mini-batch from its mask.
        response_mask: bool ``[rows of the step, response]``.
        attention_mask: bool ``[rows of the rank, sequence]``, or any mask with the lengths of the rows.
        shard: the shard of the rank; None is everything.
        all_rows: the columns of all rows of the step, for a loss that needs complete mini-batches.
    """
    if shard is not None:
        tokens = attention_mask.sum(1) if shard.tokens is None else shard.tokens
        rows = torch.arange(len(tokens)) if shard.rows is None else shard.rows
    parts = []
    for index in mini_batches:
        weights = weigh(response_mask[index])
        own = (
            torch.arange(len(index))
            if shard is None
            else split_rows(tokens[index].cpu(), shard.data_ranks)[shard.data_rank]
        )
        mine = index if shard is None else torch.searchsorted(rows, index[own])
        seen = (
            None
            if all_rows is None
            else ReplicatedMiniBatch(record({n: _at(x, index) for n, x in all_rows.items()}), weights, own)
        )
        parts.append(MiniBatch(mine, weights[own], seen))
    return parts


def own_rows(column: Any, shard: Shard | None) -> Any:
    """The rows of a rank, of a column with all rows."""
    return column if shard is None or shard.rows is None else _at(column, shard.rows)


def _at(column: Any, rows: Tensor) -> Any:
    if isinstance(column, Tensor):
        return column[rows]
    return column[rows.numpy()] if isinstance(column, np.ndarray) else column  # a value for all rows


def record(columns: Mapping[str, Any]) -> Any:
    """The columns as a NamedTuple, which trainers split into micro-batches."""
    return _record_class(tuple(columns))(**columns)


@functools.lru_cache(maxsize=64)
def _record_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Columns", names)
