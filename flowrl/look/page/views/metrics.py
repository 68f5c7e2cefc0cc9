"""The metrics of a run in columns; of one that grows, only the new lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.look.page.plain import short
from flowrl.look.page.watched import WatchedRun


def metrics(run: WatchedRun, after: int = 0, start: int | None = None) -> dict[str, Any]:
    """The metrics after line `after`; all of them if the file was rewritten since.

    Args:
        after, start: those of the previous answer.
    """
    lines = run.lines.records()
    again = start == run.lines.generation and 0 < after <= len(lines)
    new = [line for line in lines[after if again else 0 :] if type(line.get("step")) is int]
    return {
        "after": len(lines),
        "start": run.lines.generation,
        "again": again,
        "count": len(new),
        "training": _columns([line for line in new if "timing/step" in line]),
        "validation": _columns([line for line in new if "timing/step" not in line]),
    }


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for line in lines for key in line if key not in ("step", "time"))
    return {
        "steps": [line["step"] for line in lines],
        "columns": {key: [short(line.get(key)) for line in lines] for key in keys},
    }
