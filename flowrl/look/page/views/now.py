"""The state of a run at a step: what each node did, what runs, alarms, the time left and some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flowrl.errors import DataError
from flowrl.look.page.plain import prompt_text, short
from flowrl.look.page.views.graphs import badge
from flowrl.look.page.watched import WatchedRun

NOT_NODES = ("timing/step", "timing/waiting_share")
"""Timings that are not the seconds of a node or a wait."""
NEWEST = 16
"""Rows next to the graph."""


def now(run: WatchedRun, step: int | None = None) -> dict[str, Any]:
    """The state at a step, by default the latest; without a step yet, what runs."""
    training = run.training
    lines = training if step is None else [line for line in training if line["step"] <= step]
    line = lines[-1] if lines else {}
    at = line.get("step")
    running = run.open_nodes if step is None and run.status == "running" else []
    planned = (run.description.get("training") or {}).get("steps")
    seconds = median(one["timing/step"] for one in lines[-10:]) if lines else None
    per_step = _wall(lines[-11:]) or seconds
    newest, no_rows = _newest(run, at)
    return {
        "step": at,
        "done": at or 0,
        "planned": planned,
        "step_seconds": short(seconds),
        "left": short((planned - (at or 0)) * per_step) if planned and per_step else None,
        "elapsed": short(_elapsed(run, lines)),
        "open": running,
        "nodes": _nodes(run, line, running),
        "alarms": list(reversed(run.alarms)),
        "newest": newest,
        "no_rows": no_rows,
    }


def _wall(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from step to step, with validations and checkpoints."""
    times = [line["time"] for line in lines if line.get("time") is not None]
    return float((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else None


def _elapsed(run: WatchedRun, lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds since the start, up to the last step; without times, the sum of the steps."""
    started, ended = run.description.get("started"), run.description.get("ended")
    ended = ended or (lines[-1].get("time") if lines else None)
    if started is not None and ended is not None:
        return float(ended - started)
    return float(sum(line["timing/step"] for line in lines)) if lines else None


def _nodes(run: WatchedRun, line: Mapping[str, Any], running: Sequence[str]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    total = line.get("timing/step")
    for key, value in line.items():
        if key.startswith("timing/") and key not in NOT_NODES and value is not None:
            found[key[7:]] = {"seconds": short(value), "share": short(value / total) if total else None}
    for span in run.spans(line["step"]) if line else ():
        node = found.setdefault(span["name"], {})
        node["rows"] = max(node.get("rows") or 0, span.get("rows") or 0) or None
        node["bytes"] = (node.get("bytes") or 0) + (span.get("bytes") or 0) or None
    by_node: dict[str, list[str]] = {}
    for key, name in run.reporters.items():
        if line.get(key) is not None:
            by_node.setdefault(name, []).append(key)
    for name, keys in by_node.items():
        shown = badge(keys)
        found.setdefault(name, {}).update(key=shown, value=short(line[shown]) if shown else None)
    for name in running:
        found.setdefault(name, {})["open"] = True
    return found


def _newest(run: WatchedRun, step: int | None) -> tuple[list[dict[str, Any]], str | None]:
    """Some rows of a step, spread over its groups; or why there are none."""
    if step is None:
        return [], "No step is done yet."
    try:
        rows, texts = run.rows(step).rows, run.rows(step).texts
    except DataError as error:
        return [], str(error)
    every = max(1, len(rows) // NEWEST)
    return [
        {
            "row_id": row_id,
            "score": short(one["score"]),
            "prompt": prompt_text(texts.get(row_id, {}).get("prompt"))[:200],
            "response": (texts.get(row_id, {}).get("response") or ("" if texts else row_id))[:200],
        }
        for row_id, one in list(rows.items())[::every][:NEWEST]
    ], None
