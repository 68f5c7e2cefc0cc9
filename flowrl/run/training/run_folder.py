"""What a run writes: `RunFolder`."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from flowrl.data.files import file_digest, parse_json, reading, write, writing
from flowrl.errors import ParameterError, StorageError
from flowrl.run.training.lock import FolderLock

logger = logging.getLogger(__name__)

LINES = ("metrics.jsonl", "predictions.jsonl", "rollouts.jsonl")
Lines = list[Mapping[str, float]]


class RunFolder:
    """The folder of a run.

    It holds ``run.json`` (what ran), ``metrics.jsonl``, ``predictions.jsonl``, ``rollouts.jsonl``, ``trace.json``, the
    checkpoints and the trained weights.

    Args:
        path: where it is.
        before: what ``run.json`` said of the run that the folder already held; None if it held none.
        lock: on the folder, which `close` releases.
    """

    def __init__(self, path: Path, before: Mapping[str, Any] | None = None, lock: FolderLock | None = None) -> None:
        self.path, self.before, self._lock = path, before, lock

    @staticmethod
    def create(folder: str | None, name: str, resume: bool) -> RunFolder:
        """A new folder, or one whose run ended before its first step was done; with `resume`, any folder. It is locked.

        Raises:
            ParameterError: `folder` already holds a run, is being written by one, or cannot be written.
        """
        path = Path("runs") / f"{name}-001" if folder is None else Path(folder).expanduser()
        lock = None
        try:
            if folder is None:
                number = 1
                while path.exists() or not _is_made(path):
                    number += 1
                    path = path.with_name(f"{name}-{number:03d}")
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):  # an unwritable folder is found before a model loads
                lock = FolderLock(path)
            found = RunFolder(path, _described(path), lock)
            if not (found.before is None or resume or found.failed_at_once):
                raise ParameterError(
                    f"{path} already holds a run; choose another folder (Training(folder=...), --folder), or go on "
                    f"from its last checkpoint by resume=True / --resume."
                )
        except (OSError, ValueError) as error:  # a path with a NUL is a ValueError, and so is our own
            if lock is not None:
                lock.release()
            if isinstance(error, ParameterError):
                raise
            what = (error.strerror if isinstance(error, OSError) else None) or error
            raise ParameterError(
                f"the folder {path} cannot be written ({what}); choose another by Training(folder=...) or --folder."
            ) from error
        return found

    def close(self) -> None:
        """Let others write there."""
        if self._lock is not None:
            self._lock.release()

    @property
    def failed_at_once(self) -> bool:
        """Whether the run that the folder held ended before its first step was done. One that says to be running has
        died, since it does not hold the folder any more."""
        failed = self.before is not None and self.before["status"] != "finished"
        return failed and not any("timing/step" in record for _, record in self._read("metrics.jsonl"))

    def describe(self, described: Mapping[str, Any]) -> None:
        """Write ``run.json``, whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        text = json.dumps(jsonable(described), indent=2).encode() + b"\n"
        try:
            write(self.path / "run.json", text)
        except StorageError:
            if self._lock is None:
                raise
            self._lock.give_way()
            write(self.path / "run.json", text)

    def append(self, file: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to a JSONL file; NaN and infinity are written as null, and types unknown to JSON as text.

        Raises:
            StorageError: it cannot be written.
        """
        with writing(self.path / file), (self.path / file).open("ab") as lines:
            for record in records:
                lines.write(_line(record))

    def marks(self) -> dict[str, str]:
        """The digest of each file of lines, which are flushed to disk: a checkpoint must not outlast the lines of the
        steps before it.

        Raises:
            StorageError: a file cannot be written.
        """
        found = {}
        for file in (file for file in LINES if (self.path / file).exists()):
            with writing(self.path / file):
                with (self.path / file).open("ab") as lines:
                    os.fsync(lines.fileno())
                found[file] = file_digest(self.path / file)
        return found

    def rewind(self, step: int, marks: Mapping[str, str] | None = None) -> tuple[Lines, Lines]:
        """Drop what was written after `step`, and what cannot be read; a warning says where lines from before are gone.

        Args:
            step: the last one that is kept.
            marks: what `marks` gave after that step.

        Returns:
            The remaining lines of steps, and those of validations.

        Raises:
            DataError: a file of lines cannot be read.
            StorageError: it cannot be written.
        """
        for file in LINES:
            kept = b"".join(line for line, record in self._read(file) if record["step"] <= step)
            if (self.path / file).exists():
                write(self.path / file, kept)
            if marks is not None and marks.get(file, _digest(b"")) != _digest(kept):
                self._tell_gone(file, step)
        return self.lines()

    def lines(self) -> tuple[Lines, Lines]:
        """The lines of steps, and those of validations, as far as they can be read."""
        # numbers that JSON does not know were written as null
        lines = [{k: math.nan if v is None else v for k, v in line.items()} for _, line in self._read("metrics.jsonl")]
        return [line for line in lines if "timing/step" in line], [line for line in lines if "timing/step" not in line]

    def records(self, file: str) -> list[dict[str, Any]]:
        """The records of a file of lines, as far as they can be read; none where there is no such file.

        Raises:
            DataError: the file cannot be read.
        """
        return [record for _, record in self._read(file)]

    def _tell_gone(self, file: str, step: int) -> None:
        """Warn that a file of lines is not what it was after a step."""
        there = {record["step"] for _, record in self._read(file) if "timing/step" in record}
        gone = [str(number) for number in range(1, step + 1) if number not in there]
        what = f", and lacks the steps {', '.join(gone)}" if file == "metrics.jsonl" and gone else ""
        logger.warning(
            "%s is not what it was when the checkpoint after step %d was written%s: it was shortened, changed or "
            "removed since. The run goes on with what is there; put a copy of the file back before you resume to have "
            "it whole.",
            self.path / file,
            step,
            what,
        )

    def _read(self, file: str) -> list[tuple[bytes, dict[str, Any]]]:
        """The whole lines of a JSONL file that hold a record of a step, with these; none if there is no file."""
        path = self.path / file
        if not path.exists():
            return []
        with reading(path), path.open("rb") as lines:  # splitlines() would end one at U+2028, too
            return [(line, record) for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it was cut off, or is damaged."""
    try:
        record = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _described(path: Path) -> Mapping[str, Any] | None:
    """What ``run.json`` says; None if there is none.

    Raises:
        ParameterError: it was not written by a run.
    """
    if not (path / "run.json").exists():
        return None
    try:
        described = parse_json((path / "run.json").read_bytes())
        return {"status": str(described["status"]), "identity": dict(described.get("identity", {}))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f"{path / 'run.json'} is not what a run writes there; choose another folder (Training(folder=...), "
            f"--folder)."
        ) from error


def _is_made(path: Path) -> bool:
    """Make a folder; False if another process was faster."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def jsonable(value: Any) -> Any:
    """`value` as it comes back from a JSON file: NaN and infinity as None, and types unknown to JSON as text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
