"""The files of a run folder as tables: what can be read of them, and reports that name what cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from flowrl.data.files import parse_json
from flowrl.errors import DataError
from flowrl.run.recording.files import COLUMNS, ROWS, files_of, reading_parquet, steps_in

Record = dict[str, Any]
Report = Callable[[Path, DataError | None], None]
"""Takes what of a file is damaged; None if nothing is."""
_NAMED = 8
"""How many damaged lines are named."""


def records(path: Path, report: Report) -> list[Record]:
    """The complete JSON objects of a JSONL file, which may be growing; none if there is no such file."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    found = [record_of(line) for line in lines]
    report(path, damaged_lines(path, [number for number, record in enumerate(found, 1) if record is None]))
    return [record for record in found if record is not None]


def record_of(line: bytes) -> Record | None:
    """The JSON object of a line; None if the line is damaged."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def damaged_lines(path: Path, lines: Sequence[int]) -> DataError | None:
    """The error of a JSONL file with these damaged lines, counted from 1."""
    if not lines:
        return None
    what = "line" if len(lines) == 1 else "lines"
    which = listed(lines[:_NAMED]) + (f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")
    return DataError(
        f"{path} is damaged in {what} {which}. Restore it from a copy; its other lines are shown.",
        code="run.damaged",
        path=path,
        lines=lines[:_NAMED],
    )


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


def read_table(path: Path) -> pa.Table:
    """The table of a file.

    Raises:
        DataError: the file is damaged.
    """
    with reading_parquet(path):
        return pq.read_table(path)


def read_tables(paths: Iterable[Path], report: Report) -> pa.Table | None:
    """The tables of files together, without damaged ones. None if nothing can be read."""
    found = []
    for path in paths:
        try:
            found.append(read_table(path))
        except DataError as error:
            report(path, error)
        else:
            report(path, None)
    return pa.concat_tables(found, promote_options="default") if found else None


def column_files(folder: Path) -> dict[int, dict[str, Path]]:
    """The files of ``columns/``, by step and row axis."""
    found: dict[int, dict[str, Path]] = {}
    for path in files_of(folder / COLUMNS):
        found.setdefault(steps_in(path)[0], {})[unquote(path.parent.name)] = path
    return dict(sorted(found.items()))


def listed(numbers: Sequence[int]) -> str:
    """Steps as text: ``"1, 18 to 37"``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "none"
