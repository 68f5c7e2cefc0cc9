"""`predict`: predicted step times, from the engine that would run the job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from flowrl.core.graphs.fusing import fused, scorers
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.plan import Plan
from flowrl.core.graphs.spans import spanned
from flowrl.errors import BindError, ParameterError
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import critical_path
from flowrl.run.engine.weights import TrainedWeights
from flowrl.run.placement.place import Place, ProcessSpec, lay_out
from flowrl.run.placement.placement import refuse_unplaceable
from flowrl.run.prediction.costs import Costs, refuse_no_costs
from flowrl.run.prediction.pretend import PretendRunner, blank_batch, place_of
from flowrl.spec import written

_STEPS = 40
_FEW = 6
"""Steps of which the ends of an interval are predicted, beyond the lag."""

_BOUNDS = (-1, 0, 1)

_BETWEEN_RUNS = 0.25
"""The part of the seconds of a step by which runs of a job may differ on a shared machine, so that most of the tuned
edits of ``benchmarks/edited.py`` are inside the interval; equal runs were not compared."""

_ROWS = 100_000
"""The most rows of a predicted step: it takes some seconds on one slot, and with many ranks a minute."""


@dataclass(frozen=True)
class Prediction:
    """A predicted step of a job.

    Args:
        seconds: of a step, the median.
        low, high: an interval that is meant to hold the seconds of four of five such jobs (of 20 held-out edits it held
            20 on a quiet machine, and 12 on a busy one); equal to them for given costs.
        idle: by slot, the fraction of time without a running node.
        busiest: busy seconds per step of the busiest slot.
        path: the nodes of the critical path of the median step.
        unknown: what was not measured, as a sentence; empty if nothing is missing.
    """

    where: str
    seconds: float
    low: float
    high: float
    idle: Mapping[str, float]
    busiest: float
    path: tuple[str, ...]
    path_seconds: float
    lag: int
    unknown: str = ""

    @property
    def bound(self) -> float:
        """Lower bound of the seconds of a step, on these slots and with this lag."""
        return max(self.busiest, self.path_seconds / (self.lag + 1))

    @property
    def _interval(self) -> str:
        return f" (80 %: {self.low:.3f} to {self.high:.3f} s)" if self.low < self.high else ""

    def __str__(self) -> str:
        by_path = self.path_seconds / (self.lag + 1) > self.busiest
        why = f"the critical path {' → '.join(self.path)}" if by_path else "the work of the busiest slot"
        if by_path and self.lag:
            why = f"{why}, over {self.lag + 1} steps in flight"
        lines = [
            f"{self.where}: a step takes {self.seconds:.3f} s{self._interval}",
            f"  at least {self.bound:.3f} s: {why}",
            f"  idle: {', '.join(f'{slot} {share:.0%}' for slot, share in self.idle.items())}",
        ]
        if not self.lag and self.busiest < self.bound:
            lines.insert(2, f"  with lag at least {self.busiest:.3f} s: the work of the busiest slot")
        return "\n".join([*lines, *([f"  {self.unknown}"] if self.unknown else [])])


def predict(
    graph: Graph, place: Place | None, prompts: int, costs: Costs, *, optimize: bool = True, seed: int = 0
) -> Prediction:
    """Predict a step; no model is loaded.

    Args:
        place: where it would run; None is one process.
        prompts: per step, of at most 100,000 rows.
        optimize: as of the `Job`. In an unbound graph, nodes that could be fused and have no costs count as fused.
    """
    refuse_no_costs(costs)
    graph, lag = spanned(graph), graph.lag.versions
    if optimize:
        once = fused(graph, unbound=True)
        graph = once if scorers(once).keys().isdisjoint(costs.nodes) else fused(graph)
    costs = costs.covering(graph)
    if costs.machine is not None and place is not None:
        costs = costs.machine.carry(costs, graph)
    plan, processes = Plan(graph), None
    _refuse_many(plan, prompts)
    if place is not None:
        _refuse_unbound(graph, place)
        processes = lay_out(graph, place)
        refuse_unplaceable(plan, processes)
    steps, ends, nodes = _walk(plan, processes, prompts, costs, seed, _STEPS)
    steady = ends[lag + 1 : len(ends) - lag]  # while all steps are in flight
    each = (steady[-1] - steady[0]) / (len(steady) - 1)
    seconds = median(after - before for before, after in pairwise(steady))
    slots = [place_of(slot) for slot in range(1 if place is None else place.slots)]
    busy = {slot: sum(s.seconds for s in steps.timeline.spans if s.place == slot) / _STEPS for slot in slots}
    share = {slot: min(1.0, spent / each) if each else 0.0 for slot, spent in busy.items()}
    ran = {node for step in nodes for node in step}
    typical = {node: median(step[node] for step in nodes if node in step) for node in ran}
    low, high = _factors(plan, processes, prompts, costs, seed)
    path, path_seconds = critical_path(plan.network, typical)
    return Prediction(
        "in one process" if place is None else written(place),
        seconds,
        seconds * low,
        seconds * high,
        {slot: 1.0 - worked for slot, worked in share.items()},
        max(share.values()) * seconds,  # of the median step, as all numbers of a Prediction
        tuple(path),
        path_seconds if lag else min(path_seconds, seconds),
        lag,
        _unknown(place, costs),
    )


def _walk(
    plan: Plan, processes: Sequence[ProcessSpec] | None, prompts: int, costs: Costs, seed: int, number: int
) -> tuple[Steps, list[float], list[Mapping[str, float]]]:
    """Some steps on a virtual clock, with their ends and the seconds of their nodes."""
    runner = PretendRunner(processes, costs, plan.graph.bindings)
    steps = Steps(plan, runner, seed, TrainedWeights(plan, runner, seed))
    batch, ends, nodes = blank_batch(plan.graph, prompts), [0.0], list[Mapping[str, float]]()
    for result in steps.run(lambda step: batch, range(number), lag=plan.graph.lag.versions):
        ends.append(runner.now)
        nodes.append(result.seconds)
    return steps, ends, nodes


def _factors(
    plan: Plan, processes: Sequence[ProcessSpec] | None, prompts: int, costs: Costs, seed: int
) -> tuple[float, float]:
    """The ends of the interval, in predicted seconds.

    The nodes at their least, and at their most, give steps that are less likely than each alone; their errors add up
    as independent ones do. Runs of the same job differ, too.
    """
    if not costs.works:
        return 1.0, 1.0
    number = plan.graph.lag.versions + _FEW
    found = [_walk(plan, processes, prompts, replace(costs, noise=(), bound=bound), seed, number) for bound in _BOUNDS]
    (_, least, lows), (_, usual, usuals), (_, most, highs) = found
    factors = []
    for ends, nodes in ((least, lows), (most, highs)):
        errors = [abs(nodes[-1][node] - seconds) for node, seconds in usuals[-1].items()]
        independent = math.hypot(*errors) / sum(errors) if any(errors) else 0.0
        factors.append(math.hypot((ends[-1] / usual[-1] - 1.0) * independent, _BETWEEN_RUNS))
    return 1.0 / (1.0 + factors[0]), 1.0 + factors[1]


def _refuse_many(plan: Plan, prompts: int) -> None:
    """Refuse a step of so many rows that its prediction would not end."""
    rows = {name: prompts * plan.graph[name].operator.rows_factor for name in plan.graph.inputs}
    for node in plan.order:
        rows[node.name] = max(rows[source] for source in node.sources) * node.operator.rows_factor
    if (most := max(rows.values(), default=0)) > _ROWS:
        raise ParameterError(
            f"A step of {prompts} prompts has {most} rows, and a prediction takes at most {_ROWS}. Predict a step with "
            f"fewer prompts: its time grows in proportion.",
            code="predict.too-many-rows",
            prompts=prompts,
            rows=most,
            limit=_ROWS,
        )


def _refuse_unbound(graph: Graph, place: Place) -> None:
    """Refuse unbound roles, whose ranks are unknown."""
    if unbound := [role for role in graph.roles() if role not in graph.bindings]:
        binds = ", ".join(f"{role}=..." for role in unbound)
        raise BindError(
            f"{graph.name} leaves {', '.join(map(repr, unbound))} unbound, so their slots of {written(place)} are "
            f"unknown. Bind them: graph.bind({binds}).graph.",
            code="job.unbound-role",
            graph=graph.name,
            role=unbound[0],
        )


def _unknown(place: Place | None, costs: Costs) -> str:
    """What the costs do not cover at a place."""
    if place is None or costs.place is not None or costs.machine is not None:
        return ""
    return f"{costs.source} ran in one process, so it has no costs of syncs and turns between processes"
