"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

_CHUNK = 1 << 24


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The block writes a file or folder at the path that it is given; at its end, that takes the place of `path`.

    An error leaves `path` as it was. What is cut off with the process stays as ``.<name>.partial`` until the next
    attempt.
    """
    draft, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.replaced")
    remove(draft)
    try:
        yield draft
        for written in [*draft.rglob("*"), draft]:
            _flush(written)
    except BaseException:
        with suppress(OSError):  # a process that still writes there
            remove(draft)
        raise
    if path.is_dir():  # no call replaces a folder that has something in it
        remove(old)
        os.replace(path, old)
    os.replace(draft, path)
    _flush(path.parent)
    remove(old)


def write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) as `replaced` does."""
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it; nothing happens where there is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """The xxh3-128 of a file's content, 32 hex digits.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """To the disk, so that a crash of the machine cannot leave a renamed folder with empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
