"""Arithmetic on the columns of a `DataProto`: checks, padding, comparison, and a table to print."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrl.columns import PAD_SIDE, Side, lookup
from flowrl.data.files import size
from flowrl.errors import DataError, type_of

Objects = NDArray[np.object_]
Columns = Mapping[str, Tensor | Objects]
Pad = tuple[int | float | bool, Side]
Growth = Mapping[Side, tuple[int, int]]
"""By how much an axis of each side grows, as (left, right); a side is absent where that is unknown."""
Margin = Sequence[tuple[int, int]]
"""How far a part of a column is padded (left, right) along each axis after the first."""


def numbers_of_groups(uid: Objects) -> tuple[NDArray[np.int64], list[Any]]:
    """The number of each row's group, int64 ``[rows]``, and the groups in the order in which they first appear."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in uid.tolist()], dtype=np.int64), list(numbers)


def rows_of_groups(uid: Objects) -> dict[Any, list[int]]:
    """The rows of each group, ascending, in the order in which groups first appear."""
    rows: dict[Any, list[int]] = {}
    for row, group in enumerate(uid.tolist()):
        rows.setdefault(group, []).append(row)
    return rows


def objects(rows: Iterable[Any]) -> Objects:
    """A 1-d object array with one object per row; NumPy itself would make lists of equal length into a matrix."""
    items = list(rows)
    return np.fromiter(items, dtype=object, count=len(items))


def read_only(column: Objects) -> Objects:
    """The array itself, which can no longer be written to."""
    column.flags.writeable = False
    return column


def check_column(name: str, column: Any) -> Tensor | Objects:
    """The column, validated; object arrays come back as read-only views."""
    checked: Tensor | Objects
    if not isinstance(name, str) or not name or not name.isprintable():  # half a surrogate pair cannot be saved
        raise DataError(
            f"A column is named {name!r}. Expected a printable, non-empty str.", code="data.column-type", column=name
        )
    if isinstance(column, Tensor):
        if column.layout != torch.strided or column.is_nested or column.ndim == 0:
            found = "a nested tensor" if column.is_nested else f"a {column.layout} tensor of {column.ndim} axes"
            raise DataError(
                f"Column {name!r} is {found}. Expected a dense tensor with a batch axis: pad or unsqueeze it.",
                code="data.column-type",
                column=name,
                found=found,
            )
        checked, dtype = column, str(column.dtype).removeprefix("torch.")
    elif isinstance(column, np.ndarray):
        if column.dtype != object or column.ndim != 1:
            raise DataError(
                f"Column {name!r} is a NumPy array of {column.dtype} with {column.ndim} axes. Expected one object per "
                f"row (flowrl.data.objects(rows)), or a tensor for numbers (torch.from_numpy).",
                code="data.column-type",
                column=name,
                found=f"{column.dtype} {list(column.shape)}",
            )
        checked, dtype = read_only(column.view()), "object"
    else:
        raise DataError(
            f"Column {name!r} is {type_of(column)}. Expected a torch.Tensor or a NumPy object array.",
            code="data.column-type",
            column=name,
            found=type(column).__name__,
        )
    known = lookup(name)
    if known is not None and (known.dtype != dtype or len(known.axes) != checked.ndim):
        castable = "object" not in (dtype, known.dtype) and len(known.axes) == checked.ndim
        fix = f"Use .to(torch.{known.dtype})" if castable else "Convert it, or choose another name"
        raise DataError(
            f"Column {name!r} is {dtype} {list(checked.shape)}, but it is defined as {known}. {fix}.",
            code="data.column-definition",
            column=name,
            found=f"{dtype} {list(checked.shape)}",
            expected=str(known),
        )
    return checked


def own(column: Tensor | Objects) -> Tensor | Objects:
    """The column with its own storage: pickling a view of some rows would include all rows."""
    if not isinstance(column, Tensor) or column.untyped_storage().nbytes() <= column.nbytes:
        return column
    return column.detach().clone().requires_grad_(column.requires_grad)


def moved(columns: Columns, device: torch.device | str) -> dict[str, Tensor | Objects]:
    """The columns, with all tensors on `device`."""
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch without CUDA asserts
        first, _, _ = str(error).partition("\n")
        raise DataError(
            f"Cannot move the columns to {device!r} ({first}). Use a device of this machine, such as "
            f"{'cuda' if torch.cuda.is_available() else 'cpu'!r}.",
            code="backend.device",
            device=device,
        ) from error
    return {name: c.to(target) if isinstance(c, Tensor) else c for name, c in columns.items()}


