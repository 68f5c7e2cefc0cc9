"""Where the time of a run went: the spans of a step in lanes, and what each node costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.plan import Plan
from flowrl.draw.picture import picture
from flowrl.look.page.graphs import role_colors
from flowrl.look.page.plain import short
from flowrl.look.recorded_run import RecordedRun
from flowrl.run.engine.timeline import Span, critical_path, idle, lanes


def spans_of(run: RecordedRun, step: int) -> list[dict[str, Any]]:
    """The spans of a step, counted from 1."""
    table = run.spans
    if "step" not in table.column_names:
        return []
    found: list[dict[str, Any]] = table.filter(pc.equal(table["step"], step)).to_pylist()
    return found


def times(run: RecordedRun, step: int, graph: Graph | None) -> dict[str, Any]:
    """Lanes of a step, from its first span to its last; and costs over all steps."""
    spans = [_span(one) for one in spans_of(run, step)]
    colors = role_colors(picture(graph)) if graph is not None else {}
    begin, end = min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0)
    nodes = [span for span in spans if span.kind == "node"]
    longest = max(nodes or spans, key=lambda span: span.seconds, default=None)
    costs, basis = _costs(run, graph, colors)
    return {
        "step": step,
        "begin": 0.0,
        "end": round(end - begin, 6),
        "lanes": _lanes(spans, begin, colors),
        "longest": None if longest is None else _as_json(longest, 0, begin, colors),
        "idle": [[place, short(share)] for place, share in idle(spans).items()],
        "costs": costs,
        "basis": basis,
        "note": None if spans else "This folder has no spans of the step.",
    }


def _span(one: dict[str, Any]) -> Span:
    given = {name: one.get(name) or 0 for name in ("bytes", "rows", "tokens")}
    return Span(one["name"], one["place"], one["start"], one["end"], kind=one["kind"], **given)


def _lanes(spans: Sequence[Span], begin: float, colors: dict[str, int]) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for span, row in zip(spans, lanes(spans), strict=True):
        found.setdefault(span.place, []).append(_as_json(span, row, begin, colors))
    return [
        {"place": place, "depth": 1 + max(one["row"] for one in of_place), "spans": of_place}
        for place, of_place in found.items()
    ]


def _as_json(span: Span, row: int, begin: float, colors: dict[str, int]) -> dict[str, Any]:
    return {
        "name": span.name,
        "kind": span.kind,
        "row": row,
        "start": round(span.start - begin, 6),
        "end": round(span.end - begin, 6),
        "rows": span.rows,
        "tokens": span.tokens,
        "bytes": span.bytes,
        "color": colors.get(span.name.partition(":")[0]),
    }


def _costs(run: RecordedRun, graph: Graph | None, colors: dict[str, int]) -> tuple[list[dict[str, Any]], str]:
    """The time of each node over all steps, from the metrics; tokens and padding from the spans."""
    table = run.metrics
    names = [name for name in table.column_names if name.startswith("timing/") and name != "timing/step"]
    if "timing/step" not in table.column_names:
        return [], "no step is done"
    total = pc.sum(table["timing/step"]).as_py() or 0.0
    loads = _loads(run)
    seconds = {name[7:]: pc.sum(table[name]).as_py() or 0.0 for name in names}
    critical: set[str] = set()
    if graph is not None and len(idle([_span(one) for one in spans_of(run, run.steps[-1])])) > 1:
        critical = set(critical_path(Plan(graph).network, seconds)[0])
    measured = (run.description.get("predicted") or {}).get("nodes", {})
    found = []
    for name in names:
        node, calls = name[7:], len(table) - table[name].null_count
        load = loads.get(node, {})
        found.append(
            {
                "name": node,
                "color": colors.get(node),
                "calls": calls,
                "total": short(seconds[node]),
                "mean": short(seconds[node] / calls) if calls else None,
                "slowest": short(pc.max(table[name]).as_py()),
                "share": short(seconds[node] / total) if total else 0.0,
                "tokens_per_second": short(load["tokens"] / seconds[node]) if load.get("tokens") and seconds[node] else None,
                "padding": short(1.0 - load["tokens"] / load["padded"]) if load.get("padded") else None,
                "predicted": short(measured.get(node)),
                "critical": node in critical,
            }
        )
    found.sort(key=lambda cost: -cost["total"])
    steps = run.steps
    return found, f"{len(steps)} steps, {short(total)} s; shares of nodes that run at once add up to more than 100 %"


def _loads(run: RecordedRun) -> dict[str, dict[str, float]]:
    table = run.spans
    wanted = [name for name in ("tokens", "padded") if name in table.column_names]
    if not wanted or "kind" not in table.column_names:
        return {}
    sums = table.filter(pc.equal(table["kind"], "node")).group_by("name").aggregate([(name, "sum") for name in wanted])
    return {one["name"]: {name: one[f"{name}_sum"] or 0 for name in wanted} for one in sums.to_pylist()}
