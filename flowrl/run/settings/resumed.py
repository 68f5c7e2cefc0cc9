"""What settings change relative to the run that is resumed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.data.files import parse_json
from flowrl.errors import DataError
from flowrl.files.graph_io import graph_to_dict
from flowrl.files.values import encode
from flowrl.run.settings.changes import owner_of
from flowrl.run.training.run_folder import jsonable
from flowrl.run.training.training import Training

FIXED = ("seed", "prompts", "data")
"""Fields that belong to the identity of a run; see `flowrl.run.training.identity`."""


def changes(
    training: Training, given: Mapping[str, str], accept: Collection[str], flag: str = "--set"
) -> Iterator[str]:
    """A line for each setting that differs from the recorded run of the training's folder.

    Args:
        given: the texts of the settings by path; the training has them.

    Raises:
        DataError: one that a resumed run must share with the original.
    """
    run = Path(training.folder or "").expanduser() / "run.json"
    if not run.is_file():
        return
    before = parse_json(run.read_bytes())
    for path, text in given.items():
        old, new = _recorded(before, training, path), jsonable(_now(training, path))
        if old == new:
            continue
        if (what := _fixed(training, path)) is not None and what not in accept:
            option = f"accept the change (--accept {what}), " if what == "data" else ""
            raise DataError(
                f"{flag} {path}={text} is not possible on --resume: {run.parent} was started with {_short(old)}, and a "
                f"resumed run has the {what} of the original. Leave it out, {option}or start another run "
                f"(--folder, without --resume).",
                code="resume.other-run",
                path=run.parent,
                changed=what,
                expected=old,
                found=new,
            )
        yield f"{flag} {path}: {_short(old)} in the recorded run, {_short(new)} from now on"


def _fixed(training: Training, path: str) -> str | None:
    """The part of a run's identity that a setting belongs to, if any."""
    owner, root = owner_of(training, path), path.partition(".")[0]
    if owner is not None and owner.kind == "node":
        return "graph"
    return root if owner is not None and owner.kind == "training" and root in FIXED else None


def _now(training: Training, path: str) -> Any:
    """The setting at a path, as ``run.json`` records it."""
    graph = graph_to_dict(training.job.graph, portable=False)
    root, owner = path.partition(".")[0], owner_of(training, path)
    fields = {} if owner is None or owner.kind != "training" else {root: encode(owner.value, root, portable=False)}
    job = {name: encode(getattr(training.job, name), name, portable=False) for name in ("place", "optimize")}
    return _recorded({"graph": graph, "training": fields, **job}, training, path)


def _recorded(described: Mapping[str, Any], training: Training, path: str) -> Any:
    """The setting at a path in the description of a run; None if it has none."""
    root, _, rest = path.partition(".")
    owner, graph = owner_of(training, path), described["graph"]
    places: dict[str, Any] = {
        "node": graph["nodes"].get(root, {}).get("operator"),
        "role": graph["bindings"].get(root),
        "training": described["training"].get(root),
        "job": described.get(root),
        "graph": graph.get(root),
    }
    found = None if owner is None else places[owner.kind]
    for name in rest.split(".") if rest else ():
        if isinstance(found, list):
            named = (item.get("name", i) if isinstance(item, Mapping) else i for i, item in enumerate(found))
            found = dict(zip(map(str, named), found, strict=True))
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _short(value: Any) -> str:
    """A recorded value as text."""
    if isinstance(value, Mapping) and "$type" in value:
        inside = ", ".join(f"{k}={_short(v)}" for k, v in value.items() if not k.startswith("$"))
        return f"{value['$type'].rpartition(':')[2]}({inside})"
    return f"{value:g}" if isinstance(value, float) else str(value)
