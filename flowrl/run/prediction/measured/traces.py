"""What the trace of a run says of its nodes: their loads and seconds, lengths of rows, and the time between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from flowrl.run.engine.runner import Lengths
from flowrl.run.engine.timeline import Span
from flowrl.run.prediction.cost import Load
from flowrl.run.prediction.measured.work import Work

Samples = Mapping[str, Mapping[int, Sequence[tuple[Load, float]]]]
"""Loads and seconds, by node and number of ranks."""


def warm(spans: Iterable[Span]) -> list[Span]:
    """Spans in order of their start, without the first of each name and place (the warm-up), if there are others."""
    by_name: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        by_name[span.name, span.place].append(span)
    retained = [span for found in by_name.values() for span in found[len(found) > 1 :]]
    return sorted(retained, key=lambda span: span.start)


def instances(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans of nodes, grouped by node and step, each span of a group on another rank."""
    found: list[list[Span]] = []
    last: dict[tuple[str, int | None], int] = {}
    for span in spans:
        if span.kind != "node":
            continue
        key = span.name, span.step
        if key in last and all(span.place != other.place for other in found[last[key]]):
            found[last[key]].append(span)
        else:
            last[key] = len(found)
            found.append([span])
    return found


def samples_of(spans: Sequence[Span], works: Mapping[str, Work]) -> Samples:
    samples: dict[str, dict[int, list[tuple[Load, float]]]] = defaultdict(lambda: defaultdict(list))
    for ranks in instances(spans):
        name = ranks[0].name.rpartition("/")[2]
        samples[name][len(ranks)] += [
            (load, span.seconds) for load, span in zip(loads_of(ranks, works), ranks, strict=True)
        ]
    return samples


def loads_of(ranks: Sequence[Span], works: Mapping[str, Work]) -> list[Load]:
    """The load of each rank of an instance."""
    work, rows = works.get(ranks[0].name.rpartition("/")[2], Work()), sum(s.rows for s in ranks if not s.repeats)
    longest = [max((response for _, response in span.lengths), default=0) for span in ranks]
    each = zip(ranks, longest, strict=True)
    return [work.load(Load(span.rows, span.tokens, span.padded, most), rows) for span, most in each]


def lengths_of(spans: Iterable[Span]) -> dict[str, list[Lengths]]:
    """By node, the row lengths of each training step; if only their sum is known, all equal to the mean."""
    found: dict[str, list[Lengths]] = defaultdict(list)
    for ranks in instances(spans):
        parts = [span for span in ranks if not span.repeats]
        name, pairs = ranks[0].name, [pair for span in parts for pair in span.lengths]
        rows, tokens = sum(span.rows for span in parts), sum(span.tokens for span in parts)
        if pairs and "/" not in name:
            found[name].append(Lengths(*np.array(pairs, dtype=np.int64).T))
        elif rows and "/" not in name:
            found[name].append(Lengths(np.diff(np.arange(rows + 1) * tokens // rows)))
    return dict(found)


def driver_of(spans: Sequence[Span]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """By node, the gap before its start (the driver's work); and the turns in it, by event."""
    gaps: dict[str, list[float]] = defaultdict(list)
    turns: dict[str, dict[str, list[float]]] = {"sleep": defaultdict(list), "wake": defaultdict(list)}
    steps: dict[int, list[tuple[str, float, float]]] = defaultdict(list)
    for ranks in instances(spans):
        if (step := ranks[0].step) is not None:
            times = min(span.start for span in ranks), max(span.end for span in ranks)
            steps[step].append((ranks[0].name, *times))
    waits = [span for span in spans if span.name in turns]
    starts = [span.start for span in waits]
    for ran in steps.values():
        ends = sorted(end for _, _, end in ran)
        for name, start, _ in ran:
            if ended := bisect_right(ends, start):
                before = ends[ended - 1]
                between = waits[bisect_left(starts, before) : bisect_right(starts, start)]
                gaps[name].append(start - before - sum(span.seconds for span in between))
                for span in between:
                    turns[span.name][name].append(span.seconds)
    medians = {name: max(median(found), 0.0) for name, found in gaps.items()}
    return medians, {what: {node: median(found) for node, found in by.items()} for what, by in turns.items()}


def between_of(spans: Iterable[Span], steps: Mapping[int | None, float]) -> float:
    """Seconds of a step before its first node and after its last."""
    nodes: dict[int | None, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "node" and span.step in steps:
            nodes[span.step].append(span)
    rests = [
        steps[step] - (max(span.end for span in found) - min(span.start for span in found))
        for step, found in list(nodes.items())[len(nodes) > 1 :]  # the first lacks the warm-up spans
    ]
    return max(median(rests), 0.0) if rests else 0.0
