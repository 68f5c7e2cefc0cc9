"""`compare`: runs by configuration: what differs, and what of it their runs can tell."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from flowrl.errors import DataError
from flowrl.look.comparison import Comparison, Side
from flowrl.look.recorded_run import RecordedRun, open_run

_OF_A_RUN = ("training.seed", "training.folder", "training.resume", "training.costs", "training.data.path")
"""Parameters in which runs of one configuration may differ; the content of the data is compared instead."""


def compare(runs: Sequence[str | Path | RecordedRun], imports: bool = False) -> Comparison:
    """Compare runs: those that differ only in the seed are one side.

    Args:
        runs: run folders, patterns such as ``"runs/a-*"``, or open runs.
        imports: see `flowrl.open`.

    Raises:
        DataError: a folder holds no run, or a pattern matches none.
    """
    sides: dict[str, list[RecordedRun]] = {}
    parameters: dict[str, Mapping[str, Any]] = {}
    for run in _opened(runs, imports):
        found = parameters_of(run)
        sides.setdefault(key := repr(sorted(found.items())), []).append(run)
        parameters[key] = found
    return Comparison([Side(_name(n), some, parameters[key]) for n, (key, some) in enumerate(sides.items())])


def parameters_of(run: RecordedRun) -> dict[str, Any]:
    """The parameters of a run by dotted name, such as ``actor.optimizer.lr``, without those of a single run."""
    described = run.description
    graph, identity = described.get("graph", {}), described.get("identity", {})
    found = {f"{node}.{name}": value for node, spec in graph.get("nodes", {}).items() for name, value in _flat(spec)}
    found |= {
        f"{role}.{name}": value for role, spec in graph.get("bindings", {}).items() for name, value in _flat(spec)
    }
    found |= {f"training.{name}": value for name, value in _flat(described.get("training", {}))}
    found |= {f"content.{n}": value for n, value in enumerate(identity.get("content of the data", ()))}
    found |= {f"starting model.{role}": value for role, value in identity.get("starting model", {}).items()}
    found |= {name: value for name, value in _flat({name: described.get(name) for name in ("place", "optimize")})}
    found |= {f"graph.{name}": value for name, value in _flat({name: graph.get(name) for name in ("name", "lag")})}
    return {name: value for name, value in found.items() if name not in _OF_A_RUN}


def _opened(runs: Sequence[str | Path | RecordedRun], imports: bool) -> Iterator[RecordedRun]:
    for run in runs:
        if isinstance(run, RecordedRun):
            yield run
            continue
        if not glob.has_magic(str(run)):
            yield open_run(run, imports)
            continue
        paths = [path for path in sorted(glob.glob(str(run))) if (Path(path) / "run.json").is_file()]
        if not paths:
            raise DataError(f"{run} matches no run. Pass the folders of runs.", code="look.no-run", path=run)
        yield from (open_run(path, imports) for path in paths)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values in nested data, by dotted name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            part = "" if key in ("operator", "$type") else key
            yield from _flat(item, ".".join(filter(None, (name, part))))
    elif isinstance(value, list):
        yield name, tuple(map(repr, value))
    else:
        yield name or "type", value


def _name(number: int) -> str:
    return ascii_uppercase[number] if number < len(ascii_uppercase) else f"{number + 1}"
