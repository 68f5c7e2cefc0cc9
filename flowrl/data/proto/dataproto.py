"""`DataProto`: an immutable record of columns that share one batch axis, what the executor carries between operators.

A column is a torch tensor ``[batch ...]`` or a 1-d NumPy object array ``[batch]``; `meta` is a JSON-able dict. Every
operation returns a new `DataProto`, of views where possible: writing into a tensor in place changes all that share it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from flowrl.data.files import size
from flowrl.data.proto import formats
from flowrl.data.proto.column_math import (
    Columns,
    Objects,
    Pad,
    bind_axes,
    check_column,
    check_pad,
    concat_padded,
    difference,
    growth,
    moved,
    own,
    read_only,
    rows_of_groups,
    same,
    short,
    table,
)
from flowrl.data.proto.rows import Rows, refuse_no_count, row_numbers
from flowrl.errors import ColumnNotFoundError, DataError, MethodError, type_of
from flowrl.record_types import column_fields, record_tuple

R = TypeVar("R")
_ENDS = {int, type(None)}
"""Types of the bounds of a slice that needs no copy."""
_OF_VERL = {
    "chunk": "Split by the rows per part: proto.split(size)",
    "reorder": "Index it, which returns a new DataProto: proto = proto[order]",
}
"""Methods of verl's DataProto that this one lacks, with their replacements."""


