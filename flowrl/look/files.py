"""The files of a run folder as tables: what can be read of them, and warnings that name what cannot."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from flowrl.errors import DataError
from flowrl.run.recording.files import COLUMNS, ROWS, files_of, reading_parquet, steps_in

logger = logging.getLogger(__name__)

Record = dict[str, Any]


def records(path: Path) -> list[Record]:
    """The complete JSON objects of a JSONL file, which may be growing; none if there is no such file."""
    found: list[Record] = []
    if not path.is_file():
        return found
    damaged = 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            damaged += 1
    if damaged:
        logger.warning(
            "%s has %d damaged lines, which are left out. Restore it from a copy to see them.", path, damaged
        )
    return found


def table_of(found: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Records as a table; keys that a record does not have are null there."""
    names = list(dict.fromkeys(name for record in found for name in record))
    columns = {name: [record.get(name) for record in found] for name in names}
    return pa.table({name: _column(values) for name, values in columns.items()})


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {int}:
        return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds <= {bool}:
        return pa.array(values, pa.bool_())
    return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())


def row_files(folder: Path, steps: Iterable[int] | None = None) -> Iterator[Path]:
    """The files of ``rows/`` that cover these steps, or all; of two that cover a step, the compacted one."""
    paths = sorted(files_of(folder / ROWS), key=lambda path: (steps_in(path)[0] - steps_in(path)[1], path.name))
    wanted = None if steps is None else set(steps)
    covered: set[int] = set()
    chosen = []
    for path in paths:
        first, last = steps_in(path)
        own = set(range(first, last + 1))
        if not own & covered and (wanted is None or own & wanted):
            chosen.append(path)
        covered |= own
    return iter(sorted(chosen, key=steps_in))


def read_tables(paths: Iterable[Path]) -> pa.Table | None:
    """The tables of files together; damaged ones are left out with a warning. None if nothing can be read."""
    found = []
    for path in paths:
        try:
            with reading_parquet(path):
                found.append(pq.read_table(path))
        except DataError as error:
            logger.warning("%s", error)
    return pa.concat_tables(found, promote_options="default") if found else None


def column_files(folder: Path) -> dict[int, dict[str, Path]]:
    """The files of ``columns/``, by step and row axis."""
    found: dict[int, dict[str, Path]] = {}
    for path in files_of(folder / COLUMNS):
        found.setdefault(steps_in(path)[0], {})[unquote(path.parent.name)] = path
    return dict(sorted(found.items()))
