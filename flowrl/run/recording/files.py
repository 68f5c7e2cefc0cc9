"""The Parquet files of a run folder: their folders, names and steps, and errors that name one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from flowrl.data.files import replaced, writing
from flowrl.errors import DataError

ROWS, TEXTS, COLUMNS = "rows", "texts", "columns"
FOLDERS = (ROWS, TEXTS, COLUMNS)

_NAME = r"steps?-(\d{6,})(?:-(\d{6,}))?\.parquet"


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a folder of recorded steps, in order; those of ``columns/`` are in a folder for each axis."""
    yield from sorted(path for path in folder.rglob("*.parquet") if re.fullmatch(_NAME, path.name))


def steps_in(path: Path) -> tuple[int, int]:
    """The first and the last step of a file of `files_of`, counted from 1."""
    found = re.fullmatch(_NAME, path.name)
    assert found is not None
    return int(found[1]), int(found[2] or found[1])


@contextmanager
def writing_parquet(path: Path) -> Iterator[pa.NativeFile]:
    """The block writes a Parquet file, which replaces `path` atomically.

    pyarrow leaves a file open whose end does not fit on the disk, and an open file occupies the disk after its removal.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, durable=False) as draft, pa.OSFile(str(draft), "wb") as file:
        yield file


class reading_parquet:
    """Re-raise errors of reading a Parquet file in the block as a `DataError` that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, cls: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pa.ArrowException | OSError | ValueError | LookupError | TypeError):
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise DataError(
                f"{self._path} cannot be read ({reason}). Restore it from a copy, or remove it; the other steps "
                f"remain readable.",
                code="run.damaged",
                path=self._path,
                reason=reason,
            ) from error