class DataProto:
    """Columns that share one batch axis, and `meta`.

    Args:
        columns: name to tensor ``[batch ...]`` or object array ``[batch]``. Columns that flowrl knows
            (`flowrl.columns`) must have their dtype and axes, and an axis has one width in all of them.
        meta: JSON-able; copied.

    Raises:
        DataError: columns of unequal length, of a wrong dtype or shape, or meta that is not JSON-able; or either is not
            a mapping.
    """

    __slots__ = ("_meta", "columns")

    columns: Columns
    """All columns by name, read-only, in order of insertion."""
    _meta: dict[str, Any]

    def __init__(self, columns: Columns, meta: Mapping[str, Any] | None = None) -> None:
        for what, given in (("columns", columns), ("meta", {} if meta is None else meta)):
            if not isinstance(given, Mapping):
                raise DataError(
                    f"The {what} of a DataProto are {short(given, 80)}. Pass a dict, such as "
                    f'DataProto({{"values": tensor}}, {{"step": 3}}).',
                    code="data.wrong-type",
                    argument=what,
                    found=short(given, 80),
                )
        checked = {name: check_column(name, column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in checked.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(
                f"Columns differ in their number of rows: {found}. Select the same rows of each column.",
                code="data.unequal-rows",
                rows=[f"{name}: {n}" for name, n in lengths.items()],
            )
        bind_axes(checked)
        if meta:
            formats.check_json(dict(meta), "meta")
        self._fill(checked, copy.deepcopy(dict(meta or {})))

    def _fill(self, columns: dict[str, Tensor | Objects], meta: dict[str, Any]) -> None:
        object.__setattr__(self, "columns", MappingProxyType(columns))
        object.__setattr__(self, "_meta", meta)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: a DataProto is immutable. Use union or with_meta for a new one.")

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in _OF_VERL:
                raise MethodError(
                    f"A DataProto has no method {name!r}, unlike verl's. {_OF_VERL[name]}.",
                    code="data.verl-method",
                    method=name,
                )
            raise AttributeError(f"'DataProto' object has no attribute {name!r}", name=name, obj=self)

    def __reduce__(self) -> Any:  # a mapping proxy cannot be copied or pickled
        return DataProto, ({name: own(column) for name, column in self.columns.items()}, self._meta)

    # ---- reading

    def __len__(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def meta(self) -> dict[str, Any]:
        """A copy of the meta dict."""
        return copy.deepcopy(self._meta)

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Rows) -> DataProto: ...

    def __getitem__(self, key: str | Rows) -> Any:
        """``proto["values"]`` is a column; ``proto[2:5]``, ``proto[[0, 3]]`` and ``proto[mask]`` are rows.

        Raises:
            ColumnNotFoundError: no such column.
            DataError: an index out of range, a mask of another length, or a single row number.
        """
        if isinstance(key, str):
            self._require(key)
            return self.columns[key]
        if isinstance(key, slice) and key.step in (None, 1) and not {type(key.start), type(key.stop)} - _ENDS:
            return self._with({name: column[key] for name, column in self.columns.items()})
        index = row_numbers(key, len(self))
        picked: dict[str, Tensor | Objects] = {}
        for name, column in self.columns.items():
            if isinstance(column, Tensor):
                at = index.to(column.device)  # index_select copies whole rows; an index goes number by number
                picked[name] = column.index_select(0, at) if column.ndim > 1 else column[at]
            else:
                picked[name] = read_only(column[index.numpy()])
        return self._with(picked)

    # ---- columns

    def with_meta(self, meta: Mapping[str, Any]) -> DataProto:
        """The same columns with `meta` in place of the old; ``with_meta({**proto.meta, "k": 1})`` adds to it."""
        return DataProto(self.columns, meta)

    def select(self, *names: str) -> DataProto:
        """Only these columns, in this order."""
        self._require(*names)
        return self._with({name: self.columns[name] for name in names})

    def drop(self, *names: str) -> DataProto:
        """All columns but these."""
        self._require(*names)
        return self._with({name: column for name, column in self.columns.items() if name not in names})

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Columns under new names (``{old: new}``), in place; two columns may swap theirs.

        Raises:
            DataError: two columns would have one name.
        """
        if not isinstance(names, Mapping):
            raise DataError(
                f"rename({names!r}): expected a dict of old names to new ones.",
                code="data.wrong-type",
                argument="names",
                found=repr(names),
            )
        self._require(*names)
        new = [names.get(name, name) for name in self.columns]
        twice = sorted({name for name in new if new.count(name) > 1})
        if twice:
            raise DataError(
                f"rename({dict(names)}) would give two columns the name {twice[0]!r}. Choose another name, or drop one "
                f"column.",
                code="data.conflict",
                column=twice[0],
            )
        return DataProto(dict(zip(new, self.columns.values(), strict=True)), self._meta)

    def union(self, other: DataProto) -> DataProto:
        """The columns and meta of both; columns and keys in both must be equal, bit for bit.

        Raises:
            DataError: the two differ; names the column and its first different row, or the meta key.
        """
        _refuse_others("union", [other])
        if self.columns and other.columns and len(self) != len(other):
            raise DataError(
                f"union of {len(self)} rows with {len(other)}. Both sides must have the same rows: select rows of one, "
                f"or repeat() it.",
                code="data.unequal-rows",
                rows=[len(self), len(other)],
            )
        for name in (name for name in self.columns if name in other.columns):
            if found := difference(self.columns[name], other.columns[name]):
                raise DataError(
                    f"Both sides of union have a column {name!r}, and they differ: {found}. Use drop({name!r}) or "
                    f"rename({{{name!r}: ...}}) on one side.",
                    code="data.conflict",
                    column=name,
                    difference=found,
                )
        return DataProto({**self.columns, **other.columns}, _merge_meta([self, other], "union"))

    # ---- rows

    @staticmethod
    def concat(protos: Sequence[DataProto], pad: Mapping[str, Pad] | None = None) -> DataProto:
        """Concatenate the rows of batches with the same columns. Unequal widths are padded with the column's pad value.

        A prompt axis is padded on the left, a response axis on the right, and a sequence axis (prompt then response) on
        the left as its prompt grows and on the right as its response grows.

        Args:
            pad: ``{name: (value, side)}`` for the second axis of columns that flowrl does not know; ``side`` is
                ``"left"``, ``"right"`` or ``"sequence"``.

        Raises:
            DataError: different columns, dtypes, devices or meta; widths that flowrl does not know how to pad.
        """
        if not protos:
            raise DataError("concat got an empty list. Pass at least one DataProto.", code="data.concat-mismatch")
        _refuse_others("concat", protos)
        first, pad = protos[0], {} if pad is None else pad
        if not isinstance(pad, Mapping):
            raise DataError(
                f"concat(pad={pad!r}): expected a dict, {{name: (value, side)}}.",
                code="data.wrong-type",
                argument="pad",
                found=repr(pad),
            )
        first._require(*pad)
        for i, proto in enumerate(protos):
            if odd := sorted(proto.columns.keys() ^ first.columns.keys()):
                raise DataError(
                    f"Batches 0 and {i} of concat differ in the columns {odd}. select() the same columns of all.",
                    code="data.concat-mismatch",
                    index=i,
                    columns=odd,
                )
        for name, value in pad.items():
            check_pad(name, first.columns[name], value)
        grown = growth([bind_axes(proto.columns) for proto in protos])
        joined: dict[str, Tensor | Objects] = {}
        for name in first.columns:
            parts = [proto.columns[name] for proto in protos]
            tensors = [part for part in parts if isinstance(part, Tensor)]
            arrays = [part for part in parts if not isinstance(part, Tensor)]
            if tensors and arrays:
                raise DataError(
                    f"Column {name!r} is a tensor in some batches of concat and an object array in others. Convert it "
                    f"to one of them first.",
                    code="data.concat-mismatch",
                    column=name,
                )
            if tensors:
                joined[name] = concat_padded(name, tensors, grown, pad.get(name))
            else:
                joined[name] = np.concatenate(arrays)
        return DataProto(joined, _merge_meta(protos, "concat"))

    def split(self, size: int) -> list[DataProto]:
        """Parts of `size` rows; the last may be smaller."""
        refuse_no_count("split", size, "row a part")
        return [self[a : a + size] for a in range(0, max(len(self), 1), size)]

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Every row `n` times: ``a a b b`` interleaved (groups stay contiguous), else ``a b a b``."""
        refuse_no_count("repeat", n, "time")
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(n) if interleave else rows.repeat(n)]

    def groups(self) -> dict[str, Tensor]:
        """The rows of each `uid`, int64 indices, in the order of first appearance.

        Raises:
            ColumnNotFoundError: there is no `uid`.
            DataError: a `uid` is not a str.
        """
        for row, uid in enumerate(self["uid"]):
            if not isinstance(uid, str):
                raise DataError(
                    f"The uid of row {row} is {uid!r}, {type_of(uid)}. Expected a str.",
                    code="data.wrong-type",
                    row=row,
                    found=repr(uid),
                )
        return {uid: torch.tensor(rows) for uid, rows in rows_of_groups(self["uid"]).items()}

    def to(self, device: torch.device | str) -> DataProto:
        """All tensors on `device`.

        Raises:
            DataError: there is no such device on this machine.
        """
        return self._with(moved(self.columns, device))

    # ---- content

    def equal(self, other: DataProto) -> bool:
        """The same columns (bit for bit, so NaN equals NaN; objects by type and value) and meta, on any device."""
        _refuse_others("equal", [other])
        return (
            self.columns.keys() == other.columns.keys()
            and all(difference(column, other.columns[name]) is None for name, column in self.columns.items())
            and same(self._meta, other._meta)
        )

    def digest(self) -> str:
        """xxh3-128 of the content, 32 hex digits, independent of column order, strides and device.

        Raises:
            DataError: an object is not JSON-able.
        """
        return formats.digest(self.columns, self._meta)

    # ---- other forms

    @staticmethod
    def from_record(record: Any, meta: Mapping[str, Any] | None = None) -> DataProto:
        """The columns of a record (a NamedTuple such as `flowrl.records.RolloutBatch`) under their column names.

        Raises:
            DataError: not a record, or one with a field that is not a column.
        """
        return DataProto({name: getattr(record, field) for field, name in column_fields(type(record)).items()}, meta)

    def to_record(self, record: type[R]) -> R:
        """The columns that `record` (a NamedTuple, or a Protocol of properties) reads, as such a record.

        Raises:
            ColumnNotFoundError: a column that the record reads is not here.
        """
        fields = column_fields(record)
        self._require(*fields.values())
        packed: R = record_tuple(record)(**{field: self.columns[name] for field, name in fields.items()})
        return packed

    def save(self, folder: str | Path) -> None:
        """Write a new `folder` atomically: safetensors for tensors, JSON for objects and meta, and their digests.

        Raises:
            DataError: the folder is not empty, or an object is not JSON-able.
        """
        formats.save(folder, self.columns, self._meta)

    @staticmethod
    def load(folder: str | Path) -> DataProto:
        """What `save` wrote, on the CPU.

        Raises:
            DataError: names the file that is missing or damaged.
        """
        return DataProto(*formats.load(folder))

    def to_tensordict(self) -> Any:
        """A `tensordict.TensorDict`: objects as ``NonTensorStack``, meta as ``NonTensorData``."""
        return formats.to_tensordict(self.columns, self._meta, len(self))

    @staticmethod
    def from_tensordict(data: Any) -> DataProto:
        """The reverse of `to_tensordict`; a ``NonTensorData`` of a known object column's name fills that column."""
        return DataProto(*formats.from_tensordict(data))

    def to_verl(self) -> dict[str, dict[str, Any]]:
        """``{"batch": ..., "non_tensor_batch": ..., "meta_info": ...}``, known masks as int64."""
        return formats.to_verl(self.columns, self.meta)

    @staticmethod
    def from_verl(data: Any) -> DataProto:
        """The reverse of `to_verl`; also takes an object with these three attributes, such as a ``verl.DataProto``."""
        return DataProto(*formats.from_verl(data))

    def __repr__(self) -> str:
        tensors = [c for c in self.columns.values() if isinstance(c, Tensor)]
        devices = ", ".join(sorted({str(c.device) for c in tensors})) or "no device"
        total = size(sum(c.nbytes for c in tensors))
        head = f"DataProto: {len(self)} rows, {len(self.columns)} columns, {total} of tensors on {devices}"
        meta = [f"meta: {short(self._meta, 100)}"] if self._meta else []
        return "\n".join([head, table(self.columns), *meta])

    # ---- helpers

    def _with(self, columns: dict[str, Tensor | Objects]) -> DataProto:
        """A batch of these columns, which need no check, with this one's meta."""
        made = DataProto.__new__(DataProto)
        made._fill(columns, self._meta)
        return made

    def _require(self, *names: str) -> None:
        for name in names:
            if not isinstance(name, str) or name not in self.columns:
                found = ", ".join(self.columns) or "no columns"
                raise ColumnNotFoundError(
                    f"No column {name!r} in this DataProto; it has {found}.",
                    code="data.unknown-column",
                    column=name,
                    known=list(self.columns),
                )


def _refuse_others(call: str, given: Any) -> None:
    for one in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(one, DataProto):
            raise DataError(
                f"{call} got {type_of(one)}. Pass a DataProto, such as DataProto(...).",
                code="data.wrong-type",
                call=call,
                found=type(one).__name__,
            )


def _merge_meta(protos: Sequence[DataProto], operation: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for proto in protos:
        for key, value in proto._meta.items():
            if not same(merged.setdefault(key, value), value):
                raise DataError(
                    f"meta[{key!r}] is {short(merged[key], 40)} on one side of {operation} and {short(value, 40)} on "
                    f"another. Set one value with with_meta(...) first.",
                    code="data.conflict",
                    key=key,
                    operation=operation,
                )
    return merged
