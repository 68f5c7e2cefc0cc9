"""`PretendRunner` runs in the order of the execution graph, for random graphs, lags, places and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.data.proto.dataproto import DataProto
from flowrl.distributed.place import Colocate, Split
from flowrl.errors import GraphError, NodeError
from flowrl.graph import Graph
from flowrl.run.engine.execution_graph import ExecutionGraph
from flowrl.run.engine.runner import Task, TaskResult
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.weights import TrainedWeights
from flowrl.run.placement.place import Place, lay_out
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.prediction.pretend import PretendRunner, blank_batch
from tests.support.errors import raises
from tests.support.paper import (
    BATCH,
    Generate,
    Nodes,
    OnBatch,
    OnRows,
    PlacedRollout,
    PlacedTrainer,
    Score,
    SyncWeights,
    Train,
    Wires,
    fixed,
    graph_of,
)


class LiveSync(SyncWeights):
    """A sync that does not wait for generation."""

    @property
    def effects(self) -> frozenset[str]:
        return frozenset({Effect.SPANS})


KINDS: list[Operator] = [OnRows(), OnBatch(), Score(), Train(), Score(engine=Role("ref")), Generate(), SyncWeights()]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs in which no role has two writers."""
    nodes: dict[str, tuple[Operator, Wires]] = {}
    for i in range(draw(st.integers(1, 7))):
        sources = st.sampled_from(["batch", *nodes])
        operator = draw(st.sampled_from([kind for kind in KINDS if not writes(kind) or not written(kind, nodes)]))
        nodes[f"n{i}"] = operator, (draw(sources), draw(sources))
    backends = {"actor": PlacedTrainer(draw(st.integers(1, 2))), "ref": PlacedTrainer(), "rollout": PlacedRollout()}
    used = {use.role for name, (op, _) in nodes.items() for use in Node(name, op, {}).uses}
    graph = graph_of(nodes, **{role: backends[role] for role in used})
    try:
        _ = Plan(graph).network
    except GraphError:
        assume(False)
    return graph


def writes(operator: Operator) -> bool:
    return bool(Node("x", operator, {}).writes)


def written(operator: Operator, nodes: Nodes) -> bool:
    return any(type(other) is type(operator) for other, _ in nodes.values())


class CheckedRunner(PretendRunner):
    """Tracks the version of each role as nodes write it, and asserts the versions that nodes read."""

    def __init__(self, graph: Graph, place: Place | None, costs: Costs, failing_calls: Sequence[int] = ()) -> None:
        super().__init__(None if place is None else lay_out(graph, place), costs)
        self.graph, self.failing_calls = graph, set(failing_calls)
        self.order: list[tuple[int | None, str]] = []
        self.launches: Counter[tuple[int | None, str]] = Counter()
        self.running: dict[tuple[int | None, str], Node] = {}
        self.versions: Counter[str] = Counter()
        self.saved_versions: dict[str, int] = {}
        self.seen: dict[tuple[int, str, str], int] = {}
        self.done: set[tuple[int | None, str]] = set()

    def launch(self, task: Task) -> None:
        node, step = task.node, task.step
        for _, other in self.running.items():
            assert self.slots(node).isdisjoint(self.slots(other))
            assert not set(node.writes) & set(other.roles) and not set(node.reads) & set(other.writes)
        for source in node.sources if step is not None else ():
            assert source in self.graph.inputs or (step, source) in self.done
        for role in node.reads if step is not None else ():
            assert step is not None
            self.seen[step, node.name, role] = self.versions[role]
        self.order.append((step, node.name))
        self.running[step, node.name] = node
        super().launch(task)

    def wait(self) -> Sequence[TaskResult]:
        number = sum(self.launches.values())
        self.launches.update(dict.fromkeys(self.running, 1))
        if number in self.failing_calls:
            self.failing_calls.discard(number)
            self.running.clear()
            self._clock.clear()
            raise NodeError("lost")
        finished = super().wait()
        for one in finished:
            node = self.running.pop((one.task.step, one.task.node.name))
            self.done.add((one.task.step, node.name))
            if one.task.step is None:  # a sync, after the trained roles were loaded
                for role in node.writes:
                    self.versions[role] = self.versions[node.reads[0]]
            self.versions.update(node.writes if one.task.step is not None else ())
        return finished

    def can_recover(self, error: NodeError) -> bool:
        return True

    def recover(self, error: NodeError) -> None:
        pass

    def save(self, role: str, folder: Path) -> None:
        folder.mkdir()
        self.saved_versions[str(folder)] = self.versions[role]

    def load(self, role: str, folder: Path) -> None:
        self.versions[role] = self.saved_versions[str(folder)]


