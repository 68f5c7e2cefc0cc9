"""`Machine`: what places cost on a machine, so that costs of one process predict a step at other places.

It is measured by runs of a job in one process and at other places. A node in a process of Ray takes some time more than
in one process, times `contention` while another process computes; ranks of one model, syncs, turns and calls take what
they took there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.graphs.graph import Graph
from flowrl.data.files import parse_json
from flowrl.errors import DataError
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.prediction.arithmetic import shape_of
from flowrl.run.prediction.cost import Cost
from flowrl.run.prediction.costs import Costs, damaged, read_run
from flowrl.run.prediction.measured.traces import driver_of, instances, loads_of, warm
from flowrl.run.prediction.measured.work import Kind, Work

_COMPUTING: tuple[Kind, ...] = ("generate", "score", "update")
_OVERLAPPED, _ALONE = 0.5, 0.1
"""Parts of a span during which another process computes, so that it shows contention, or none."""


class Line(NamedTuple):
    """Seconds that grow with the weights of a model."""

    fixed: float = 0.0
    weight: float = 0.0

    def seconds(self, weights: float) -> float:
        """For a model of this size."""
        return self.fixed + self.weight * weights

    @staticmethod
    def of(found: Sequence[tuple[float, float]]) -> Line:
        """Fitted to weights and seconds, with the least relative errors and no negative part."""
        if not found:
            return Line()
        weights, seconds = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
        relative = np.maximum(seconds, 1e-6)
        only_fixed, only_weight = Line(float(np.median(seconds))), Line(0.0, float(np.median(seconds / weights)))
        both = np.linalg.lstsq(np.stack([1.0 / relative, weights / relative], 1), seconds / relative, rcond=None)[0]
        every = [line for line in (Line(*both.tolist()), only_fixed, only_weight) if min(line) >= 0]
        return min(every, key=lambda line: float(np.abs((line.fixed + line.weight * weights) / relative - 1.0).sum()))


@dataclass(frozen=True)
class Machine:
    """What places cost on a machine.

    Args:
        contention: how many times as long a process takes while another one computes, too.
        hosted: by kind of node, seconds by which it takes longer in a process of Ray than in one process.
        call: seconds by which a node starts later on Ray, and those by which one without an engine takes longer.
        between: seconds of a step in which no node runs.
        turns: seconds of ``"sleep"`` and ``"wake"``.
        sync: seconds of a sync between two processes.
        ranks: by kind of node, seconds by which two ranks of a model wait for each other: per call, or per optimizer
            step of an update.
    """

    contention: float = 1.0
    hosted: Mapping[Kind, float] = field(default_factory=dict)
    call: tuple[float, float] = (0.0, 0.0)
    between: float = 0.0
    turns: Mapping[str, float] = field(default_factory=dict)
    sync: Line = field(default_factory=Line)
    ranks: Mapping[Kind, Line] = field(default_factory=dict)

    @staticmethod
    def of(*runs: str | Path) -> Machine:
        """The machine on which a job ran in one process, and at other places.

        Args:
            runs: the run folders of one job, in any order: of one run in one process, and of others elsewhere: with two
                ranks of a trainer, split, split with a lag.

        Raises:
            DataError: a folder holds no run with a finished step, or a damaged one; not exactly one run was in one
                process, or no other; or runs are of different jobs.
        """
        read = {Path(run): read_run(Path(run)) for run in runs}
        alone = _alone({run: described["place"] for run, (described, _, _) in read.items()})
        nodes = _model_nodes(alone, read[alone][0])
        for run, (described, _, _) in read.items():
            _refuse_another_job(alone, nodes, run, _model_nodes(run, described))
        costs = Costs.measured(alone)
        bindings = read[alone][0]["graph"].get("bindings", {}).values()
        weights = weights_of(binding.get("model") for binding in bindings)
        return measured(Elsewhere(timeline, costs, weights) for run, (_, timeline, _) in read.items() if run != alone)

    def carry(self, costs: Costs, graph: Graph) -> Costs:
        """Costs of one process for a graph, as they are at places on Ray; others contain what they met there."""
        if costs.place is not None:
            return costs
        costs = replace(costs, contention=self.contention)
        backends = (graph.bindings[role] for role in (*graph.trained, *graph.bindings) if role in graph.bindings)
        weights = weights_of(getattr(backend, "starts_from", None) for backend in backends)
        known = {name: node for name, node in graph.nodes.items() if name in costs.nodes}
        works = {name: costs.works.get(name, Work.of(node)) for name, node in known.items()}
        nodes = {
            name: self._ranks(work, costs.nodes[name][min(costs.nodes[name])], weights) for name, work in works.items()
        }
        gaps = {name: costs.gap(name) + self.call[0] for name in works}
        turns = {what: dict.fromkeys(works, seconds) for what, seconds in self.turns.items()}
        return replace(costs, nodes={**costs.nodes, **nodes}, gaps=gaps, turns=turns, between=self.between)

    def _ranks(self, work: Work, cost: Cost, weights: float) -> dict[int, Cost]:
        """The cost of a node on one rank, by the number of ranks."""
        if work.kind == "sync":
            return {1: Cost(fixed=self.sync.seconds(weights))}
        if work.kind == "other":
            return {1: cost.plus(fixed=self.call[1])}
        alone = cost.plus(fixed=self.hosted.get(work.kind, 0.0))
        extra = self.ranks.get(work.kind, Line()).seconds(weights)
        return {1: alone, 2: alone.plus(update=extra) if work.kind == "update" else alone.plus(fixed=extra)}


def _alone(places: Mapping[Path, Any]) -> Path:
    """The run in one process, by the recorded place of each."""
    alone = [run for run, place in places.items() if place is None]
    if len(alone) != 1 or len(places) < 2:
        names = ", ".join(map(str, alone))
        raise DataError(
            f"What places cost is measured by one run in one process, and others of the same job at other places; of "
            f"{len(places)} run(s), {len(alone)} were in one process{f': {names}' if names else ''}. Pass exactly one "
            f"run of a job without a place, and at least one of the same job with a place.",
            code="predict.machine-runs",
            paths=list(map(str, places)),
            alone=list(map(str, alone)),
        )
    return alone[0]


def _model_nodes(run: Path, described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recorded operators that run a model, by node, and the models, by role."""
    try:
        operators = {name: node["operator"] for name, node in described["graph"]["nodes"].items()}
        nodes = {name: operator for name, operator in operators.items() if Work.recorded(operator).roles}
        models = {role: one.get("model") for role, one in described["graph"].get("bindings", {}).items()}
        return nodes | {f"the model of {role}": model for role, model in models.items() if model is not None}
    except (LookupError, TypeError, AttributeError) as error:
        raise damaged(run, error) from error


