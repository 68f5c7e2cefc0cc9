"""Where the raw rows of a source come from: files, folders, the Hub, or memory."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from flowrl.data.files import file_digest, reading
from flowrl.data.sources.dataset_files import (
    CARD,
    files_in,
    library,
    patterns_of,
    refuse_script,
    rows_of,
    saved_patterns,
    splits_of,
)
from flowrl.data.sources.held_rows import HeldRows
from flowrl.data.sources.readers import READERS, read
from flowrl.errors import DataError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LOCAL = (".csv", ".tsv", ".json", ".ndjson", ".arrow", ".txt", ".gz", ".zst", ".zip")
"""Suffixes of files that are no names of data sets."""


class Origin(ABC):
    """Raw rows that can be read several times."""

    data_source: str = ""
    """What its rows have as `data_source` if they have none."""

    @abstractmethod
    def refuse_missing(self, source: str) -> None:
        """Check that it is there, without reading it; `source` is the class that reads it."""

    @abstractmethod
    def digests(self) -> list[str]:
        """Digests of its content."""

    @abstractmethod
    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        """Its rows, each with its place for errors; `columns` are needed, None is all."""

    def example(self) -> Any:
        """Its first row."""
        with closing(self.rows(None)) as rows:
            return next(rows)[1]


class RowFile(Origin):
    """A JSONL or parquet file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refuse_missing(self, source: str) -> None:
        if not self._path.is_file():
            refuse_missing_path(self._path, source)

    def digests(self) -> list[str]:
        with reading(self._path):
            return [file_digest(self._path)]

    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        yield from read(self._path, columns)


class RowsInMemory(Origin):
    """A list of dicts, or a `datasets.Dataset`."""

    def __init__(self, rows: HeldRows) -> None:
        self._rows = rows

    def refuse_missing(self, source: str) -> None:
        """They are there."""

    def digests(self) -> list[str]:
        return [self._rows.digest]

    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        yield from ((f"data row {index}", row) for index, row in enumerate(self._rows))


class DatasetPath(Origin):
    """A folder or file that the library `datasets` reads."""

    def __init__(self, path: Path, name: str | None, split: str | None) -> None:
        self._path, self._name, self._split = path, name, split

    def refuse_missing(self, source: str) -> None:
        if not self._path.exists():
            refuse_missing_path(self._path, source)
        self._files()

    def digests(self) -> list[str]:
        found = []
        for path in (path for paths in self._files().values() for path in paths):
            with reading(path):
                found.append(file_digest(path))
        return found

    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        yield from rows_of(self._files(), str(self._path), self._split, columns)

    def _files(self) -> dict[str, list[Path]]:
        """The files of each split that is read."""
        library()
        shown = str(self._path)
        if self._path.is_file():
            return {split: [self._path.absolute()] for split in splits_of(shown, ["train"], self._split)}
        with reading(self._path):
            refuse_script(os.listdir(self._path), shown)
        return split_files(self._path, shown, self._name, self._split)


def split_files(folder: Path, shown: str, name: str | None, split: str | None) -> dict[str, list[Path]]:
    """The files in a data set's folder of each split that ``split=`` names."""
    base, card = folder.absolute(), folder / CARD
    patterns = saved_patterns(folder) or patterns_of(str(base), card if card.is_file() else None, shown, name)
    return {one: files_in(base, shown, patterns[one]) for one in splits_of(shown, patterns, split)}


def is_hub_id(path: str) -> bool:
    """Whether a path is the name of a data set on the Hub, such as ``"openai/gsm8k"``; not if it exists here."""
    return (
        _HUB_ID.fullmatch(path) is not None
        and Path(path).suffix.lower() not in (*READERS, *_LOCAL)
        and not Path(path).exists()
    )


def refuse_missing_path(path: Path, source: str) -> None:
    raise DataError(
        f"{str(path)!r} is not a file on this machine (working directory: {Path.cwd()}). Correct {source}(path=...).",
        code="prompts.missing-file",
        path=path,
        source=source,
    )


def origin_of(path: str, name: str | None, split: str | None, revision: str | None) -> Origin:
    """The origin that a path names."""
    local = Path(path).expanduser()
    if local.suffix.lower() in READERS:
        return RowFile(local)
    return DatasetPath(local, name, split)
