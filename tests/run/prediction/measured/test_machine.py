"""What places cost, from traces with known costs, and predictions at other places, computed by hand."""

from __future__ import annotations

from typing import ClassVar

import pytest

from flowrl.distributed.place import Colocate, Split
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.prediction.cost import Cost
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.measured.machine import Elsewhere, Line, Machine, measured
from flowrl.run.prediction.measured.work import Work
from flowrl.run.prediction.prediction import predict
from tests.support.paper import BATCH, Generate, Nodes, PlacedRollout, PlacedTrainer, SyncWeights, Train, graph_of

WORKS = {
    "generate": Work("generate", ("rollout",)),
    "train": Work("update", ("actor",)),
    "sync": Work("sync", ("actor", "rollout")),
}
ALONE = Costs(
    "alone",
    {"generate": {1: Cost(fixed=2.0)}, "train": {1: Cost(fixed=1.0)}, "sync": {1: Cost(fixed=0.1)}},
    gaps={"generate": 0.0, "train": 0.01, "sync": 0.01},
    works=WORKS,
)


def node(name: str, place: str, step: int, start: float, seconds: float) -> Span:
    return Span(name, place, start, start + seconds, 0, "node", step)


GENERATED, TRAINED = 2.0 + 0.2, 1.0 + 0.1
"""Seconds in a process of Ray."""


def split(step: int) -> list[Span]:
    """A step without a lag: nodes one after another, 0.05 s apart."""
    at = 10.0 * step
    trained = at + GENERATED + 0.06
    return [
        node("generate", "rollout rank 0", step, at, GENERATED),
        node("train", "actor rank 0", step, trained, TRAINED),
        node("sync", "rollout rank 0", step, trained + TRAINED + 0.06, 0.4),
    ]


def ahead(step: int, contention: float) -> list[Span]:
    """Training while the next rows are generated."""
    at = 10.0 * step
    return [
        node("train", "actor rank 0", step, at, TRAINED * contention),
        node("generate", "rollout rank 0", step, at, GENERATED * (contention * 0.5 + 0.5)),
    ]


def two_ranks(step: int) -> list[Span]:
    at = 10.0 * step
    return [node("train", f"actor rank {rank}", step, at, TRAINED * 1.4 + 0.3) for rank in (0, 1)]


def traced(spans: list[Span]) -> Elsewhere:
    timeline = Timeline()
    timeline.spans += spans
    return Elsewhere(timeline, ALONE, weights=1000.0)


class TestMeasured:
    def test_costs_are_those_that_made_the_traces(self) -> None:
        steps = range(4)
        machine = measured(
            [
                traced([span for step in steps for span in split(step)]),
                traced([span for step in steps for span in ahead(step, 1.4)]),
                traced([span for step in steps for span in two_ranks(step)]),
            ]
        )
        assert machine.hosted == pytest.approx({"generate": 0.2, "update": 0.1})
        assert machine.contention == pytest.approx(1.4, abs=0.01)
        assert machine.sync.seconds(1000.0) == pytest.approx(0.4)
        assert machine.ranks["update"].seconds(1000.0) == pytest.approx(0.3, abs=0.02)
        assert machine.call[0] == pytest.approx(0.05, abs=1e-6)

    def test_a_line_through_two_models_is_found(self) -> None:
        line = Line.of([(1000.0, 0.3), (3000.0, 0.7)])
        assert (line.fixed, line.weight) == (pytest.approx(0.1), pytest.approx(0.0002))
        assert Line.of([]) == Line()
        assert Line.of([(1000.0, 0.3), (3000.0, 0.1)]).seconds(2000.0) <= 0.3  # no negative part


class TestCarry:
    NODES: ClassVar[Nodes] = {
        "generate": (Generate(), BATCH),
        "train": (Train(), ("generate",) * 2),
        "sync": (SyncWeights(), ("train",) * 2),
    }
    MACHINE = Machine(contention=1.5, hosted={"generate": 0.2, "update": 0.2}, call=(0.05, 0.0), sync=Line(0.5))

    def test_a_split_step_is_the_sum_of_its_carried_nodes(self) -> None:
        graph = graph_of(self.NODES, actor=PlacedTrainer(), rollout=PlacedRollout())
        found = predict(graph, Split(1, 1), 8, ALONE.on(self.MACHINE))
        assert found.seconds == pytest.approx(2.2 + 1.2 + 0.5 + 3 * 0.05 + 2 * 0.01)
        assert found.unknown == ""

    def test_with_a_lag_both_sides_slow_each_other(self) -> None:
        graph = graph_of(self.NODES, 1, actor=PlacedTrainer(), rollout=PlacedRollout())
        usual = predict(graph, Split(1, 1), 8, ALONE.on(Machine(sync=Line(0.1))))
        slowed = predict(graph, Split(1, 1), 8, ALONE.on(Machine(contention=1.5, sync=Line(0.1))))
        assert usual.seconds == pytest.approx(2.1 + 0.01, abs=0.02)
        assert slowed.seconds == pytest.approx(usual.seconds + 0.5 * 1.0, abs=0.02)  # training takes 1 s of the 2 s

    def test_one_process_needs_no_machine(self) -> None:
        graph = graph_of(self.NODES, actor=PlacedTrainer(), rollout=PlacedRollout())
        assert predict(graph, None, 8, ALONE.on(self.MACHINE)).seconds == predict(graph, None, 8, ALONE).seconds

    def test_ranks_wait_for_each_other(self) -> None:
        graph = graph_of(self.NODES, actor=PlacedTrainer(ranks=2), rollout=PlacedRollout())
        machine = Machine(sync=Line(0.1), ranks={"update": Line(0.0, 0.7)})
        alone = predict(graph, Colocate(gpus=2), 8, ALONE.on(Machine(sync=Line(0.1))))
        assert predict(graph, Colocate(gpus=2), 8, ALONE.on(machine)).seconds == pytest.approx(alone.seconds + 0.7)
