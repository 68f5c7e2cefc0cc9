"""`HeldRows`: rows in memory, as data of a source: a list of dicts, or a `datasets.Dataset`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from flowrl.data.sources.prompt_rows import copied
from flowrl.errors import article

_PLAIN = (str, int, float, bool, type(None), bytes, date, Decimal)


class HeldRows:
    """Rows in memory; equal by content.

    Args:
        rows: dicts, which are copied, or a `datasets.Dataset`.

    Raises:
        ValueError: there are no rows, a row is not a dict, or a value is neither plain nor a list or dict of such.
    """

    def __init__(self, rows: Any) -> None:
        self._dataset = rows.with_format(None) if _kind(rows) == "Dataset" else None
        self._rows = [_row(index, row) for index, row in enumerate(rows)] if self._dataset is None else []
        if not len(self):
            raise ValueError("it has no rows; pass at least one")

    def __len__(self) -> int:
        return len(self._rows if self._dataset is None else self._dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._dataset is None:
            yield from map(copied, self._rows)
        else:
            yield from self._dataset

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the rows as JSON with sorted keys."""
        digest = xxhash.xxh3_128()
        for row in self:
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()

    @property
    def how_to_write(self) -> str:
        """The Python expression that writes the rows to a file, of which `rows` is what was passed."""
        if self._dataset is not None:
            return "rows.to_parquet('rows.parquet')"
        return "pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), 'rows.parquet')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldRows) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<{len(self)} rows in memory>"


def held(data: Any) -> Any:
    """`HeldRows` of a list of dicts or a `datasets.Dataset`; other data itself."""
    kind = _kind(data)
    if kind == "DatasetDict":
        raise ValueError(
            f"it has the splits {', '.join(map(repr, data))}; pass one, such as data[{next(iter(data))!r}]"
        )
    if kind in ("IterableDataset", "IterableDatasetDict"):
        raise ValueError(f"{article(kind)} has no length and no content yet; pass list(dataset.take(n))")
    rows = isinstance(data, list) and not any(isinstance(one, str) or hasattr(one, "__fspath__") for one in data)
    return HeldRows(data) if kind == "Dataset" or rows else data


def _kind(data: Any) -> str | None:
    """The class of an object of `datasets`, if that is imported."""
    library = sys.modules.get("datasets")
    kinds = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return next((kind for kind in kinds if library and isinstance(data, getattr(library, kind))), None)


def _row(index: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {index} is {article(type(row).__name__)}; pass a list of dicts")
    return {key: _plain(f"row {index} has {key!r}, which", value) for key, value in row.items()}


def _plain(where: str, value: Any) -> Any:
    """A copy of a value of plain containers, in which arrays are lists."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(where, value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(where, item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(where, item) for item in value]
    if not isinstance(value, _PLAIN):
        raise ValueError(f"{where} holds {article(type(value).__name__)}; pass text, numbers, lists and dicts")
    return value
