"""Where the raw rows of a source come from: files, folders, the Hub, or memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

from flowrl.data.files import file_digest, reading
from flowrl.data.sources.dataset_files import library, refuse_script, rows_of, split_files, splits_of
from flowrl.data.sources.held_rows import HeldRows
from flowrl.data.sources.hub_dataset import hub_dataset
from flowrl.data.sources.origin import Origin
from flowrl.data.sources.readers import READERS, read
from flowrl.errors import DataError


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
    return hub_dataset(path, revision, name, split) or DatasetPath(local, name, split)
