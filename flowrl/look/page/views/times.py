"""Where the time of a run went: the spans of a step in lanes, and what each node costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flowrl.core.graphs.plan import Plan
from flowrl.draw.picture import picture
from flowrl.look.page.plain import short
from flowrl.look.page.views.graphs import role_colors
from flowrl.look.page.views.now import NOT_NODES
from flowrl.look.page.watched import WatchedRun
from flowrl.run.engine.timeline import Span, Timeline, critical_path, idle, lanes


def timeline(run: WatchedRun) -> Timeline:
    """All finished spans of a run's steps, as a trace."""
    found = Timeline()
    found.spans = [replace(_span(one), step=one["step"] - 1) for one in run.spans()]
    return found


def times(run: WatchedRun, step: int) -> dict[str, Any]:
    """Lanes of a step, from its first span to its last; and costs over all steps."""
    spans, graph = [_span(one) for one in run.spans(step)], run.graph
    colors = role_colors(picture(graph)) if graph is not None else {}
    begin, end = min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0)
    nodes = [span for span in spans if span.kind == "node"]
    longest = max(nodes or spans, key=lambda span: span.seconds, default=None)
    costs, basis = _costs(run, colors, len({span.place for span in nodes}) > 1)
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
    given: dict[str, Any] = {name: one.get(name) or 0 for name in ("bytes", "rows", "tokens", "padded")}
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


def _costs(run: WatchedRun, colors: dict[str, int], several: bool) -> tuple[list[dict[str, Any]], str]:
    """The time of each node over all steps, from the metrics; tokens and padding from the spans.

    Args:
        several: nodes run at several places, so that one path of them decides how long a step takes.
    """
    lines = run.training
    total = sum(line["timing/step"] for line in lines)
    names = dict.fromkeys(
        key[7:] for line in lines for key in line if key.startswith("timing/") and key not in NOT_NODES
    )
    seconds = {
        name: [line[f"timing/{name}"] for line in lines if line.get(f"timing/{name}") is not None] for name in names
    }
    sums = {name: sum(values) for name, values in seconds.items()}
    critical = set(critical_path(Plan(run.graph).network, sums)[0]) if several and run.graph is not None else set()
    loads = _loads(run)
    found = []
    for name, values in seconds.items():
        tokens, padded = loads.get(name, (0, 0))
        found.append(
            {
                "name": name,
                "color": colors.get(name),
                "calls": len(values),
                "total": short(sums[name]),
                "mean": short(sums[name] / len(values)) if values else None,
                "slowest": short(max(values, default=None)),
                "share": short(sums[name] / total) if total else 0.0,
                "tokens_per_second": short(tokens / sums[name]) if tokens and sums[name] else None,
                "padding": short(1.0 - tokens / padded) if padded else None,
                "critical": name in critical,
            }
        )
    found.sort(key=lambda cost: -cost["total"])
    together = "; shares of nodes that run at the same time add up to more than 100 %" if several else ""
    return found, f"{len(lines)} steps, {total:.4g} s{together}"


def _loads(run: WatchedRun) -> dict[str, tuple[int, int]]:
    """Tokens, and positions with padding, by node."""
    found: dict[str, tuple[int, int]] = {}
    for span in run.spans():
        if span["kind"] == "node":
            tokens, padded = found.get(span["name"], (0, 0))
            found[span["name"]] = tokens + (span.get("tokens") or 0), padded + (span.get("padded") or 0)
    return found
