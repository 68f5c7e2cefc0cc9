"""Atomic writes of files and folders, and errors that name the path."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from flowrl.errors import DataError, FlowrlError, StorageError

_CHUNK = 1 << 24


@contextmanager
def replaced(path: Path, durable: bool = True) -> Iterator[Path]:
    """The block writes a file or folder at the yielded path, which replaces `path` atomically at its end.

    An error leaves `path` unchanged. If the process is killed, ``.<name>.partial`` remains until the next attempt.
    If it is not `durable`, a crash of the machine may leave an empty file.
    """
    draft, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.replaced")
    with writing(path):
        remove(draft)
        try:
            yield draft
            for written in [*draft.rglob("*"), draft] if durable else ():
                _flush(written)
            if path.is_dir() and not draft.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except BaseException:
            with suppress(OSError):  # another process still writes there
                remove(draft)
            raise
        if os.path.lexists(path) and (path.is_dir() or draft.is_dir()):  # os.replace cannot replace these
            remove(old)
            os.replace(path, old)
        os.replace(draft, path)
        if durable:
            _flush(path.parent)
        remove(old)


@contextmanager
def noting(error: BaseException) -> Iterator[None]:
    """Add a StorageError in the block to `error` as a note, so that it does not hide it."""
    try:
        yield
    except StorageError as other:
        error.add_note(str(other))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Re-raise I/O errors in the block as `StorageError` with `path` and its free space."""
    try:
        yield
    except FlowrlError:
        raise
    except (OSError, SafetensorError) as error:
        place = next(folder for folder in [path.absolute(), *path.absolute().parents] if os.path.exists(folder))
        reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        raise StorageError(
            f"{path} cannot be written ({reason}; {size(shutil.disk_usage(place).free)} free there). Free disk space, "
            f"grant write permission, or pass another folder.",
            code="data.unwritable-file",
            path=path,
            reason=reason,
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Re-raise I/O errors in the block as `DataError` with `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"{path} cannot be read ({reason}). Grant read permission.",
            code="data.unreadable-file",
            path=path,
            reason=reason,
        ) from error


def write(path: Path, content: bytes) -> None:
    """Write a file as `replaced` does."""
    with replaced(path) as draft:
        draft.write_bytes(content)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of these pairs."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key!r} in one mapping")
        found[key] = value
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """xxh3-128 of a file's content, 32 hex digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def size(nbytes: float) -> str:
    """A number of bytes in the unit that reads best."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    exponent = min(int(math.log(nbytes, 1024)), 4)
    return f"{nbytes / 1024**exponent:.1f} {' KMGT'[exponent]}iB"


def _flush(path: Path) -> None:
    """Flush to disk, so that a machine crash cannot leave a renamed folder with empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
