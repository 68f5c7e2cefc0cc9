"""The state of a run at a step: what each node did, what runs, alarms, the time left and some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flowrl.data.files import parse_json
from flowrl.look.page.graphs import badge
from flowrl.look.page.plain import plain_text, prompt_text, short
from flowrl.look.page.rows import texts_of
from flowrl.look.page.times import spans_of
from flowrl.look.recorded_run import RecordedRun

NEWEST = 16
"""Rows beside the graph."""
_TAIL = 1 << 16


def now(run: RecordedRun, step: int | None = None) -> dict[str, Any]:
    """The state at a step, by default the latest; without a step yet, what runs."""
    steps = run.steps
    at = step if step is not None else (steps[-1] if steps else None)
    lines = run.metrics.to_pylist()[-60:] if step is None else [line for line in run.metrics.to_pylist() if line["step"] <= step][-60:]
    line = lines[-1] if lines else {}
    open_nodes = _open(run) if run.status == "running" and step is None else []
    planned = run.description.get("training", {}).get("steps")
    seconds = median([one["timing/step"] for one in lines[-10:]]) if lines else None
    per_step = _wall(lines[-11:]) or seconds
    return {
        "step": at,
        "done": at or 0,
        "planned": planned,
        "step_seconds": short(seconds),
        "left": short((planned - (at or 0)) * per_step) if planned and per_step else None,
        "elapsed": short(_elapsed(run, line)),
        "open": open_nodes,
        "nodes": _nodes(run, at, line, open_nodes),
        "alarms": [dict(alarm) for alarm in reversed(run.alarms)],
        "newest": _newest(run, at),
    }


def _wall(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from step to step, with validations and checkpoints."""
    times = [line["time"] for line in lines if line.get("time") is not None]
    return float((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else None


def _elapsed(run: RecordedRun, line: Mapping[str, Any]) -> float | None:
    started, ended = run.description.get("started"), run.description.get("ended") or line.get("time")
    if started is not None and ended is not None:
        return float(ended - started)
    found = line.get("total/seconds")
    return None if found is None else float(found)


def _open(run: RecordedRun) -> list[str]:
    """The nodes that have started and not ended, from the end of ``spans.jsonl``."""
    path, found = run.path / "spans.jsonl", dict[str, None]()
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        for line in file.read().split(b"\n")[1:]:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if "open" in record:
                found[record["open"]] = None
            else:
                found.pop(record.get("name"), None)
    return list(found)


def _nodes(run: RecordedRun, step: int | None, line: Mapping[str, Any], open_nodes: Sequence[str]) -> dict[str, Any]:
    reporters: Mapping[str, str] = run.description.get("metrics", {})
    total = line.get("timing/step") or None
    found: dict[str, dict[str, Any]] = {}
    for key, value in line.items():
        if key.startswith("timing/") and key != "timing/step" and value is not None:
            found[key[7:]] = {"seconds": short(value), "share": short(value / total) if total else None}
    for span in spans_of(run, step) if step is not None else ():
        node = found.setdefault(span["name"], {})
        node["rows"] = max(node.get("rows") or 0, span.get("rows") or 0) or None
        node["bytes"] = (node.get("bytes") or 0) + (span.get("bytes") or 0) or None
    by_node: dict[str, list[str]] = {}
    for key, node_name in reporters.items():
        if line.get(key) is not None:
            by_node.setdefault(node_name, []).append(key)
    for name, keys in by_node.items():
        key = badge(keys)
        found.setdefault(name, {}).update(key=key, value=short(line[key]) if key else None)
    for name in open_nodes:
        found.setdefault(name, {})["open"] = True
    return found


def _newest(run: RecordedRun, step: int | None) -> list[dict[str, Any]]:
    """Some rows of a step, spread over its groups."""
    table = run.rows(step) if step is not None else None
    if table is None or not len(table):
        return []
    every = max(1, len(table) // NEWEST)
    texts = texts_of(run, step)
    found = table.select(["row_id", "score"]).take(list(range(0, len(table), every))[:NEWEST]).to_pylist()
    return [
        {
            "row_id": one["row_id"],
            "score": short(one["score"]),
            "prompt": prompt_text(texts.get(one["row_id"], {}).get("prompt"))[:200],
            "response": (texts.get(one["row_id"], {}).get("response") or plain_text(one["row_id"]) or "")[:200],
        }
        for one in found
    ]
