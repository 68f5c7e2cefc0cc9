"""`RunFolder`: the files that a run writes."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import Field

from flowrl.data.files import file_digest, parse_json, reading, write, writing
from flowrl.errors import ParameterError, StorageError
from flowrl.run.training.lock import LOCK, FolderLock

logger = logging.getLogger(__name__)

LINES = ("metrics.jsonl", "predictions.jsonl", "rollouts.jsonl", "state.jsonl", "alarms.jsonl")
SPANS = "spans.jsonl"
RECORDED = ("rows", "texts", "columns")
TRACE = "trace.json"
CHECKPOINTS = "checkpoints"
Lines = list[Mapping[str, float]]
Resume = Annotated[bool, Field(strict=True)] | Literal["or-start"]


class RunFolder:
    """The folder of a run.

    It holds ``run.json`` (what ran), lines of each step (`LINES`), ``spans.jsonl``, ``trace.json``, the recorded rows
    (`RECORDED`), the checkpoints and the trained weights.

    Args:
        before: the ``run.json`` that was already there; None if there was none.
    """

    def __init__(self, path: Path, before: Mapping[str, Any] | None = None, lock: FolderLock | None = None) -> None:
        self.path, self.before, self._lock = path, before, lock
        self._description: dict[str, Any] = {}

    @staticmethod
    def create(folder: str | None, name: str, resume: Resume, exports: Iterable[str] = ()) -> RunFolder:
        """Create and lock a folder: a new one, or one whose run ended before its first step; with `resume`, any.

        Args:
            exports: folders in it that the run writes trained weights to.
        """
        path = Path("runs") / f"{name}-001" if folder is None else Path(folder).expanduser()
        lock = None
        try:
            if resume is True:
                _refuse_no_run(path)
            if folder is None:
                number = 1
                while path.exists() or not _is_made(path):
                    number += 1
                    path = path.with_name(f"{name}-{number:03d}")
            path.mkdir(parents=True, exist_ok=True)
            _refuse_links(path, exports)
            with tempfile.TemporaryFile(dir=path):  # finds an unwritable folder before a model loads
                lock = FolderLock(path)
            found = RunFolder(path, _described(path), lock)
            if not (found.before is None or resume or found.failed_at_once):
                raise ParameterError(
                    f"The folder {path} already holds a run. Choose another folder (Training(folder=...), --folder), "
                    f"or resume the run from its last checkpoint (resume=True, --resume).",
                    code="run.folder-taken",
                    path=path,
                )
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL, or our own error
            if lock is not None:
                lock.release()
            if isinstance(error, ParameterError):
                raise
            what = (error.strerror if isinstance(error, OSError) else None) or error
            raise ParameterError(
                f"The folder {path} cannot be written ({what}). Choose another one (Training(folder=...), --folder).",
                code="data.unwritable-file",
                path=path,
                reason=what,
            ) from error
        return found

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()

    @property
    def failed_at_once(self) -> bool:
        """Whether the earlier run ended before its first step was done. With the status "running" it was killed, since
        its lock is gone."""
        failed = self.before is not None and self.before["status"] != "finished"
        return failed and not any("timing/step" in record for _, record in self._read("metrics.jsonl"))

    def describe(self, described: Mapping[str, Any]) -> None:
        """Add to ``run.json``, which is written atomically."""
        self._description |= described
        text = json.dumps(jsonable(self._description), indent=2).encode() + b"\n"
        try:
            write(self.path / "run.json", text)
        except StorageError:
            if self._lock is None:
                raise
            self._lock.free_reserve()
            write(self.path / "run.json", text)

    def append(self, file: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to a JSONL file: NaN and infinity as null, and types unknown to JSON as text."""
        with writing(self.path / file), (self.path / file).open("ab") as lines:
            for record in records:
                lines.write(_line(record))

    def marks(self) -> dict[str, str]:
        """The digest of each JSONL file, flushed to disk first: a checkpoint must not outlast the lines before it."""
        found = {}
        for file in (file for file in LINES if (self.path / file).exists()):
            with writing(self.path / file):
                with (self.path / file).open("ab") as lines:
                    os.fsync(lines.fileno())
                found[file] = file_digest(self.path / file)
        return found

    def rewind(self, step: int, marks: Mapping[str, str] | None = None) -> tuple[Lines, Lines]:
        """Drop unreadable lines and those after `step`; warn if earlier lines are missing.

        Returns the remaining lines of steps, and those of validations. `marks` are the digests after `step`.
        """
        for file in LINES:
            retained = b"".join(line for line, record in self._read(file) if record["step"] <= step)
            if (self.path / file).exists():
                write(self.path / file, retained)
            if marks is not None and marks.get(file, _digest(b"")) != _digest(retained):
                self._warn_of_loss(file, step)
        return self.lines()

    def lines(self) -> tuple[Lines, Lines]:
        """The readable lines of steps, and those of validations."""
        # NaN and infinity were written as null
        lines = [{k: math.nan if v is None else v for k, v in line.items()} for _, line in self._read("metrics.jsonl")]
        return [line for line in lines if "timing/step" in line], [line for line in lines if "timing/step" not in line]

    def records(self, file: str) -> list[dict[str, Any]]:
        """The readable records of a JSONL file; none if there is no such file."""
        return [record for _, record in self._read(file)]

    def _warn_of_loss(self, file: str, step: int) -> None:
        """Warn that a JSONL file has changed since a checkpoint."""
        there = {record["step"] for _, record in self._read(file) if "timing/step" in record}
        gone = [str(number) for number in range(1, step + 1) if number not in there]
        what = f", and lacks the steps {', '.join(gone)}" if file == "metrics.jsonl" and gone else ""
        logger.warning(
            "%s has changed since the checkpoint after step %d was written%s: it was shortened, edited or removed. "
            "The run continues with the remaining lines. To have all of them, restore a copy before resuming.",
            self.path / file,
            step,
            what,
        )

    def _read(self, file: str) -> list[tuple[bytes, dict[str, Any]]]:
        """The complete lines of a JSONL file that hold a record of a step, each with its record."""
        path = self.path / file
        if not path.exists():
            return []
        with reading(path), path.open("rb") as lines:  # splitlines() would end one at U+2028, too
            return [(line, record) for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line is incomplete or damaged."""
    try:
        record = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _described(path: Path) -> Mapping[str, Any] | None:
    """The content of ``run.json``, with status and identity; None if there is none."""
    if not (path / "run.json").exists():
        return None
    try:
        described = parse_json((path / "run.json").read_bytes())
        return {**described, "status": str(described["status"]), "identity": dict(described.get("identity", {}))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f"{path / 'run.json'} was not written by a run, or is damaged. Choose another folder "
            f"(Training(folder=...), --folder).",
            code="run.damaged",
            path=path,
        ) from error


def recorded_commits(folder: str | None) -> list[dict[str, Any]]:
    """The commits of repositories that the run in a folder records; none if there is no run."""
    described = None if folder is None else _described(Path(folder).expanduser())
    return [] if described is None else described.get("commits", [])


def _refuse_no_run(path: Path) -> None:
    """Refuse to resume in a folder without a run."""
    if not any((path / name).exists() for name in ("run.json", CHECKPOINTS)):
        raise ParameterError(
            f"{path} holds no run to resume. Pass the folder of the run (Training(folder=...), --folder), or let a job "
            f"that restarts begin the run if there is none: Training(resume='or-start'), --resume-or-start.",
            code="resume.no-run",
            path=path,
        )


def _refuse_links(folder: Path, exports: Iterable[str]) -> None:
    """Refuse links that would make a run write or delete outside of its folder. The folder itself may be a link, and so
    may a checkpoint, which a run reads, or replaces as a link."""
    from flowrl.run.reporting.reported import REPORTED

    inside = folder.resolve()
    written = [*(folder / name for name in (LOCK, "run.json", *LINES, SPANS, TRACE, REPORTED, CHECKPOINTS))]
    written += [path for name in RECORDED for path in (folder / name, *(folder / name).rglob("*"))]
    for role in exports:
        written += [folder / role, *(folder / role).rglob("*")]
    for path in filter(Path.is_symlink, written):
        if path.name == LOCK or not Path(os.path.realpath(path)).is_relative_to(inside):
            raise ParameterError(
                f"{path} is a link to {path.readlink()}, through which the run would write or delete files outside of "
                f"its folder. Remove the link, or choose another folder (Training(folder=...), --folder).",
                code="run.link",
                path=path,
                target=path.readlink(),
            )


def _is_made(path: Path) -> bool:
    """Create a folder; False if another process was faster."""
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
    """`value` as a JSON file returns it: NaN and infinity as None, and types unknown to JSON as text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
