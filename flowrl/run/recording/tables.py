"""Columns of a step as Parquet tables, exact in both directions.

A column with tokens is a list per row, without the padding at the end (prompts: at the start). Widths and pad values
are in the metadata, so the tensor comes back with the same bits. A column with the same bits as an earlier one, or as
two of them next to each other (``input_ids`` is ``prompts`` and ``responses``), is not written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from flowrl.columns import PAD_SIDE, ColumnType
from flowrl.data.proto.column_math import Objects, objects
from flowrl.run.recording.files import reading_parquet, writing_parquet

Column = Tensor | Objects
ROWS_PER_GROUP = 64
"""The fewest rows of a row group: reading one row reads one group of each column."""
TOKENS_PER_GROUP = 1 << 16
"""Rows with few tokens share a row group of up to so many: each group of a column costs tens of microseconds."""

_META = b"flowrl"
_FLOATS = {torch.float32, torch.float64}


@dataclass(frozen=True)
class Typed:
    """A column with its type and the identity of its row axis."""

    column: Column
    type: ColumnType


def is_recordable(typed: ColumnType) -> bool:
    """Whether a column has one number or object per row, or one number per token; larger ones are not recorded."""
    return len(typed.axes) == 1 or (len(typed.axes) == 2 and typed.axes[1] in PAD_SIDE)


def write_columns(path: Path, columns: Mapping[str, Typed], about: Mapping[str, Any]) -> None:
    """Write the columns of one row axis, by ``node.column``, atomically.

    Objects that JSON does not restore are written as text, and marked.
    """
    described: dict[str, dict[str, Any]] = {}
    arrays: dict[str, pa.Array] = {}
    written: dict[str, Tensor] = {}
    for name, typed in columns.items():
        column = typed.column
        if not isinstance(column, Tensor):
            arrays[name], described[name] = _from_objects(column)
            continue
        column = column.detach().cpu().contiguous()
        if (source := _derived_from(column, written)) is not None:
            described[name] = {"dtype": _name(column), "shape": list(column.shape), **source}
            continue
        written[name] = column
        described[name] = {"dtype": _name(column), "shape": list(column.shape)}
        if column.ndim == 2:
            side, pad = PAD_SIDE[typed.type.axes[1]], typed.type.pad
            arrays[name] = _from_tokens(column, "left" if side == "left" else "right", pad)
            described[name] |= {"side": "left" if side == "left" else "right", "pad": pad}
        else:
            arrays[name] = pa.array(_numbers(column))
    table = pa.table(arrays) if arrays else pa.table({"": pa.nulls(0)})
    meta = json.dumps({**about, "columns": described}).encode()
    _write(path, table.replace_schema_metadata({_META: meta}), written)


def read_columns(path: Path, names: Iterable[str] | None = None) -> dict[str, Column]:
    """The columns of a file that `write_columns` wrote, by ``node.column``: all, or those named that it has.

    Raises:
        DataError: the file is damaged.
    """
    with reading_parquet(path):
        file = pq.ParquetFile(path)
        described = described_in(file)["columns"]
        wanted = list(described) if names is None else [name for name in names if name in described]
        return _restored(file, described, wanted)


def read_row(path: Path, row: int) -> dict[str, Any]:
    """One row of every column, without padding: an array for tokens, else the number or object.

    Raises:
        DataError: the file is damaged.
    """
    with reading_parquet(path):
        file = pq.ParquetFile(path)
        described = described_in(file)["columns"]
        groups = file.metadata.num_row_groups
        group, at = divmod(row, file.metadata.row_group(0).num_rows) if groups else (0, 0)
        table = file.read_row_group(group) if groups else None
        found: dict[str, Any] = {}
        for name, about in described.items():
            if table is not None and name in table.column_names:
                value = table[name][at]
                found[name] = json.loads(value.as_py()) if about.get("json") else _plain(value, about)
        for name, about in described.items():
            if "same" in about:
                found[name] = found[about["same"]]
            elif "parts" in about:
                found[name] = np.concatenate([found[part] for part in about["parts"]])
        return {name: found[name] for name in described if name in found}


def described_in(file: pq.ParquetFile) -> dict[str, Any]:
    """The metadata of a file of columns."""
    found: dict[str, Any] = json.loads(file.schema_arrow.metadata[_META])
    return found


# ---- writing


def _write(path: Path, table: pa.Table, tensors: Mapping[str, Tensor]) -> None:
    """Write a table: floats byte-split, everything else by dictionary."""

    def leaf(name: str) -> str:
        return f"{name}.list.element" if tensors[name].ndim == 2 else name

    floats = [leaf(name) for name, column in tensors.items() if column.dtype in _FLOATS]
    others = [leaf(name) for name, column in tensors.items() if column.dtype not in _FLOATS | {torch.bool}]
    others += [name for name in table.column_names if name and name not in tensors]
    widest = max((column.shape[1] for column in tensors.values() if column.ndim == 2), default=1)
    with writing_parquet(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=max(ROWS_PER_GROUP, TOKENS_PER_GROUP // max(widest, 1)),
            compression="zstd",
            compression_level=1,
            use_dictionary=others,
            use_byte_stream_split=floats,
            write_statistics=False,
        )


def _derived_from(column: Tensor, written: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """How a column follows from written ones: ``same`` as one, or the concatenated ``parts``; None if it does not."""
    alike = {name: other for name, other in written.items() if other.dtype == column.dtype and other.ndim == 2}
    for name, other in written.items():
        if other.dtype == column.dtype and other.shape == column.shape and _equal(other, column):
            return {"same": name}
    if column.ndim == 2:
        for first, left in alike.items():
            for second, right in alike.items():
                if left.shape[1] + right.shape[1] == column.shape[1] and 0 < left.shape[1] < column.shape[1]:
                    split = left.shape[1]
                    if _equal(left, column[:, :split]) and _equal(right, column[:, split:]):
                        return {"parts": [first, second]}
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_as_bits(one), _as_bits(other))


def _as_bits(column: Tensor) -> Tensor:
    """The same bits as integers, so that NaN equals itself and 0.0 differs from -0.0."""
    if not column.is_floating_point():
        return column
    return column.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[column.element_size()])


def _numbers(column: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (_as_bits(column) if column.dtype == torch.bfloat16 else column).numpy()
    return found


def _from_tokens(column: Tensor, side: str, pad: int | float | bool) -> pa.Array:
    """A list per row, without the padding at one end."""
    width = column.shape[1]
    filled = _as_bits(column).numpy() != _as_bits(torch.tensor(pad, dtype=column.dtype)).numpy()
    padding = (filled[:, ::-1] if side == "right" else filled).argmax(1) if width else np.zeros(len(column), int)
    lengths = np.where(filled.any(1), width - padding, 0)
    place = np.arange(width)
    kept = place < lengths[:, None] if side == "right" else place >= width - lengths[:, None]
    offsets = np.zeros(len(column) + 1, dtype=np.int32)
    lengths.cumsum(out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(_numbers(column)[kept]))


def _from_objects(column: Objects) -> tuple[pa.Array, dict[str, Any]]:
    """The objects as text: strings as they are, others as JSON."""
    about = {"dtype": "object", "shape": [len(column)], "exact": True}
    items = column.tolist()
    if all(type(item) is str for item in items):
        with suppress(UnicodeEncodeError):  # lone surrogates, which JSON escapes
            return pa.array(items, pa.string()), about
    found = all_as_json(items)
    return pa.array([text for text, _ in found], pa.string()), {
        **about,
        "json": True,
        "exact": all(exact for _, exact in found),
    }


def all_as_json(items: Sequence[Any]) -> list[tuple[str, bool]]:
    """`as_json` of each object, once for those that rows share, as the rows of a prompt often do."""
    texts: dict[int, tuple[str, bool]] = {}  # by identity
    for item in items:
        if id(item) not in texts:
            texts[id(item)] = as_json(item)
    return [texts[id(item)] for item in items]


def as_json(item: Any) -> tuple[str, bool]:
    """An object as JSON, and whether that restores it; what JSON does not know becomes text."""
    try:
        text = json.dumps(item)
        return text, type(item) is str or json.loads(text) == item
    except (TypeError, ValueError, RecursionError):
        return json.dumps(str(item)), False


def _name(column: Tensor) -> str:
    return str(column.dtype).removeprefix("torch.")


# ---- reading


def _restored(file: pq.ParquetFile, described: Mapping[str, Any], names: Sequence[str]) -> dict[str, Column]:
    """The named columns, from those that they derive from."""
    found: dict[str, Column] = {}
    sources = [s for name in names for s in _sources(described[name])]
    stored = [name for name in dict.fromkeys([*sources, *names]) if not _sources(described[name])]
    table = file.read(columns=_leaves(stored, described))
    for name in stored:
        found[name] = _restore(table[name].combine_chunks(), described[name])
    for name in names:
        about = described[name]
        if "same" in about:
            found[name] = found[about["same"]]
        elif "parts" in about:
            found[name] = torch.cat([_tensor(found[part]) for part in about["parts"]], 1)
    return {name: found[name] for name in names}


def _tensor(column: Column) -> Tensor:
    assert isinstance(column, Tensor)
    return column


def _leaves(names: Sequence[str], described: Mapping[str, Any]) -> list[str]:
    return [f"{name}.list.element" if len(described[name]["shape"]) == 2 else name for name in names]


def _sources(about: Mapping[str, Any]) -> list[str]:
    return [about["same"]] if "same" in about else list(about.get("parts", ()))


def _restore(array: pa.Array, about: Mapping[str, Any]) -> Column:
    if about["dtype"] == "object":
        texts = array.to_pylist()
        return objects(map(json.loads, texts) if about.get("json") else texts)
    dtype: torch.dtype = getattr(torch, about["dtype"])
    if len(about["shape"]) == 1:
        return _cast(_values(array), dtype)
    rows, width = about["shape"]
    column = torch.full((rows, width), about["pad"], dtype=dtype)
    lengths = torch.from_numpy(np.diff(array.offsets.to_numpy().astype(np.int64)))
    place = torch.arange(width)
    kept = place < lengths[:, None] if about["side"] == "right" else place >= width - lengths[:, None]
    column[kept] = _cast(_values(array.flatten()), dtype)
    return column


def _values(array: pa.Array) -> Tensor:
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.view(dtype) if dtype == torch.bfloat16 else values.to(dtype)


def _plain(value: pa.Scalar, about: Mapping[str, Any]) -> Any:
    if len(about["shape"]) == 1:
        return value.as_py()
    return value.values.to_numpy(zero_copy_only=False)
