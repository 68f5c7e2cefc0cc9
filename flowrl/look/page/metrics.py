"""The metrics of a run in columns; of one that grows, only the lines after a byte offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.data.files import parse_json
from flowrl.look.page.plain import short
from flowrl.look.recorded_run import RecordedRun


def metrics(run: RecordedRun, after: int = 0, start: int | None = None) -> dict[str, Any]:
    """The metrics from byte `after` on; all of them if the run resumed since, or the file is shorter now.

    Args:
        after: the `after` of the previous answer.
        start: the `start` of the previous answer, the number of times that the run had started.
    """
    path, starts = run.path / "metrics.jsonl", len(run.description.get("starts", ()))
    size = path.stat().st_size if path.exists() else 0
    again = start == starts and 0 < after <= size
    data = b""
    if size:
        with path.open("rb") as file:
            file.seek(after if again else 0)
            data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    lines = [record for line in complete.split(b"\n") if (record := _record(line)) is not None]
    return {
        "after": (after if again else 0) + len(complete),
        "start": starts,
        "again": again,
        "count": len(lines),
        "training": _columns([line for line in lines if "timing/step" in line]),
        "validation": _columns([line for line in lines if "timing/step" not in line]),
    }


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line) if line else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for line in lines for key in line if key not in ("step", "time"))
    return {
        "steps": [line["step"] for line in lines],
        "columns": {key: [short(line.get(key)) for line in lines] for key in keys},
    }
