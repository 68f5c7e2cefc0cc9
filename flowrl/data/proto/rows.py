"""Which rows of a batch: slices, indices and masks as row numbers, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import DataError, FlowrlError

Rows = slice | Sequence[int] | Sequence[bool] | Tensor | np.ndarray
"""Which rows: a slice, indices, or a bool mask over all rows."""


def row_numbers(key: Any, rows: int) -> Tensor:
    """`key` as int64 row numbers on the CPU, each in ``[0, rows)``.

    Raises:
        DataError: an index out of range, a mask of another length, a single row number, or no `Rows` at all.
    """
    if isinstance(key, int | np.integer):
        raise DataError(f"proto[{key}] is one row, but a DataProto keeps its batch axis; use proto[{key}:{key + 1}].")
    try:
        if isinstance(key, slice):
            return torch.tensor(range(rows)[key], dtype=torch.int64)
        index = key.cpu().numpy() if isinstance(key, Tensor) else np.array(key)
    except (TypeError, ValueError) as error:  # a slice by something else than numbers, a list of unequal lists
        raise DataError(f"{key!r} does not pick rows ({error}); expected a slice, indices or a bool mask.") from error
    if index.dtype == bool and index.shape == (rows,):
        index = index.nonzero()[0]
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise DataError(
            f"an index of {index.dtype} {list(index.shape)} does not pick rows; expected int64 [n] or a bool mask "
            f"[{rows}] (select(...) picks columns)."
        )
    index = index.astype(np.int64)
    wrong = index[(index < -rows) | (index >= rows)]
    if len(wrong):
        raise DataError(f"row {wrong[0]} is out of range; this DataProto has {rows} rows.")
    return torch.from_numpy(np.where(index < 0, index + rows, index))


def is_count(n: Any, least: int = 1) -> bool:
    """Whether `n` is a whole number of at least `least`; True is none."""
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and int(n) >= least


def refuse_no_count(call: str, n: Any, what: str, error: type[FlowrlError] = DataError) -> None:
    """Refuse what is no whole number of at least 1.

    Args:
        call: the name of the function that was given it.
        n: what it was given.
        what: that is counted, for the message.
        error: what is raised.

    Raises:
        FlowrlError: of the class `error`.
    """
    if not is_count(n):
        raise error(f"{call}({n!r}): expected an int, at least 1 {what}.")
