"""Traces of a run: as Chrome trace JSON (for Perfetto and chrome://tracing), and as a table."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import networkx as nx
from rich.table import Table
from rich.text import Text

from flowrl.core.graphs.plan import Plan
from flowrl.data.files import parse_json, size, write
from flowrl.data.waits import Wait
from flowrl.errors import DataError

logger = logging.getLogger(__name__)

Kind = Literal["node", "transfer", "wait", "environment", "record"]
# written if known
_LOAD: dict[str, Any] = {"step": None, "rows": 0, "tokens": 0, "padded": 0, "lengths": (), "repeats": False}


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of work or waiting.

    Args:
        name: of a node, or of a transfer or wait for one.
        place: where it ran.
        kind: ``"environment"`` is a node's wait for something outside its place, ``"record"`` the writing of a step.
        padded: tokens if every row were as long as the longest.
        lengths: of a node that wrote tokens, ``(tokens, response tokens)`` of each row.
        repeats: whether another process computed the same rows, whose span has them too.
    """

    name: str
    place: str
    start: float
    end: float
    bytes: int = 0
    kind: Kind = "node"
    step: int | None = None
    rows: int = 0
    tokens: int = 0
    padded: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    repeats: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """The spans of a run."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, name: str, place: str, start: float, end: float, bytes: int = 0, kind: Kind = "node") -> None:
        """Add a finished span."""
        self.spans.append(Span(name, place, start, end, bytes, kind))

    def add_waits(self, node: str, place: str, step: int | None, waits: Iterable[Wait]) -> None:
        """Add what a node waited for, in a separate lane next to its place."""
        for wait in waits:
            name, lane = f"{node}: {wait.name}", f"{place}: environments"
            self.spans.append(Span(name, lane, wait.start, wait.end, kind="environment", step=step))

    @contextmanager
    def span(self, name: str, place: str, kind: Kind = "node") -> Iterator[None]:
        """Add a span of the block."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, place, start, time.time(), kind=kind)

    def save(self, path: Path) -> None:
        """Write the trace in the Chrome trace event format, with one process per place and steps counted from 1.

        Overlapping spans of a place are on different threads, because viewers nest those of one thread.
        """
        places = {place: i for i, place in enumerate(dict.fromkeys(span.place for span in self.spans), 1)}
        begin = min((span.start for span in self.spans), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 1, "args": {"name": place}}
            for place, pid in places.items()
        ]
        for span, lane in zip(self.spans, lanes(self.spans), strict=True):
            # rounding both ends, rather than the duration, creates no overlaps
            start, end = (round((t - begin) * 1e6) for t in (span.start, span.end))
            event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": places[span.place], "tid": lane + 1}
            load = {key: value for key, none in _LOAD.items() if (value := getattr(span, key)) != none}
            if span.step is not None:
                load["step"] = span.step + 1
            events.append({**event, "ts": start, "dur": end - start, "args": {"bytes": span.bytes, **load}})
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin": begin}}
        write(path, json.dumps(trace).encode())  # atomic, because a resumed run extends it

    @classmethod
    def load(cls, path: Path) -> Timeline:
        """The trace that `save` wrote, with times rounded to microseconds."""
        trace = cls()
        try:
            written = parse_json(path.read_bytes())
            begin, events = written["otherData"]["begin"], written["traceEvents"]
            places = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
            for event in events:
                if event["ph"] == "X":
                    start, end = (begin + t / 1e6 for t in (event["ts"], event["ts"] + event["dur"]))
                    args = {**event["args"], "lengths": tuple(map(tuple, event["args"].get("lengths", ())))}
                    if "step" in args:
                        args["step"] -= 1
                    span = Span(event["name"], places[event["pid"]], start, end, kind=event["cat"], **args)
                    if not _is_sound(span):
                        raise ValueError(f"invalid {span}")
                    trace.spans.append(span)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not the trace of a run, or is damaged ({type(error).__name__}: {error}). Restore it from a "
                f"copy, or remove it.",
                code="run.damaged",
                path=path,
            ) from error
        return trace

    @classmethod
    def of_starts(cls, path: Path) -> Timeline:
        """The trace of the earlier starts of a run; empty if there is none, or, with a warning, if it is damaged."""
        if not path.exists():
            return cls()
        try:
            return cls.load(path)
        except DataError as error:
            logger.warning("%s The trace of this run starts over.", error)
            return cls()

    def summary(self, plan: Plan, steps: Sequence[Mapping[str, float]], makespans: Sequence[float]) -> Summary:
        """The time of each node, transfer and wait."""
        rows = {node.name: [step[node.name] for step in steps if node.name in step] for node in plan.order}
        for span in self.spans:
            if span.kind != "node":
                rows.setdefault(span.name, []).append(span.seconds)
        fetched: Counter[str] = Counter()
        for span in self.spans:
            fetched[span.name] += span.bytes
        total, n = sum(makespans), max(len(makespans), 1)
        totals = tuple(
            Total(name, len(seconds), sum(seconds), sum(seconds) / total if total else 0.0, fetched[name])
            for name, seconds in rows.items()
            if seconds
        )
        means = {t.name: t.seconds / n for t in totals if t.name in plan.graph}
        path, length = critical_path(plan.network, means)
        return Summary(totals, idle(self.spans), tuple(path), length, total / n)