def _refuse_another_job(alone: Path, nodes: Mapping[str, Any], other: Path, others: Mapping[str, Any]) -> None:
    """Refuse a run whose models do other work; nodes without a model may differ, such as corrections for a lag."""
    shared = {name for name in nodes.keys() ^ others.keys() if name.startswith("the model of ")}  # in one of both
    if odd := sorted(n for n in (nodes.keys() | others.keys()) - shared if nodes.get(n) != others.get(n)):
        raise DataError(
            f"{other} ran another job than {alone}: {', '.join(odd)} differ, so their seconds do not compare. Pass "
            f"runs of one job, which differ only in their places, ranks and lags.",
            code="predict.another-job",
            path=other,
            nodes=odd,
        )


class Elsewhere(NamedTuple):
    """The trace of a job at another place, and the size of its model."""

    timeline: Timeline
    alone: Costs
    weights: float


class _Seen(NamedTuple):
    """A node on some ranks: the seconds of its slowest, those in one process, and the part in which others computed."""

    kind: Kind
    ranks: int
    seconds: float
    alone: float
    overlap: float
    updates: int
    weights: float


def measured(found: Iterable[Elsewhere]) -> Machine:
    """The machine on which some jobs ran in one process and elsewhere."""
    seen: list[_Seen] = []
    gaps, between, turns = list[float](), list[float](), defaultdict[str, list[float]](list)
    for one in found:
        spans = warm(one.timeline.spans)
        seen += _seen(spans, one)
        later, waits = driver_of(spans)
        gaps += [seconds - one.alone.gap(node) for node, seconds in later.items()]
        between += _between(spans)
        for what, nodes in waits.items():
            turns[what] += nodes.values()
    single = [one for one in seen if one.ranks == 1 and one.overlap < _ALONE]
    more = {kind: [one.seconds - one.alone for one in single if one.kind == kind] for kind in _COMPUTING}
    hosted = {kind: max(median(found), 0.0) for kind, found in more.items() if found}
    contention = _contention(seen, hosted)
    ranks: dict[Kind, Line] = {}
    for kind in ("score", "update"):
        pairs = [one for one in seen if one.ranks == 2 and one.kind == kind]
        usual = [contention * (one.alone + hosted.get(kind, 0.0)) for one in pairs]
        longer = [(one, max(one.seconds - alone, 0.0)) for one, alone in zip(pairs, usual, strict=True)]
        ranks[kind] = Line.of(_medians((one.weights, seconds / max(one.updates, 1)) for one, seconds in longer))
    others = [one.seconds - one.alone for one in seen if one.kind == "other"]
    return Machine(
        contention,
        hosted,
        (max(median(gaps), 0.0) if gaps else 0.0, max(median(others), 0.0) if others else 0.0),
        median(between) if between else 0.0,
        {what: median(seconds) for what, seconds in turns.items() if seconds},
        Line.of(_medians((one.weights, one.seconds) for one in seen if one.kind == "sync")),
        ranks,
    )


