"""Checkpoints: folders that are either whole or absent, each with a manifest of what belongs in it.

A checkpoint is written next to its place, closed with a manifest of the xxh3-128 of every file, and renamed into place.
A damaged one is passed over, with a warning, for the one before it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from flowrl.data.files import file_digest, parse_json, remove, replaced, writing
from flowrl.data.proto.formats import check_json
from flowrl.data.proto.rows import is_count
from flowrl.errors import DataError, ParameterError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, ``<folder>/step-000010`` and so on.

    Args:
        folder: where they are; only one run at a time writes there.
        max_checkpoints: how many of the newest are kept; older ones are removed once a newer one is complete.

    Raises:
        ParameterError: `keep` is no number, or less than 1.
    """

    folder: Path
    max_checkpoints: int

    def __post_init__(self) -> None:
        if not is_count(self.max_checkpoints):
            raise ParameterError(
                f"Checkpoints(max_checkpoints={self.max_checkpoints}) would keep none; expected at least 1."
            )

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Write the checkpoint after `step`, and remove any later ones, left over from before a resume.

        Args:
            step: steps done.
            state: what is not in the engines; `latest` returns it unchanged, with ``"step"``.
            write: writes the engines into the folder that it is given.

        Raises:
            DataError: JSON would not give `state` back exactly; nothing is written then.
            StorageError: it cannot be written; those before it stay.
        """
        stated = {**state, "step": step}
        check_json(stated, "the state of a checkpoint")
        path = self._path(step)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.iterdir():  # of saves that were cut off
                if re.fullmatch(r"\.step-\d{6,}\.(partial|replaced)", leftover.name):
                    remove(leftover)
        with replaced(path) as draft:
            draft.mkdir()
            write(draft)
            (draft / STATE).write_text(json.dumps(stated, indent=2), encoding="utf-8")
            paths = sorted(path for path in draft.rglob("*") if path.is_file())
            files = {path.relative_to(draft).as_posix(): file_digest(path) for path in paths}
            manifest = {"files": files, "digest": _seal(files)}
            (draft / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        kept = [other for other in self.steps() if other <= step][-self.max_checkpoints :]
        for other in self.steps():
            if other not in kept:
                with writing(self._path(other)):
                    remove(self._path(other))
        return path

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged."""
        names = [path.name for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,}", name))

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its state; None if there are no checkpoints.

        Raises:
            DataError: there are checkpoints, but all are damaged.
        """
        faults: list[str] = []
        for step in reversed(self.steps()):
            path = self._path(step)
            if fault := find_fault(path):
                faults.append(fault)
                continue
            for fault in faults:
                logger.warning("%s; going on from %s, which is whole.", fault, path.name)
            state: dict[str, Any] = parse_json((path / STATE).read_bytes())
            return path, state
        if faults:
            raise DataError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(faults)}. Put back a copy of one, or move the "
                f"folder away to start the run afresh."
            )
        return None

    def _path(self, step: int) -> Path:
        return self.folder / _name(step)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None; a file that the manifest does not name is not a fault."""
    try:
        manifest = parse_json((path / MANIFEST).read_bytes())
        files: dict[str, str] = dict(manifest["files"])
        if manifest["digest"] != _seal(manifest["files"]):
            return f"the checkpoint {path} is damaged: its {MANIFEST} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the checkpoint {path} has no {MANIFEST} that can be read ({type(error).__name__})"
    if STATE not in files:
        return f"the checkpoint {path} is damaged: its {MANIFEST} names no {STATE}"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"the checkpoint {path} is damaged: {name!r} is no file there"
        try:
            found = file_digest(path / name)
        except OSError as error:
            return f"the checkpoint {path} is damaged: {name} cannot be read ({type(error).__name__})"
        if found != digest:
            return f"the checkpoint {path} is damaged: {name} is not what was written"
    try:
        stated = parse_json((path / STATE).read_bytes())
    except ValueError as error:
        return f"the checkpoint {path} is damaged: {STATE} is not JSON ({error})"
    if not isinstance(stated, dict) or type(stated.get("step")) is not int or path.name != _name(stated["step"]):
        return f"the checkpoint {path} is damaged: {STATE} is not of the step that the folder is named by"
    return None


def _seal(files: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())