def _is_sound(span: Span) -> bool:
    """Whether a span that was read has the right types and values."""
    counts = (span.bytes, span.rows, span.tokens, span.padded, *(n for pair in span.lengths for n in pair))
    return (
        isinstance(span.name, str)
        and isinstance(span.place, str)
        and span.kind in get_args(Kind)
        and (span.step is None or type(span.step) is int)
        and math.isfinite(span.seconds)
        and all(type(n) is int and n >= 0 for n in counts)
        and all(len(pair) == 2 for pair in span.lengths)
    )


@dataclass(frozen=True)
class Total:
    """All calls of a node, or all transfers or waits of one name, with their summed seconds and bytes (of all ranks).

    `share` is of the time of all steps; shares of concurrent work add up to more than 1.
    """

    name: str
    calls: int
    seconds: float
    share: float
    bytes: int


@dataclass(frozen=True)
class Summary:
    """Summary of a run's time."""

    totals: tuple[Total, ...]
    idle: Mapping[str, float]
    path: tuple[str, ...]
    path_seconds: float
    step_seconds: float

    def table(self) -> Table:
        """The summary for a terminal; with several processes, a star marks nodes of the critical path."""
        several = len(self.idle) > 1
        lines = [f"a step takes {self.step_seconds:.3f} s"]
        if several and self.path_seconds:
            over = self.step_seconds / self.path_seconds - 1
            lines = [
                f"* critical path {self.path_seconds:.3f} s: {' → '.join(self.path)}",
                f"{lines[0]}, {over:.1%} more than its critical path",
            ]
        if self.idle:
            lines.append("idle: " + ", ".join(f"{place} {share:.0%}" for place, share in self.idle.items()))
        table = Table(caption=Text("\n".join(lines)), caption_justify="left")
        table.add_column("node")
        for heading in ("calls", "seconds", "share", *(["fetched"] if several else [])):
            table.add_column(heading, justify="right")
        for t in self.totals:
            star = " *" if several and t.name in self.path else ""
            fetched = [size(t.bytes)] if several else []
            table.add_row(f"{t.name}{star}", str(t.calls), f"{t.seconds:.3f}", f"{t.share:.1%}", *fetched)
        return table


def critical_path(network: nx.DiGraph[str], seconds: Mapping[str, float]) -> tuple[list[str], float]:
    """The longest chain of dependent nodes, and its seconds.
    Nodes without seconds (inputs) take no time and are not part of the chain."""
    finish: dict[str, float] = {}
    previous: dict[str, str | None] = {}
    for node in nx.topological_sort(network):
        last = max(network.predecessors(node), key=finish.__getitem__, default=None)
        previous[node] = last
        finish[node] = seconds.get(node, 0.0) + (finish[last] if last is not None else 0.0)
    end = max(finish, key=finish.__getitem__, default=None)
    length = finish[end] if end is not None else 0.0
    path: list[str] = []
    while end is not None:
        path.append(end)
        end = previous[end]
    return [node for node in reversed(path) if node in seconds], length


def idle(spans: Iterable[Span]) -> dict[str, float]:
    """The share of time, from the first start to the last end of any place, in which each place only waited."""
    spans = sorted((span for span in spans if span.kind not in ("environment", "record")), key=lambda span: span.start)
    if not spans:
        return {}
    total = max(span.end for span in spans) - spans[0].start
    busy = dict.fromkeys((span.place for span in spans), 0.0)
    until = dict.fromkeys(busy, spans[0].start)
    for span in spans:
        if span.kind != "wait":
            busy[span.place] += max(0.0, span.end - max(span.start, until[span.place]))
            until[span.place] = max(span.end, until[span.place])
    return {place: 1.0 - seconds / total if total else 0.0 for place, seconds in busy.items()}


def lanes(spans: Sequence[Span]) -> list[int]:
    """For each span the first lane of its place (from 0) that is free when it starts."""
    lane = [0] * len(spans)
    ends: dict[str, list[float]] = {}
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        taken = ends.setdefault(spans[i].place, [])
        lane[i] = next((n for n, end in enumerate(taken) if end <= spans[i].start), len(taken))
        taken[lane[i] : lane[i] + 1] = [spans[i].end]
    return lane