def assume_possible(plan: Plan, lag: int) -> None:
    """Skip graphs whose generation depends on training in the same step."""
    assume(nx.is_directed_acyclic_graph(ExecutionGraph(plan, lag).network(range(10))))


def run(
    graph: Graph, runner: CheckedRunner, steps: int, lag: int, scratch: Path | None = None
) -> tuple[list[int], list[int]]:
    """The steps of the sampled batches, in order, and the number of finished steps at each."""
    plan, batches, done = Plan(graph), list[int](), list[int]()
    walk = Steps(plan, runner, 0, TrainedWeights(plan, runner, 0, scratch))
    finished = 0

    def draw(step: int) -> DataProto:
        batches.append(step)
        done.append(finished)
        return blank_batch(graph, 4)

    if scratch is not None:
        walk.sync()
    for _ in walk.run(draw, range(steps), lag=lag):
        finished += 1
    return batches, done


costs_of = st.fixed_dictionaries({f"n{i}": st.sampled_from([0.0, 1.0, 2.0, 5.0]) for i in range(7)})
places = st.sampled_from([None, Colocate(gpus=2), Split(train=2), Split(train=3)])


class TestWalk:
    @given(graphs(), costs_of, places, st.integers(0, 3), st.integers(1, 5))
    def test_each_instance_runs_once_after_its_dependencies(
        self, graph: Graph, seconds: dict[str, float], place: Place | None, lag: int, steps: int
    ) -> None:
        assume_possible(Plan(graph), lag)
        runner = CheckedRunner(graph, place, fixed(**seconds))
        batches, done = run(graph, runner, steps, lag)
        names = [node.name for node in Plan(graph).order]
        assert sorted(runner.order) == sorted((step, name) for step in range(steps) for name in names)
        assert batches == list(range(steps))
        assert all(step - before <= lag for step, before in zip(batches, done, strict=True))
        self.check_versions(graph, runner, lag)

    def check_versions(self, graph: Graph, runner: CheckedRunner, lag: int) -> None:
        """Nodes read the latest version of a role; only generation reads versions that are `lag` steps old."""
        writer = {role: node.name for node in graph.nodes.values() for role in node.writes}
        for (step, name, role), version in runner.seen.items():
            if role not in writer:
                assert version == 0
            elif name in graph.descendants(writer[role]):
                assert version == step + 1
            elif role in graph.generators:
                assert version == max(0, step - lag)
            else:
                assert version == step

    @given(graphs(), costs_of, costs_of, st.integers(0, 2))
    def test_the_order_in_one_process_does_not_depend_on_the_clock(
        self, graph: Graph, some: dict[str, float], others: dict[str, float], lag: int
    ) -> None:
        assume_possible(Plan(graph), lag)
        first, second = (CheckedRunner(graph, None, fixed(**seconds)) for seconds in (some, others))
        for runner in (first, second):
            run(graph, runner, 3, lag)
        assert first.order == second.order

    @given(graphs(), costs_of, places, st.sets(st.integers(1, 12), max_size=2), st.integers(0, 2))
    def test_lost_steps_are_repeated_with_the_same_batches_and_weights(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        graph: Graph,
        seconds: dict[str, float],
        place: Place | None,
        failing_calls: set[int],
        lag: int,
    ) -> None:
        assume_possible(Plan(graph), lag)
        runner = CheckedRunner(graph, place, fixed(**seconds), sorted(failing_calls))
        batches, _ = run(graph, runner, 4, lag, tmp_path_factory.mktemp("scratch"))
        assert batches == list(range(4))
        names = [node.name for node in Plan(graph).order]
        assert {(step, name) for step, name in runner.order if step is not None} == {
            (step, name) for step in range(4) for name in names
        }
        assert all(runner.versions[role] == 4 for role in graph.trained)
        if graph.trained:  # without training, each sync of the same weights would count as a new version
            self.check_versions(graph, runner, lag)

    @given(graphs(), costs_of, st.integers(0, 2))
    def test_a_predicted_step_is_never_shorter_than_its_bound(
        self, graph: Graph, seconds: dict[str, float], lag: int
    ) -> None:
        runner = PretendRunner(lay_out(graph, Split(train=2)), fixed(**seconds))
        plan, ends = Plan(graph), [0.0]
        assume_possible(plan, lag)
        for _ in Steps(plan, runner, 0, TrainedWeights(plan, runner, 0)).run(
            lambda step: blank_batch(graph, 4), range(12), lag=lag
        ):
            ends.append(runner.now)
        bound = predict(graph, Split(train=2), 4, fixed(**seconds)).busiest
        assert (ends[-1] - ends[0]) / 12 >= bound - 1e-9

    @pytest.mark.parametrize("lag", [1, 2, 3])
    @pytest.mark.parametrize("place", [None, Split(train=1, rollout=1)])
    def test_rows_sampled_with_older_weights_survive_a_loss_of_later_weights(
        self, lag: int, place: Place | None, tmp_path: Path
    ) -> None:
        nodes: Nodes = {
            "generate": (Generate(), BATCH),
            "train": (Train(), ("generate",) * 2),
            "sync": (SyncWeights(), ("train",) * 2),
        }
        backends = {"actor": PlacedTrainer(), "rollout": PlacedRollout()}
        for lost in range(1, 3 * 6):
            graph = graph_of(nodes, lag, **backends)
            runner = CheckedRunner(graph, place, fixed(generate=2.0, train=3.0, sync=1.0), [lost])
            batches, _ = run(graph, runner, 6, lag, tmp_path / f"{lost}")
            assert batches == list(range(6))
            self.check_versions(graph, runner, lag)
            again = Counter(runner.order)
            assert sum(again[step, "generate"] - 1 for step in range(6)) <= 1  # the call in flight at the fault

    def test_a_swap_runs_concurrently_with_generation(self) -> None:
        """Computed by hand: a sync occupies both slots for a second per step; a live update only the trainer's."""
        costs, seconds = fixed(generate=3.0, train=1.0, sync=1.0), {}
        for sync in (SyncWeights(), LiveSync()):
            nodes: Nodes = {
                "generate": (Generate(), BATCH),
                "train": (Train(), ("generate",) * 2),
                "sync": (sync, ("train",) * 2),
            }
            graph, places = (
                graph_of(nodes, 1, actor=PlacedTrainer(), rollout=PlacedRollout()),
                (Split(1, 1), Colocate(1), None),
            )
            seconds[type(sync)] = [predict(graph, place, 4, costs).seconds for place in places]
        assert seconds == {SyncWeights: [4.0, 5.0, 5.0], LiveSync: [3.0, 5.0, 5.0]}

    def test_an_impossible_lag_is_refused(self) -> None:
        nodes: Nodes = {
            "train": (Train(), BATCH),
            "sync": (SyncWeights(), ("train",) * 2),
            "generate": (Generate(), ("train",) * 2),
        }
        graph = graph_of(nodes, 1, actor=PlacedTrainer(), rollout=PlacedRollout())
        with raises("lag.unsupported", graph="toy", lag=1):
            predict(graph, Split(), 4, fixed(train=1.0, sync=1.0, generate=1.0))
