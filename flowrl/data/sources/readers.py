"""The records of JSONL and parquet files; errors name the file and the line, counted from 1, or the row, from 0."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flowrl.data.files import parse_json, reading
from flowrl.errors import DataError

_LINE = 1 << 28
"""Maximum bytes of a line of JSONL."""


def read(path: Path, columns: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its place for errors; `columns` are read from parquet, None is all."""
    empty = True
    with reading(path):
        for pair in READERS[path.suffix.lower()](path, columns):
            empty = False
            yield pair
    if empty:
        raise DataError(
            f"{path} has no rows. Expected at least one; remove the file from path=.", code="prompts.no-rows", path=path
        )


def _read_jsonl(path: Path, columns: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:  # bytes: U+2028 in a text must not end a line
        for number in itertools.count(1):
            where = f"{path}:{number}"
            if not (line := lines.readline(_LINE + 1)):
                return
            if len(line) > _LINE:
                raise DataError(
                    f"{where}: the line has more than {_LINE} bytes. Expected one JSON object per line; split or "
                    f"delete it.",
                    code="prompts.broken-file",
                    path=path,
                    line=number,
                )
            try:
                record = parse_json(line)
                if b"\\ud" in line.lower():  # half a surrogate pair is valid JSON but not valid text
                    json.dumps(record, ensure_ascii=False).encode()
                yield where, record
            except ValueError as error:  # broken JSON, or bytes that are not UTF-8
                what = "the line is blank" if not line.strip() else f"the line is not JSON ({error})"
                raise DataError(
                    f"{where}: {what}. Expected one JSON object per line; fix or delete it.",
                    code="prompts.broken-file",
                    path=path,
                    line=number,
                ) from error


def _read_parquet(path: Path, selected: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa  # here: slow to import, and only parquet needs it
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if selected is None or name in selected]
            if twice := [name for name in columns if names.count(name) > 1]:
                raise ValueError(f"there are {names.count(twice[0])} columns {twice[0]!r}")
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path} row {row}", record
                    row += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # such as text that is not UTF-8
        raise DataError(
            f"Cannot read {path} as parquet after {row} rows ({error}). Write the file again.",
            code="prompts.broken-file",
            path=path,
            row=row,
        ) from error


READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
"""By suffix."""
