"""The wire format of columns, between processes.

Tensors are sent as NumPy arrays, which Ray transfers out of band. A ragged ``[rows, width]`` column is sent without its
padding: runs of equal values at both ends of each row are removed, and restored on arrival, whatever the values are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.columns import PAD_SIDE
from flowrl.data.proto.column_math import growth, margin_of, padded_widths, paste
from flowrl.errors import DataError

Array = np.ndarray[Any, Any]

# Values are compared as integers of their size, so NaN equals NaN, and 0.0 differs from -0.0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Ends:
    """The runs that were removed from the ends of each row of a column ``[rows, width]``.

    Args:
        left, right: int32 ``[rows]``, the number of leading and trailing values.
        left_value, right_value: ``[rows]``, the value of each run.
    """

    left: Array
    right: Array
    left_value: Array
    right_value: Array
    width: int

    def mask(self) -> Array:
        """Bool ``[rows, width]``: the values that were not removed."""
        columns = np.arange(self.width, dtype=np.int32)
        return (columns >= self.left[:, None]) & (columns < (self.width - self.right)[:, None])


@dataclass(frozen=True)
class Packed:
    """A column on the wire.

    `flat` has the remaining values, row by row, or the full array without `ends`. `dtype` is None for objects.
    """

    flat: Array
    dtype: torch.dtype | None
    ends: Ends | None = None

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes; an object counts as a pointer."""
        e = self.ends
        arrays = [self.flat, *([e.left, e.right, e.left_value, e.right_value] if e is not None else [])]
        return sum(int(array.nbytes) for array in arrays)

    def take(self, rows: Array) -> Packed:
        """Some rows of the column, without unpacking the others."""
        if self.ends is None:
            return Packed(self.flat[rows], self.dtype)
        e = self.ends
        counts = np.maximum(e.width - e.left - e.right, 0)
        starts = np.cumsum(counts) - counts
        parts = [self.flat[starts[row] : starts[row] + counts[row]] for row in rows]
        ends = Ends(e.left[rows], e.right[rows], e.left_value[rows], e.right_value[rows], e.width)
        return Packed(np.concatenate(parts) if parts else self.flat[:0], self.dtype, ends)


def pack(column: Tensor | Array) -> Packed:
    """Pack a tensor ``[rows ...]`` of up to 8 bytes per element on any device, or objects ``[rows]``.

    A column with little padding is sent unchanged.
    """
    if not isinstance(column, Tensor):
        return Packed(column, None)
    array: Array = column.detach().cpu().contiguous().view(_BITS[column.element_size()]).numpy()
    unchanged = Packed(array, column.dtype)
    if array.ndim != 2 or array.size == 0:
        return unchanged
    width = array.shape[1]
    left, right = _run(array), _run(array[:, ::-1])  # both equal the width if a row has a single value
    values = np.ascontiguousarray(array[:, 0]), np.ascontiguousarray(array[:, -1])
    ends = Ends(left.astype(np.int32), right.astype(np.int32), *values, width)
    packed = Packed(array[ends.mask()], column.dtype, ends)
    return packed if packed.nbytes < unchanged.nbytes else unchanged


def _run(array: Array) -> Array:
    """Per row, the number of leading values that equal the first."""
    other = array != array[:, :1]
    run: Array = np.where(other.any(axis=1), other.argmax(axis=1), array.shape[1])
    return run


def unpack(packed: Packed) -> Tensor | Array:
    """The column that was packed, bit for bit, on the CPU."""
    array, ends = packed.flat, packed.ends
    if packed.dtype is None:
        return array
    if ends is not None:
        leading = np.arange(ends.width, dtype=np.int32) < ends.left[:, None]
        array = np.where(leading, ends.left_value[:, None], ends.right_value[:, None])
        array[ends.mask()] = packed.flat
    # arrays from the object store are read-only, and torch has no read-only tensors
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(packed.dtype)


def widths(sizes: Mapping[str, int], read: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """The widths of prompts and responses.

    `sizes` are those of the written axes, by name; `read` are the widths of the inputs, for axes that were not written.
    """
    response = sizes.get("response", read[1])
    if "prompt" in sizes:
        return sizes["prompt"], response
    return sizes["sequence"] - response if "sequence" in sizes else read[0], response


@dataclass(frozen=True)
class ColumnPart:
    """Some rows of a column, as one host wrote them.

    Args:
        rows: int64, the indices of these rows in the node's output.
        ref: the `Packed` column in the object store.
        prompt, response: widths of these axes on that host, for padding pieces to one width.
        nbytes: size on the wire.
    """

    rows: Array
    ref: Any
    prompt: int
    response: int
    nbytes: int


def join(
    parts: Sequence[tuple[Array, Tensor | Array, int, int]],
    axes: Sequence[str],
    pad: Any,
    selected: Array,
    least: tuple[int, int] = (0, 0),
) -> Tensor | Array:
    """One column of the `selected` rows, from pieces of unequal width, padded as by `DataProto.concat`.

    Args:
        parts: per piece its rows, its column, and its widths of prompt and response; at least one.
        axes: the column's axes by name; ``prompt`` is padded on the left, ``response`` on the right, and a ``sequence``
            is a prompt followed by its response.
        pad: the pad value.
        selected: int64, the rows of the result, in order; each at most once.
        least: minimal widths of prompts and responses, for a batch with wider pieces in other columns.
    """
    *grown, _ = growth([{"prompt": p, "response": r} for p, r in (*((p, r) for *_, p, r in parts), least)])
    margins = [[margin_of(PAD_SIDE.get(axis), own) for axis in axes[1:]] for own in grown]
    shapes = {tuple(padded_widths(column, own)) for (_, column, *_), own in zip(parts, margins, strict=True)}
    if len(shapes) > 1:
        raise DataError(
            f"Pieces of a column [{' '.join(axes)}] have the shapes {sorted(shapes)} after padding prompts and "
            f"responses. Make the node write the same width of all other axes on each of its ranks.",
            code="host.unequal-pieces",
            axes=axes,
            found=sorted(shapes),
        )
    targets = _targets([rows for rows, *_ in parts], selected)
    first = parts[0][1]
    if len(parts) == 1 and np.array_equal(parts[0][0], selected) and {tuple(first.shape[1:])} == shapes:
        return first  # without a copy
    joined: Tensor | Array = (
        first.new_full((len(selected), *shapes.pop()), pad)
        if isinstance(first, Tensor)
        else np.empty(len(selected), dtype=object)
    )
    for (_, column, *_), margin, target in zip(parts, margins, targets, strict=True):
        taken = np.flatnonzero(target >= 0)
        paste(joined, target[taken], column[taken], margin)
    return joined


def _targets(rows: Sequence[Array], selected: Array) -> list[Array]:
    """For each row of each piece its position in the result, or -1 if it is not selected."""
    given = np.concatenate(rows)
    size = 1 + max(int(given.max(initial=-1)), int(selected.max(initial=-1)))
    times, needed = np.bincount(given, minlength=size), np.bincount(selected, minlength=size)
    if len(wrong := np.flatnonzero(needed * times != (needed > 0))):
        row = int(wrong[0])
        raise DataError(
            f"Row {row} of a column was written {times[row]} time(s) and is read {needed[row]} time(s); expected one "
            f"each ({len(wrong)} row(s) are wrong). Make the node write each row on exactly one rank.",
            code="host.unequal-pieces",
            row=row,
            found=int(times[row]),
            read=int(needed[row]),
            count=len(wrong),
        )
    position = np.full(size, -1, dtype=np.int64)
    position[selected] = np.arange(len(selected))
    return [position[own] for own in rows]
