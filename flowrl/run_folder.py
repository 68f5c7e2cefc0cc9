"""The folder of a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ParameterError

LINES = ("metrics.jsonl", "predictions.jsonl")


class RunFolder:
    """The folder of a run.

    It holds ``run.json`` (what ran), ``metrics.jsonl``, ``predictions.jsonl``, ``trace.json``, the checkpoints and the
    trained weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(folder: str | None, name: str, resume: bool) -> RunFolder:
        """A new folder; or with `resume` one that may hold a run.

        Raises:
            ParameterError: `folder` already holds a run.
        """
        if folder is not None:
            path = Path(folder).expanduser()
            if (path / "run.json").exists() and not resume:
                raise ParameterError(
                    f"{path} already holds a run; choose another folder, go on with it by resume=True, or remove it "
                    f"first."
                )
            path.mkdir(parents=True, exist_ok=True)
            return RunFolder(path)
        number = 1
        while True:
            path = Path("runs") / f"{name}-{number:03d}"
            try:
                path.mkdir(parents=True)
                return RunFolder(path)
            except FileExistsError:
                number += 1

    def describe(self, described: Mapping[str, Any]) -> None:
        """Write ``run.json``, whole or not at all."""
        partial = self.path / "run.json.partial"
        partial.write_text(json.dumps(_jsonable(described), indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / "run.json")

    def append(self, file: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to a JSONL file; NaN and infinity are written as null, and what JSON does not know as text."""
        with (self.path / file).open("a", encoding="utf-8") as lines:
            for record in records:
                lines.write(_line(record))

    def flush(self) -> None:
        """All lines to the disk: a checkpoint must not outlast the lines of the steps before it."""
        for file in LINES:
            if (self.path / file).exists():
                with (self.path / file).open("a") as lines:
                    os.fsync(lines.fileno())

    def rewind(self, step: int) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
        """Drop what was written after `step`; returns the lines of steps and those of validations that are left."""
        for file in LINES:
            if (self.path / file).exists():
                kept = [record for record in self._read(file) if record["step"] <= step]
                partial = self.path / f"{file}.partial"
                partial.write_text("".join(_line(record) for record in kept), encoding="utf-8")
                partial.replace(self.path / file)
        # what is no number to JSON was written as null
        lines = [{k: math.nan if v is None else v for k, v in line.items()} for line in self._read("metrics.jsonl")]
        return [line for line in lines if "timing/step" in line], [line for line in lines if "timing/step" not in line]

    def _read(self, file: str) -> list[dict[str, Any]]:
        """The records of a JSONL file, less a last line that was cut off; none where there is no file."""
        if not (self.path / file).exists():
            return []
        with (self.path / file).open(encoding="utf-8") as lines:  # splitlines() would end one at U+2028, too
            return [json.loads(line) for line in lines if line.endswith("\n")]


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
