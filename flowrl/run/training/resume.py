"""What a resumed run goes on from: the newest whole checkpoint, if it is of the same run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.edits.diff import backend_changes
from flowrl.errors import DataError
from flowrl.run.training.checkpoint import STATE, Checkpoints
from flowrl.run.training.run_folder import RunFolder, jsonable

logger = logging.getLogger(__name__)

Found = tuple[Path, Mapping[str, Any]]
"""A checkpoint's folder, and its state."""

_STATE: Mapping[str, type] = {
    "step": int,
    "data": dict,
    "heard": dict,
    "content": dict,
    "state": dict,
    "made_with": dict,
    "bindings": dict,
    "lines": dict,
}


def find(
    folder: RunFolder, checkpoints: Checkpoints, identity: Mapping[str, Any], bindings: Mapping[str, Any], steps: int
) -> Found | None:
    """The newest whole checkpoint, where there is one; None is to start anew.

    Args:
        folder: of the run.
        checkpoints: its checkpoints.
        identity: of the run that resumes; see `flowrl.run.training.identity`.
        bindings: its backends, as JSON-able data.
        steps: how many it has in all.

    Raises:
        DataError: the checkpoint is of another run, or of more steps, or not one of a training; or all checkpoints are
            damaged; or there is none, and the folder holds a run that is finished, or another one.
    """
    found = checkpoints.latest()
    if found is None:
        _refuse_to_replace(folder, identity)
        return None
    path, state = found
    odd = [key for key, kind in _STATE.items() if not isinstance(state.get(key), kind)]
    if not odd and not all(isinstance(b, dict) and isinstance(b.get("$type"), str) for b in state["bindings"].values()):
        odd = ["bindings"]
    if odd:
        raise DataError(
            f"{path / STATE} says no {odd[0]} as a training does (it has {', '.join(state)}), so it is of something "
            f"else, or of another version of flowrl; name another folder."
        )
    made_with = state["made_with"]
    if other := [key for key, value in jsonable(identity).items() if made_with.get(key) != value]:
        raise DataError(
            f"{path} is of a run with another {other[0]} ({made_with.get(other[0])!r}, and here it is "
            f"{identity[other[0]]!r}); resume with what it was made with, or name another folder."
        )
    if state["step"] > steps:
        raise DataError(
            f"{path} stands after step {state['step']}, and steps={steps} ends before; ask for more steps, or "
            f"remove the later checkpoints to go back."
        )
    before = state["bindings"]
    if before != bindings:
        roles = sorted({*before, *bindings})
        changes = [line for role in roles for line in backend_changes(role, before.get(role), bindings.get(role))]
        logger.warning(
            "%s was made with other backends (%s); the run goes on from its weights, and its numbers need not be "
            "those of the uninterrupted one.",
            path,
            "; ".join(changes),
        )
    return found


def _refuse_to_replace(folder: RunFolder, identity: Mapping[str, Any]) -> None:
    """Without a checkpoint a run starts anew, over what is there: right only where that is this run, cut off.

    Raises:
        DataError: it is another run, or finished.
    """
    before = folder.before
    if before is None or folder.failed_at_once:
        return
    made_with = before["identity"]
    other = [key for key, value in jsonable(identity).items() if made_with.get(key) != value]
    if other or before["status"] == "finished":
        what = f"a run with another {other[0]}" if other else "a finished run"
        raise DataError(
            f"{folder.path} holds {what} and no checkpoint to go on from, so resuming would overwrite it; choose "
            f"another folder (Training(folder=...), --folder)."
        )
    logger.warning("%s holds no checkpoint; the run starts anew.", folder.path)


def warn_of_changed_prompts(path: Path, before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Warn of prompts that are tokenised in another way than before (as by a template that writes the date), or of
    others to validate on.

    Args:
        path: the checkpoint.
        before, now: `PromptStream.digest` of what is trained on and of each validation, by name.
    """
    for name in (name for name in now if name in before and before[name] != now[name]):
        logger.warning(
            "%s was made with other %s: the file, the tokeniser or its chat template has changed since. The run goes "
            "on, and its numbers need not be those of the uninterrupted one.",
            path,
            name,
        )
