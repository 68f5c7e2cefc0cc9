"""What a run writes: `RunFolder`."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data.files import write_text
from flowrl.errors import ParameterError

LINES = ("metrics.jsonl", "predictions.jsonl")


class RunFolder:
    """The folder of a run.

    It holds ``run.json`` (what ran), ``metrics.jsonl``, ``predictions.jsonl``, ``trace.json``, the checkpoints and the
    trained weights.

    Args:
        path: where it is.
        before: what ``run.json`` said of the run that the folder already held; None if it held none.
    """

    def __init__(self, path: Path, before: Mapping[str, Any] | None = None) -> None:
        self.path, self.before = path, before

    @staticmethod
    def create(folder: str | None, name: str, resume: bool) -> RunFolder:
        """A new folder, or one whose run failed before its first step was done; with `resume`, any folder.

        Raises:
            ParameterError: `folder` already holds a run, or cannot be written.
        """
        path = Path("runs") / f"{name}-001" if folder is None else Path(folder).expanduser()
        try:
            if folder is not None:
                found = RunFolder(path, _described(path))
                if not (found.before is None or resume or found.failed_at_once):
                    raise ParameterError(
                        f"{path} already holds a run; choose another folder (Training(folder=...), --folder), or go on "
                        f"from its last checkpoint by resume=True / --resume."
                    )
                path.mkdir(parents=True, exist_ok=True)
            else:
                number = 1
                while path.exists() or not _is_made(path):
                    number += 1
                    path = path.with_name(f"{name}-{number:03d}")
                found = RunFolder(path)
            with tempfile.TemporaryFile(dir=path):  # an unwritable folder is found before a model loads
                return found
        except OSError as error:
            raise ParameterError(
                f"the folder {path} cannot be written ({error.strerror}); choose another by Training(folder=...) or "
                f"--folder."
            ) from error

    @property
    def failed_at_once(self) -> bool:
        """Whether the run that the folder held ended before its first step was done."""
        failed = self.before is not None and self.before["status"] in ("failed", "interrupted")
        return failed and not any("timing/step" in line for line in self._read("metrics.jsonl"))

    def describe(self, described: Mapping[str, Any]) -> None:
        """Write ``run.json``, whole or not at all."""
        write_text(self.path / "run.json", json.dumps(jsonable(described), indent=2) + "\n")

    def append(self, file: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to a JSONL file; NaN and infinity are written as null, and types unknown to JSON as text."""
        with (self.path / file).open("a", encoding="utf-8") as lines:
            for record in records:
                lines.write(_line(record))

    def flush(self) -> None:
        """Flush all lines to disk: a checkpoint must not outlast the lines of the steps before it."""
        for file in LINES:
            if (self.path / file).exists():
                with (self.path / file).open("a") as lines:
                    os.fsync(lines.fileno())

    def rewind(self, step: int) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
        """Drop what was written after `step`; returns the remaining lines of steps, and those of validations."""
        for file in LINES:
            if (self.path / file).exists():
                kept = [record for record in self._read(file) if record["step"] <= step]
                write_text(self.path / file, "".join(_line(record) for record in kept))
        # numbers that JSON does not know were written as null
        lines = [{k: math.nan if v is None else v for k, v in line.items()} for line in self._read("metrics.jsonl")]
        return [line for line in lines if "timing/step" in line], [line for line in lines if "timing/step" not in line]

    def _read(self, file: str) -> list[dict[str, Any]]:
        """The records of a JSONL file, without a last line that was cut off; none if there is no file."""
        if not (self.path / file).exists():
            return []
        with (self.path / file).open(encoding="utf-8") as lines:  # splitlines() would end one at U+2028, too
            return [json.loads(line) for line in lines if line.endswith("\n")]


def _described(path: Path) -> Mapping[str, Any] | None:
    """What ``run.json`` says; None if there is none.

    Raises:
        ParameterError: it was not written by a run.
    """
    if not (path / "run.json").exists():
        return None
    try:
        described = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return {"status": described["status"], **described}
    except (ValueError, KeyError, TypeError) as error:
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


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"


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
