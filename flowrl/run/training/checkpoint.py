"""Checkpoints: folders that are written atomically, each with a manifest of its files.

A checkpoint is completed with a manifest of the xxh3-128 of every file, then renamed. If the newest one is damaged,
`Checkpoints.latest` warns and returns the one before it.
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

from flowrl.core.graphs.graph import Graph
from flowrl.data.files import file_digest, parse_json, remove, replaced, writing
from flowrl.data.proto.formats import check_json
from flowrl.data.proto.rows import is_count
from flowrl.errors import DataError, ParameterError
from flowrl.protocols.backend import refuse_uncheckpointed

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, ``<folder>/step-000010`` and so on.

    Args:
        folder: their parent folder; only one run at a time writes to it.
        max_checkpoints: how many of the newest to retain.
    """

    folder: Path
    max_checkpoints: int

    def __post_init__(self) -> None:
        if not is_count(self.max_checkpoints):
            raise ParameterError(
                f"Checkpoints(max_checkpoints={self.max_checkpoints!r}) would retain none; expected an integer of at "
                f"least 1.",
                code="checkpoint.none-retained",
                found=self.max_checkpoints,
            )

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None], best: int | None = None) -> Path:
        """Write the checkpoint after `step`, and remove later ones, written before a resume.

        Args:
            state: JSON-able state that is not in the engines; `latest` returns it with ``"step"``.
            write: writes the engines into the given folder.
            best: a step whose checkpoint is retained in addition.
        """
        full_state = {**state, "step": step}
        check_json(full_state, "the state of a checkpoint")
        path = self.path(step)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.iterdir():  # of interrupted saves
                if re.fullmatch(r"\.step-\d{6,}\.(partial|replaced)", leftover.name):
                    remove(leftover)
        with replaced(path) as draft:
            draft.mkdir()
            write(draft)
            (draft / STATE).write_text(json.dumps(full_state, indent=2), encoding="utf-8")
            paths = sorted(path for path in draft.rglob("*") if path.is_file())
            files = {path.relative_to(draft).as_posix(): file_digest(path) for path in paths}
            manifest = {"files": files, "digest": _seal(files)}
            (draft / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        retained = [other for other in self.steps() if other <= step][-self.max_checkpoints :]
        for other in self.steps():
            if other not in (*retained, best):
                with writing(self.path(other)):
                    remove(self.path(other))
        return path

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged ones included."""
        names = [path.name for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,}", name))

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest undamaged checkpoint and its state; None if there are no checkpoints."""
        faults: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            if fault := find_fault(path):
                faults.append(fault)
                continue
            for fault in faults:
                logger.warning("%s; resuming from %s, which is intact.", fault, path.name)
            state: dict[str, Any] = parse_json((path / STATE).read_bytes())
            return path, state
        if faults:
            raise DataError(
                f"All checkpoints in {self.folder} are damaged: {'; '.join(faults)}. Restore a copy of one, or move "
                f"the folder away to start the run from step 0.",
                code="checkpoint.damaged",
                path=self.folder,
                faults=faults,
            )
        return None

    def intact(self, step: int) -> Path:
        """The checkpoint after a step; refuses a damaged one."""
        if fault := find_fault(self.path(step)):
            raise DataError(
                f"{fault[0].upper()}{fault[1:]}. Restore a copy of it.",
                code="checkpoint.damaged",
                path=self.path(step),
                faults=[fault],
            )
        return self.path(step)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after a step."""
        return self.folder / _name(step)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def find_fault(path: Path) -> str | None:
    """The fault of a damaged checkpoint, or None; files that the manifest does not name are no fault."""
    try:
        manifest = parse_json((path / MANIFEST).read_bytes())
        files: dict[str, str] = dict(manifest["files"])
        if manifest["digest"] != _seal(manifest["files"]):
            return f"the checkpoint {path} is damaged: its {MANIFEST} has changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the checkpoint {path} has no readable {MANIFEST} ({type(error).__name__})"
    if STATE not in files:
        return f"the checkpoint {path} is damaged: its {MANIFEST} names no {STATE}"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"the checkpoint {path} is damaged: the file {name!r} is missing"
        try:
            found = file_digest(path / name)
        except OSError as error:
            return f"the checkpoint {path} is damaged: {name} cannot be read ({type(error).__name__})"
        if found != digest:
            return f"the checkpoint {path} is damaged: {name} has changed"
    try:
        state = parse_json((path / STATE).read_bytes())
    except ValueError as error:
        return f"the checkpoint {path} is damaged: {STATE} is not JSON ({error})"
    if not isinstance(state, dict) or type(state.get("step")) is not int or path.name != _name(state["step"]):
        return f"the checkpoint {path} is damaged: {STATE} is of another step than the folder's name"
    return None


def _seal(files: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())


def refuse_no_checkpoints(graph: Graph, setting: str) -> None:
    """Refuse a setting that writes checkpoints, for engines without them and states that JSON cannot represent."""
    refuse_uncheckpointed(graph.trained, graph.bindings, setting, f"leave {setting.partition('=')[0]} out")
    for node in graph.nodes.values():
        for field, state in node.operator.states.items():
            check_json(state.initial(node.operator.in_step(0)), f"the state {node.name}.{field}")
