"""Find the checkpoint that a run resumes from: the newest undamaged one, if it belongs to the same run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flowrl.edits.diff import backend_changes
from flowrl.errors import DataError
from flowrl.run.training.checkpoint import STATE, Checkpoints
from flowrl.run.training.run_folder import RunFolder, jsonable

logger = logging.getLogger(__name__)

Found = tuple[Path, Mapping[str, Any]]
"""A checkpoint's folder, and its state."""

Accepted = Literal["data"]
"""What may differ from the run that is resumed."""

_OF: Mapping[Accepted, Sequence[str]] = {"data": ("data", "content of the data")}
"""The parts of a run's identity that each covers."""

_STATE: Mapping[str, type] = {
    "step": int,
    "data": dict,
    "last_scored_step": dict,
    "content": dict,
    "state": dict,
    "made_with": dict,
    "bindings": dict,
    "lines": dict,
}


def find(
    folder: RunFolder,
    checkpoints: Checkpoints,
    identity: Mapping[str, Any],
    bindings: Mapping[str, Any],
    steps: int | None,
    accept: Collection[Accepted] = (),
) -> Found | None:
    """The newest undamaged checkpoint; None to start from step 0. `steps` is None if they are not known yet."""
    found = checkpoints.latest()
    if found is None:
        _refuse_to_replace(folder, identity, accept)
        return None
    path, state = found
    _refuse_unknown_state(path, state)
    made_with = state["made_with"]
    changed = _changed(made_with, identity)
    if other := [key for key in changed if not any(key in _OF[each] for each in accept)]:
        raise DataError(
            f"The checkpoint {path} belongs to a run with another {other[0]}: {made_with.get(other[0])!r}, and here it "
            f"is {identity[other[0]]!r}. Resume with the original {other[0]}, {_or_accept(other)}or choose another "
            f"folder (Training(folder=...), --folder).",
            code="resume.other-run",
            path=path,
            changed=other[0],
            expected=made_with.get(other[0]),
            found=identity[other[0]],
        )
    if steps is not None:
        refuse_fewer_steps(found, steps)
    if changed:
        logger.warning("%s was written with another %s; the run resumes with the new one.", path, " and ".join(changed))
    before = state["bindings"]
    if before != bindings:
        roles = sorted({*before, *bindings})
        changes = [line for role in roles for line in backend_changes(role, before.get(role), bindings.get(role))]
        logger.warning(
            "%s was written with other backends (%s); the run resumes from its weights, but its numbers may differ "
            "from those of an uninterrupted run.",
            path,
            "; ".join(changes),
        )
    return found


def refuse_fewer_steps(found: Found, steps: int) -> None:
    """Refuse a checkpoint that is later than the last step."""
    path, state = found
    if state["step"] > steps:
        raise DataError(
            f"The checkpoint {path} is of step {state['step']}, after the last step, {steps}. Pass more steps (or "
            f"epochs), or remove the later checkpoints to resume from an earlier one.",
            code="resume.fewer-steps",
            path=path,
            found=state["step"],
            steps=steps,
        )


def accepted(found: Found | None, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What has differed in each resume of a run so far: the step, and the values before and after."""
    if found is None:
        return []
    _, state = found
    made_with = state["made_with"]
    changed = {key: [made_with.get(key), jsonable(identity)[key]] for key in _changed(made_with, identity)}
    return [*state.get("accepted", []), *([{"step": state["step"], "changed": changed}] if changed else [])]


def _changed(made_with: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """The parts of the identity of a run that differ."""
    return [key for key, value in jsonable(identity).items() if made_with.get(key) != value]


def _or_accept(changed: Sequence[str]) -> str:
    """The option that accepts these changes, for messages; empty if there is none."""
    covering = [each for each, keys in _OF.items() if {*changed} <= {*keys}]
    return "".join(f"accept the change (accept=({each!r},), --accept {each}), " for each in covering)


def _refuse_unknown_state(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse the state of a checkpoint that another version of flowrl wrote."""
    odd = [key for key, kind in _STATE.items() if not isinstance(state.get(key), kind)]
    if not odd and not all(isinstance(b, dict) and isinstance(b.get("$type"), str) for b in state["bindings"].values()):
        odd = ["bindings"]
    if odd:
        raise DataError(
            f"{path / STATE} has no valid {odd[0]!r} (it has {', '.join(state)}), so a training of this version of "
            f"flowrl did not write it. Choose another folder (Training(folder=...), --folder).",
            code="resume.unknown-state",
            path=path,
            missing=odd[0],
            found=list(state),
        )


def _refuse_to_replace(folder: RunFolder, identity: Mapping[str, Any], accept: Collection[Accepted]) -> None:
    """Refuse to start over without a checkpoint, unless the folder holds this same run, interrupted."""
    before = folder.before
    if before is None or folder.failed_at_once:
        return
    changed = _changed(before["identity"], identity)
    other = [key for key in changed if not any(key in _OF[each] for each in accept)]
    if other or before["status"] == "finished":
        what = f"a run with another {other[0]}" if other else "a finished run"
        raise DataError(
            f"{folder.path} holds {what} without a checkpoint, so resuming would overwrite it. Choose another folder "
            f"(Training(folder=...), --folder).",
            code="resume.no-checkpoint",
            path=folder.path,
            found=what,
        )
    logger.warning("%s holds no checkpoint; the run starts from step 0.", folder.path)


def warn_of_changed_prompts(path: Path, before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Warn of prompts that tokenize differently than before (such as by a template that prints the date)."""
    for name in (name for name in now if name in before and before[name] != now[name]):
        logger.warning(
            "%s was written with other %s: the file, the tokenizer or its chat template has changed since. The run "
            "continues, but its numbers may differ from those of an uninterrupted run.",
            path,
            name,
        )
