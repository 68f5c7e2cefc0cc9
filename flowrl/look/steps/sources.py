"""The file and line of a row of the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def data_line(description: Mapping[str, Any], name: str, row_id: str) -> str | None:
    """Where a row of an input comes from, as text: file and line, or its number in the source; None if unknown.

    Args:
        description: of the run.
        name: of the input.
        row_id: ``"{epoch}/{index}/{draw}"``, with anything behind it.
    """
    found = re.match(r"(\d+)/(\d+)/(\d+)", row_id)
    source = description.get("training", {}).get("data", {})
    source = source if "$type" in source else source.get(name, {})
    kind = str(source.get("$type", "")).rpartition(":")[2]
    if found is None or not kind:
        return None
    epoch, index = int(found[1]), int(found[2])
    path = source.get("path")
    files = [path] if isinstance(path, str) else path if isinstance(path, list | tuple) else []
    return f"{kind} {_place(list(map(str, files)), index)}, epoch {epoch}"


def _place(files: Sequence[str], index: int) -> str:
    """The file and line, or row, of a position in several files together."""
    if len(files) == 1 and _has_lines(files[0]):
        return f"{files[0]}, line {index + 1}"
    before = 0
    for file in files if all(_has_lines(file) and Path(file).is_file() for file in files) else ():
        with open(file, "rb") as lines:
            count = sum(1 for _ in lines)
        if index < before + count:
            return f"{file}, line {index - before + 1}"
        before += count
    return f"{', '.join(files)}, row {index}" if files else f"row {index}"


def _has_lines(file: str) -> bool:
    return file.endswith((".jsonl", ".json"))
