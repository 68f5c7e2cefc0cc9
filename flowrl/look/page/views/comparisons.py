"""Two runs side by side, as tables: what differs between them, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.look.page.plain import short
from flowrl.look.page.watched import WatchedRun

NEWEST = 5
"""Steps whose mean is shown of a metric."""


def comparison(run: WatchedRun, other: WatchedRun) -> dict[str, Any]:
    """Tables of parameters that differ, of the newest metrics, and of seconds."""
    parameters = [dict(_flat(one.description)) for one in (run, other)]
    names = dict.fromkeys(name for found in parameters for name in found)
    differing = [[name, *(found.get(name) for found in parameters)] for name in names]
    columns = ["", run.name, other.name]
    return {
        "basis": [
            "One run a side: this compares two checkpoints, not two methods.",
            f"Metrics are means of the newest {NEWEST} steps or of the newest validation.",
        ],
        "tables": [
            {
                "title": "Parameters that differ",
                "columns": columns,
                "rows": [[str(cell) for cell in row] for row in differing if row[1] != row[2]],
                "empty": "Nothing but the seed and the folder can differ: all parameters are equal.",
            },
            {"title": "Metrics", "columns": columns, "rows": _means(run, other), "empty": "No step is done."},
        ],
    }


def _flat(described: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    graph = described.get("graph") or {}
    for part in (graph.get("nodes"), graph.get("bindings"), {"training": described.get("training")}):
        yield from _leaves(part or {}, "")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values in nested data, by dotted name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            part = "" if key in ("operator", "$type") else key
            yield from _leaves(item, ".".join(filter(None, (name, part))))
    else:
        yield name, str(value) if isinstance(value, list | Mapping) else value


def _means(run: WatchedRun, other: WatchedRun) -> list[list[Any]]:
    found = []
    for lines, newest in (
        ([one.validations for one in (run, other)], 1),
        ([one.training for one in (run, other)], NEWEST),
    ):
        keys = dict.fromkeys(key for mine in lines for line in mine for key in line)
        for key in (key for key in keys if key not in ("step", "time") and not key.startswith("total/")):
            values = [[v for line in mine if (v := line.get(key)) is not None][-newest:] for mine in lines]
            found.append([key, *(short(statistics.fmean(some)) if some else None for some in values)])
    return found