def bind_axes(columns: Columns) -> dict[str, int]:
    """The width of every axis symbol of the known columns, except batch."""
    bound: dict[str, tuple[int, str]] = {}
    for name, column in columns.items():
        known = lookup(name)
        for axis, width in zip(known.axes[1:], column.shape[1:], strict=True) if known is not None else ():
            expected, where = bound.setdefault(axis, (width, name))
            if width != expected:
                raise DataError(
                    f"Axis {axis!r} is {width} wide in column {name!r} but {expected} in {where!r}. Pad both to one "
                    f"width.",
                    code="data.axis-mismatch",
                    axis=axis,
                    column=name,
                    other=where,
                    found=width,
                    expected=expected,
                )
    return {axis: width for axis, (width, _) in bound.items()}


def growth(axes: Sequence[Mapping[str, int]]) -> list[Growth]:
    """How the axes of several batches (each as from `bind_axes`, with the same symbols) grow to their common widths.

    If only one of prompt and response is among the symbols, the other is the rest of the sequence.
    """
    widths = [dict(a) for a in axes]
    for i, width in enumerate(widths):
        if "sequence" not in width or not {"prompt", "response"} & width.keys():
            continue
        width.setdefault("prompt", width["sequence"] - width.get("response", 0))
        width.setdefault("response", width["sequence"] - width["prompt"])
        if min(width.values()) < 0 or width["prompt"] + width["response"] != width["sequence"]:
            raise DataError(
                f"In batch {i} of concat the sequence axis is {width['sequence']} wide, but a sequence is a prompt "
                f"({width['prompt']}) followed by a response ({width['response']}). Build input_ids from these two.",
                code="data.axis-mismatch",
                index=i,
                found=width["sequence"],
                expected=width["prompt"] + width["response"],
            )
    grown: list[Growth] = []
    for width in widths:
        by = {axis: max(w[axis] for w in widths) - width[axis] for axis in ("prompt", "response") if axis in width}
        sides: dict[Side, tuple[int, int]] = {}
        if "prompt" in by:
            sides["left"] = (by["prompt"], 0)
        if "response" in by:
            sides["right"] = (0, by["response"])
        if len(by) == 2:
            sides["sequence"] = (by["prompt"], by["response"])
        grown.append(sides)
    return grown


def check_pad(name: str, column: Tensor | Objects, pad: Pad) -> None:
    """Refuse a ``(value, side)`` that `column` cannot be padded with."""
    value, side = pad if isinstance(pad, tuple) and len(pad) == 2 else (0, None)
    if side not in get_args(Side) or not isinstance(column, Tensor) or column.ndim < 2:
        raise DataError(
            f"pad={{{name!r}: {pad!r}}} does not apply to a column of shape {list(column.shape)}. Expected a tensor of "
            f"two axes, and a side out of {', '.join(get_args(Side))}.",
            code="data.padding",
            column=name,
            found=repr(pad),
        )
    if not torch.can_cast(torch.tensor(value).dtype, column.dtype):
        raise DataError(
            f"pad={{{name!r}: {pad!r}}}: {value!r} is not a value of {column.dtype}. Pass a value of this dtype.",
            code="data.padding",
            column=name,
            found=repr(pad),
        )


def concat_padded(name: str, parts: Sequence[Tensor], grown: Sequence[Growth], pad: Pad | None) -> Tensor:
    """One tensor of all rows; padded by `pad` along the second axis if given, else as defined for `name`."""
    for what in ("dtype", "device", "ndim"):
        if len(found := {str(getattr(part, what)) for part in parts}) > 1:
            raise DataError(
                f"Column {name!r} has several values of {what} in concat: {', '.join(sorted(found))}. Convert all "
                f"batches to one first.",
                code="data.concat-mismatch",
                column=name,
                found=sorted(found),
            )
    known = lookup(name)
    value: int | float | bool = known.pad if known is not None else 0
    sides: list[Side | None] = [None] * (parts[0].ndim - 1)
    if known is not None:
        sides = [PAD_SIDE.get(axis) for axis in known.axes[1:]]
    if pad is not None:
        value, sides[0] = pad
    shapes = [part.shape for part in parts]
    by_axis = [_margins(name, axis, [s[axis] for s in shapes], side, grown, pad) for axis, side in enumerate(sides, 1)]
    margins = [[margin[i] for margin in by_axis] for i in range(len(parts))]
    if not any(map(any, itertools.chain(*margins))):
        return torch.cat(list(parts))
    joined = parts[0].new_empty([sum(map(len, parts)), *padded_widths(parts[0], margins[0])])
    row = 0
    for part, margin in zip(parts, margins, strict=True):
        rows = slice(row, row + len(part))
        if any(map(any, margin)):
            joined[rows] = value
        paste(joined, rows, part, margin)
        row += len(part)
    return joined


def padded_widths(part: Tensor | Objects, margin: Margin) -> list[int]:
    """The widths of a part after padding, without batch."""
    return [left + width + right for (left, right), width in zip(margin, part.shape[1:], strict=True)]


