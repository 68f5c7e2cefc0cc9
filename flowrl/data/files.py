"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from flowrl.data.proto.column_math import size
from flowrl.errors import DataError, FlowrlError, StorageError

_CHUNK = 1 << 24


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The block writes a file or folder at the path that it is given; at its end, that takes the place of `path`.

    An error leaves `path` as it was. What is cut off with the process stays as ``.<name>.partial`` until the next
    attempt.

    Raises:
        StorageError: it cannot be written; see `writing`.
    """
    draft, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.replaced")
    with writing(path):
        remove(draft)
        try:
            yield draft
            for written in [*draft.rglob("*"), draft]:
                _flush(written)
            if path.is_dir() and not draft.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except BaseException:
            with suppress(OSError):  # a process that still writes there
                remove(draft)
            raise
        if os.path.lexists(path) and (path.is_dir() or draft.is_dir()):  # which no call replaces
            remove(old)
            os.replace(path, old)
        os.replace(draft, path)
        _flush(path.parent)
        remove(old)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Lay what fails in the block to the file or folder that is written there.

    Raises:
        StorageError: naming `path`, with what is free there.
    """
    try:
        yield
    except FlowrlError:
        raise
    except (OSError, SafetensorError) as error:
        place = next(folder for folder in [path.absolute(), *path.absolute().parents] if os.path.exists(folder))
        said = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        raise StorageError(
            f"{path} cannot be written ({said}; {size(shutil.disk_usage(place).free)} are free there); make room or "
            f"give the right to write, or name another folder."
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Lay what fails in the block to the file that is read there.

    Raises:
        DataError: naming `path`.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); give the right to read it.") from error


def write(path: Path, content: bytes) -> None:
    """Write a file as `replaced` does."""
    with replaced(path) as draft:
        draft.write_bytes(content)


def parse_json(text: str | bytes) -> Any:
    """What JSON text says.

    Raises:
        ValueError: it is broken, not UTF-8, nested more deeply than Python follows, or has a key twice in one object.
    """
    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What pairs of keys and values say together.

    Raises:
        ValueError: a key stands twice, of which a plain dict would keep the last without a word.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one mapping")
        found[key] = value
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
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
