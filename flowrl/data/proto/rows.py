"""Selecting rows of a batch: slices, indices and masks as row numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import DataError, FlowrlError

Rows = slice | Sequence[int] | Sequence[bool] | Tensor | np.ndarray
"""A selection of rows: a slice, indices, or a bool mask over all rows."""


def row_numbers(key: Any, rows: int) -> Tensor:
    """`key` as int64 row numbers on the CPU, each in ``[0, rows)``."""
    if isinstance(key, int | np.integer):
        raise DataError(
            f"proto[{key}] selects a single row, but a DataProto always has a batch axis. Use proto[{key}:{key + 1}].",
            code="data.row-selection",
            found=int(key),
            rows=rows,
        )
    try:
        if isinstance(key, slice):
            return torch.tensor(range(rows)[key], dtype=torch.int64)
        index = key.cpu().numpy() if isinstance(key, Tensor) else np.array(key)
    except (TypeError, ValueError) as error:  # a slice of non-numbers, a list of unequal lists
        raise DataError(
            f"{key!r} does not select rows ({error}). Pass a slice, indices or a bool mask.",
            code="data.row-selection",
            found=repr(key),
            rows=rows,
        ) from error
    if index.dtype == bool and index.shape == (rows,):
        index = index.nonzero()[0]
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise DataError(
            f"An index of {index.dtype} {list(index.shape)} does not select rows. Pass int64 [n] or a bool mask "
            f"[{rows}], or use select(...) for columns.",
            code="data.row-selection",
            found=f"{index.dtype} {list(index.shape)}",
            rows=rows,
        )
    index = index.astype(np.int64)
    wrong = index[(index < -rows) | (index >= rows)]
    if len(wrong):
        raise DataError(
            f"Row {wrong[0]} is out of range: this DataProto has {rows} rows. Select rows {-rows} to {rows - 1}.",
            code="data.row-selection",
            row=int(wrong[0]),
            rows=rows,
        )
    return torch.from_numpy(np.where(index < 0, index + rows, index))


def is_count(n: Any, least: int = 1) -> bool:
    """Whether `n` is an integer (not a bool) of at least `least`."""
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and int(n) >= least


def refuse_no_count(call: str, n: Any, what: str, error: type[FlowrlError] = DataError) -> None:
    """Raise `error` if `n`, the number of `what` that `call` was given, is not an integer of at least 1."""
    if not is_count(n):
        raise error(f"{call}({n!r}): expected an int, at least 1 {what}.", code="data.not-a-count", call=call, found=n)