def paste(whole: Tensor | Objects, rows: Any, part: Tensor | Objects, margin: Margin) -> None:
    """Write a part into these rows of a column; the padding around it is unchanged."""
    window = [slice(left, left + width) for (left, _), width in zip(margin, part.shape[1:], strict=True)]
    written: Any = part
    whole[(rows, *window)] = written


def margin_of(side: Side | None, grown: Growth) -> tuple[int, int]:
    """Padding (left, right) of an axis of this side; (0, 0) if unknown."""
    return grown.get(side, (0, 0)) if side is not None else (0, 0)


def _margins(
    name: str, axis: int, widths: Sequence[int], side: Side | None, grown: Sequence[Growth], pad: Pad | None
) -> list[tuple[int, int]]:
    """How far each part is padded (left, right) along `axis`, so that all are of one width."""
    if pad is not None and axis == 1 and side != "sequence":
        # the width of a column that flowrl does not know is independent of those of prompts and responses
        short = [max(widths) - width for width in widths]
        return [(n, 0) if side == "left" else (0, n) for n in short]
    margins = [margin_of(side, growth) for growth in grown]
    if len({left + width + right for width, (left, right) in zip(widths, margins, strict=True)}) == 1:
        return margins
    unequal = sorted(set(widths))
    fix = f'flowrl does not know how to pad it. Pass pad={{"{name}": (value, side)}}.'
    if side == "sequence":
        fix = "A sequence is padded as its prompt and response are. Concat it together with prompts or response_mask."
    raise DataError(
        f"Column {name!r} has the widths {unequal} along axis {axis} in concat. {fix}",
        code="data.concat-mismatch",
        column=name,
        axis=axis,
        found=unequal,
    )


def bits(tensor: Tensor) -> Tensor:
    """The rows of a tensor as raw bytes: uint8 ``[rows bytes]``, on the CPU, whatever strides and device were."""
    rows, width = len(tensor), math.prod(tensor.shape[1:])
    if tensor.numel() == 0:  # torch cannot view the strides of an empty NumPy array as bytes
        return torch.empty(rows, 0, dtype=torch.uint8)
    return tensor.detach().cpu().contiguous().reshape(rows, width).view(torch.uint8)


def difference(a: Tensor | Objects, b: Tensor | Objects) -> str | None:
    """The first difference of two columns (tensors bit for bit, objects by `same`) as text; None if equal."""
    if a is b:
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape):
        rows = (bits(a) != bits(b)).any(1).nonzero().flatten().tolist()
    elif not isinstance(a, Tensor) and not isinstance(b, Tensor) and len(a) == len(b):
        rows = [row for row, (x, y) in enumerate(zip(a, b, strict=True)) if not same(x, y)]
    else:
        return f"{a.dtype} {list(a.shape)} on one side and {b.dtype} {list(b.shape)} on the other"
    return f"first in row {rows[0]}, {short(a[rows[0]], 40)} and {short(b[rows[0]], 40)}" if rows else None


def same(a: Any, b: Any) -> bool:
    """Equal in type and value all the way down: 1, 1.0 and True differ, and so do 0.0 and -0.0; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype) and a.shape == b.shape and same(a.tolist(), b.tolist())
    if isinstance(a, Tensor):
        return difference(a[None], b[None]) is None
    return bool(a == b)


def table(columns: Columns) -> str:
    """The columns as lines of text: axes, dtype, kind, bytes, and the first row."""
    rows = [("column", "axes", "dtype", "kind", "bytes", "row 0"), *map(_describe, columns.items())]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _describe(item: tuple[str, Tensor | Objects]) -> tuple[str, ...]:
    name, column = item
    known = lookup(name)
    axes = known.axes if known is not None else ("batch",)
    shape = " ".join(f"{axes[i]}={n}" if i < len(axes) else str(n) for i, n in enumerate(column.shape))
    nbytes = size(column.nbytes) if isinstance(column, Tensor) else "-"
    kind = known.kind if known is not None else "-"
    sample = short(column[0], 40) if len(column) else "-"
    return name, shape, str(column.dtype).removeprefix("torch."), kind, nbytes, sample


def short(value: Any, width: int) -> str:
    """`value` on one line of at most `width` characters."""
    if isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim:
        text = f"{int(value.sum())} of {value.numel()} true"
    elif isinstance(value, Tensor):
        few = value.detach().flatten()[:6].tolist()
        items = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in few]
        text = ", ".join([*items, "…"] if value.numel() > len(few) else items)
        text = f"[{text}]" if value.ndim else text
    else:
        text = repr(value).replace("\n", " ")
    return text if len(text) <= width else text[: width - 1] + "…"
