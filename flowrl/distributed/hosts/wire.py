"""The wire format of a column, in which it crosses a process boundary.

Tensors travel as NumPy arrays, which Ray hands over out of band. A ragged ``[rows, width]`` column travels without its
padding: each row loses the run of equal values at either end, and gets it back on arrival. This is exact whatever the
column holds, so nothing needs to know where a column is padded or with what.
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

# Values travel as integers of their size: equal bits are equal, so NaN is, and 0.0 and -0.0 are not.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Ends:
    """The runs that each row of a column ``[rows, width]`` lost at its ends.

    Args:
        left, right: int32 ``[rows]``, how many leading and trailing values.
        left_value, right_value: ``[rows]``, the value of each run.
        width: the column's width.
    """

    left: Array
    right: Array
    left_value: Array
    right_value: Array
    width: int

    def kept(self) -> Array:
        """Bool ``[rows, width]``: which values are left."""
        columns = np.arange(self.width, dtype=np.int32)
        return (columns >= self.left[:, None]) & (columns < (self.width - self.right)[:, None])


@dataclass(frozen=True)
class Packed:
    """A column on the wire.

    Args:
        flat: the values that are left, row after row; or the whole array where there are no `ends`.
        dtype: the column's dtype; None for objects.
        ends: what was removed.
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
        """Some rows of the column, by their numbers, without unpacking the others."""
        if self.ends is None:
            return Packed(self.flat[rows], self.dtype)
        e = self.ends
        counts = np.maximum(e.width - e.left - e.right, 0)
        starts = np.cumsum(counts) - counts
        parts = [self.flat[starts[row] : starts[row] + counts[row]] for row in rows]
        ends = Ends(e.left[rows], e.right[rows], e.left_value[rows], e.right_value[rows], e.width)
        return Packed(np.concatenate(parts) if parts else self.flat[:0], self.dtype, ends)


def pack(column: Tensor | Array) -> Packed:
    """A column as it travels: a tensor ``[rows ...]`` of up to 8 bytes an element on any device, or objects ``[rows]``.

    Where there is little padding, the column is sent whole.
    """
    if not isinstance(column, Tensor):
        return Packed(column, None)
    array: Array = column.detach().cpu().contiguous().view(_BITS[column.element_size()]).numpy()
    whole = Packed(array, column.dtype)
    if array.ndim != 2 or array.size == 0:
        return whole
    width = array.shape[1]
    left, right = _run(array), _run(array[:, ::-1])  # each the whole width where a row is of one value
    values = np.ascontiguousarray(array[:, 0]), np.ascontiguousarray(array[:, -1])
    ends = Ends(left.astype(np.int32), right.astype(np.int32), *values, width)
    packed = Packed(array[ends.kept()], column.dtype, ends)
    return packed if packed.nbytes < whole.nbytes else whole


def _run(array: Array) -> Array:
    """Per row, how many values at its start equal the first."""
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
        array[ends.kept()] = packed.flat
    # arrays from the object store are read-only, and torch has no read-only tensors
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(packed.dtype)


def widths(sizes: Mapping[str, int], read: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """How wide prompts and responses are.

    Args:
        sizes: of the axes of what was written.
        read: what was read had these widths, which hold for axes that were not written.
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
        prompt, response: widths of these axes where the column was written, for padding pieces to one width.
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
    wanted: Array,
    least: tuple[int, int] = (0, 0),
) -> Tensor | Array:
    """One column of the `wanted` rows, from pieces of unequal width, padded as by `DataProto.concat`.

    Args:
        parts: per piece its rows, its column, and its widths of prompt and response; at least one.
        axes: the column's axes by name; ``prompt`` is padded on the left, ``response`` on the right, and a ``sequence``
            is a prompt with its response.
        pad: the value to fill with.
        wanted: int64, the rows of the result, in order; each at most once.
        least: how wide prompts and responses become at least, where other pieces of the batch are wider.

    Raises:
        DataError: a wanted row is in no piece or in several, or pieces differ in an axis that is not padded.
    """
    *grown, _ = growth([{"prompt": p, "response": r} for p, r in (*((p, r) for *_, p, r in parts), least)])
    margins = [[margin_of(PAD_SIDE.get(axis), own) for axis in axes[1:]] for own in grown]
    shapes = {tuple(padded_widths(column, own)) for (_, column, *_), own in zip(parts, margins, strict=True)}
    if len(shapes) > 1:
        raise DataError(
            f"pieces of a column [{' '.join(axes)}] have the widths {sorted(shapes)} once prompts and responses are "
            f"padded alike; expected one: the ranks of the node that wrote it must agree on its other axes."
        )
    targets = _targets([rows for rows, *_ in parts], wanted)
    first = parts[0][1]
    if len(parts) == 1 and np.array_equal(parts[0][0], wanted) and {tuple(first.shape[1:])} == shapes:
        return first  # as it is, without a copy
    whole: Tensor | Array = (
        first.new_full((len(wanted), *shapes.pop()), pad)
        if isinstance(first, Tensor)
        else np.empty(len(wanted), dtype=object)
    )
    for (_, column, *_), margin, target in zip(parts, margins, targets, strict=True):
        taken = np.flatnonzero(target >= 0)
        paste(whole, target[taken], column[taken], margin)
    return whole


def _targets(rows: Sequence[Array], wanted: Array) -> list[Array]:
    """For each row of each piece its place in the result, or -1 where it is not wanted."""
    given = np.concatenate(rows)
    size = 1 + max(int(given.max(initial=-1)), int(wanted.max(initial=-1)))
    times, asked = np.bincount(given, minlength=size), np.bincount(wanted, minlength=size)
    if len(wrong := np.flatnonzero(asked * times != (asked > 0))):
        row = int(wrong[0])
        raise DataError(
            f"row {row} of a column is wanted {asked[row]} time(s) and was written {times[row]} time(s), as are "
            f"{len(wrong)} row(s) in all; expected every row once: the ranks that wrote it must share the rows out."
        )
    place = np.full(size, -1, dtype=np.int64)
    place[wanted] = np.arange(len(wanted))
    return [place[own] for own in rows]