def weights_of(models: Iterable[str | Path | None]) -> float:
    """The number of weights of the first of these models whose configuration is known here; 1 without one."""
    for model in models:
        try:
            config = parse_json((Path(model or "") / "config.json").read_bytes())
            return float(shape_of(config).weights)
        except (OSError, ValueError, KeyError):
            continue
    return 1.0


def _seen(spans: Sequence[Span], one: Elsewhere) -> list[_Seen]:
    """The nodes of a trace that were also measured in one process."""
    computing = [span for span in spans if span.kind == "node" and " rank " in span.place]
    found = []
    for ranks in instances(spans):
        if (name := ranks[0].name) not in one.alone.works or name not in one.alone.nodes:
            continue
        work, costs = one.alone.works[name], one.alone.nodes[name]
        loads = loads_of(ranks, one.alone.works)
        alone = max(costs[min(costs)].seconds(load) for load in loads)
        longest = max(ranks, key=lambda span: span.seconds)
        others = [span for span in computing if span.place != longest.place and span.name != name]
        overlap = sum(max(0.0, min(span.end, longest.end) - max(span.start, longest.start)) for span in others)
        part = overlap / longest.seconds if longest.seconds > 0 else 0.0
        updates = max(load.updates for load in loads)
        found.append(_Seen(work.kind, len(ranks), longest.seconds, alone, part, updates, one.weights))
    return found


def _contention(seen: Iterable[_Seen], hosted: Mapping[Kind, float]) -> float:
    """How many times as long nodes took while another process computed: the seconds in which both did, in those that
    the same work takes alone."""
    together = done = 0.0
    for one in seen:
        if one.ranks == 1 and one.overlap >= _OVERLAPPED and one.kind in hosted:
            overlapped = one.overlap * one.seconds
            together += overlapped
            done += one.alone + hosted[one.kind] - (one.seconds - overlapped)
    return max(1.0, together / done) if done > 0 else 1.0


def _between(spans: Sequence[Span]) -> list[float]:
    """Seconds between the last node of a step and the first of the next, without a lag."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "node" and span.step is not None:
            steps[span.step].append(span)
    times = {step: (min(s.start for s in found), max(s.end for s in found)) for step, found in steps.items()}
    later = [times[step + 1][0] - end for step, (_, end) in times.items() if step + 1 in times]
    return [seconds for seconds in later if seconds >= 0]


def _medians(found: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The median seconds for each number of weights."""
    by: dict[float, list[float]] = defaultdict(list)
    for weights, seconds in found:
        by[weights].append(seconds)
    return [(weights, median(seconds)) for weights, seconds in by.items()]
