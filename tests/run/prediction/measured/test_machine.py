"""What places cost, from traces with known costs, and predictions at other places, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flowrl.distributed.place import Colocate, Split
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.prediction.cost import Cost
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.measured.machine import Elsewhere, Line, Machine, measured
from flowrl.run.prediction.measured.work import Work
from flowrl.run.prediction.prediction import predict
from tests.support.errors import raises
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


MODELS = {"actor": "1b", "rollout": None}
"""By role; the engine shares the trainer's weights."""


def run(folder: Path, spans: list[Span], place: Any = None, models: Any = MODELS, **operators: Any) -> Path:
    """The files of a run that `Machine.of` reads."""
    nodes = {
        "generate": {"$type": "toys:Generate", "rollout": {"$role": "rollout"}, "max_new_tokens": 8},
        "train": {"$type": "toys:Train", "actor": {"$role": "actor"}, "ppo_epochs": 1, "mini_batch": None},
        "sync": {"$type": "toys:Sync", "actor": {"$role": "actor"}, "rollout": {"$role": "rollout"}},
        **operators,
    }
    graph = {
        "nodes": {name: {"operator": operator} for name, operator in nodes.items()},
        "bindings": {role: {"model": model} for role, model in models.items()},
    }
    folder.mkdir()
    described = {"training": {"prompts": 8}, "place": place, "graph": graph}
    (folder / "run.json").write_text(json.dumps(described))
    steps = [{"step": step + 1, "timing/step": 5.0} for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    timeline = Timeline()
    timeline.spans += spans
    timeline.save(folder / "trace.json")
    return folder


PLACE = {"$type": "flowrl.distributed.place:Split", "train": 1, "rollout": 1}


def alone_step(step: int) -> list[Span]:
    """A step in one process: nodes one after another."""
    at = 10.0 * step
    seconds = {"generate": 2.0, "train": 1.0, "sync": 0.1}
    starts = {"generate": at, "train": at + 2.01, "sync": at + 3.02}
    return [node(name, "local", step, starts[name], seconds[name]) for name in seconds]


class TestOf:
    SPLIT: ClassVar[list[Span]] = [span for step in range(4) for span in split(step)]
    ALONE: ClassVar[list[Span]] = [span for step in range(4) for span in alone_step(step)]

    def test_runs_are_given_in_any_order(self, tmp_path: Path) -> None:
        alone, placed = run(tmp_path / "alone", self.ALONE), run(tmp_path / "placed", self.SPLIT, PLACE)
        machine = Machine.of(alone, placed)
        assert machine.hosted == pytest.approx({"generate": 0.2, "update": 0.1})
        assert machine.sync.seconds(1.0) == pytest.approx(0.4)
        assert Machine.of(placed, str(alone)) == machine

    def test_exactly_one_run_is_in_one_process(self, tmp_path: Path) -> None:
        alone, again = run(tmp_path / "alone", self.ALONE), run(tmp_path / "again", self.ALONE)
        placed, other = (run(tmp_path / name, self.SPLIT, PLACE) for name in ("placed", "other"))
        for runs, found in (((placed, other), []), ((alone, again, placed), [str(alone), str(again)])):
            with raises("predict.machine-runs", alone=tuple(found)):
                Machine.of(*runs)
        for runs in ((alone,), (alone, alone)):
            with raises("predict.machine-runs", paths=(str(alone),)):
                Machine.of(*runs)

    def test_a_run_of_another_job_is_refused(self, tmp_path: Path) -> None:
        alone = run(tmp_path / "alone", self.ALONE)
        longer = {"$type": "toys:Generate", "rollout": {"$role": "rollout"}, "max_new_tokens": 16}
        other = run(tmp_path / "other", self.SPLIT, PLACE, generate=longer, score={"ref": {"$role": "ref"}})
        with raises("predict.another-job", path=str(other), nodes=("generate", "score")):
            Machine.of(other, alone)
        larger = run(tmp_path / "larger", self.SPLIT, PLACE, MODELS | {"actor": "8b"})
        with raises("predict.another-job", path=str(larger), nodes=("the model of actor",)):
            Machine.of(alone, larger)
        corrected = run(
            tmp_path / "corrected",
            self.SPLIT,
            PLACE,
            MODELS | {"rollout": "1b"},
            correction={"$type": "toys:Correction"},
        )
        assert Machine.of(alone, corrected).hosted  # as a lag needs

    def test_a_folder_without_a_run_or_a_damaged_one_is_refused(self, tmp_path: Path) -> None:
        alone, placed = run(tmp_path / "alone", self.ALONE), run(tmp_path / "placed", self.SPLIT, PLACE)
        with raises("predict.no-run", path=str(tmp_path / "none"), missing="run.json"):
            Machine.of(alone, tmp_path / "none")
        (placed / "trace.json").unlink()
        with raises("predict.no-run", path=str(placed), missing="trace.json"):
            Machine.of(alone, placed)
        described = json.loads((alone / "run.json").read_text())
        (alone / "run.json").write_text(json.dumps({**described, "graph": None}))
        with raises("run.damaged", path=str(alone / "run.json")):
            Machine.of(alone, run(tmp_path / "whole", self.SPLIT, PLACE))


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
