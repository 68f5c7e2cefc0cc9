"""The pretend runner: step times counted by hand, and the order of the schedule over random graphs, lags and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrl import columns as c
from flowrl.core.backend import Backend
from flowrl.core.graph import Input, Node
from flowrl.core.operator import Operator
from flowrl.core.plan import Plan
from flowrl.core.ports import PortField
from flowrl.core.protocols import Rollout, Trainer
from flowrl.core.roles import Reads, Role, Writes
from flowrl.core.symbols import Edge
from flowrl.data.dataproto import DataProto
from flowrl.distributed.place import Colocate, Split
from flowrl.errors import BindError, DataError, GraphError, NodeError
from flowrl.graph import Graph
from flowrl.run.cost import Cost
from flowrl.run.costs import Costs
from flowrl.run.place import Place, lay_out
from flowrl.run.prediction import predict
from flowrl.run.pretend import PretendRunner, blank_batch
from flowrl.run.runner import Done, Task
from flowrl.run.schedule import Schedule
from flowrl.run.steps import Steps
from flowrl.run.weights import TrainedWeights
from tests.kernel import RolloutEngine, TrainerEngine


class Start(NamedTuple):
    values: c.Values


class General(Operator):
    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class Whole(General):
    granularity = "batch"


class Ask(Operator):
    granularity = "row"
    engine: Reads[Trainer] = Role("actor")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class Train(Operator):
    granularity = "row"
    engine: Writes[Trainer] = Role("actor")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class Answer(Operator):
    granularity = "row"
    engine: Reads[Rollout] = Role("rollout")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class Carry(Operator):
    trainer: Reads[Trainer] = Role("actor")
    engine: Writes[Rollout] = Role("rollout")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class OnSlots(Backend):
    """A backend that loads nothing."""

    serves = (Trainer,)
    ranks: int = 1
    loses_weights_asleep: bool = False

    def build(self, context: Any) -> TrainerEngine:
        raise AssertionError("built")


class Generating(OnSlots):
    serves = (Rollout,)

    def build(self, context: Any) -> RolloutEngine:
        raise AssertionError("built")


Wires = tuple[str, str]
Nodes = Mapping[str, tuple[Operator, Wires]]


def graph_of(nodes: Nodes, lag: int = 0, **backends: Any) -> Graph:
    """A graph of nodes that read two columns each, from ``"batch"`` or from other nodes; all are sinks."""
    made = {"batch": Node("batch", Input(Start).named("batch"), {})}
    for name, (operator, sources) in nodes.items():
        wires = zip(operator.signature.fields, sources, strict=True)
        edges = {field: Edge(source, next(iter(made[source].operator.signature.outputs))) for field, source in wires}
        made[name] = Node(name, operator.named(name), dict[PortField, Edge](edges))
    return Graph.build("toy", made, list(nodes), lag).bound(backends)


def seconds_of(graph: Graph, place: Place | None, costs: Costs, rows: int = 8) -> float:
    return predict(graph, place, rows, costs).seconds


def fixed(**seconds: float) -> Costs:
    return Costs("by hand", {}).given(**seconds)


BATCH = ("batch", "batch")


class TestStepTime:
    def test_two_general_nodes_run_at_once_on_ray_and_one_after_the_other_in_one_process(self) -> None:
        graph, costs = graph_of({"a": (General(), BATCH), "b": (General(), BATCH)}), fixed(a=2.0, b=3.0)
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(3.0)
        assert seconds_of(graph, None, costs) == pytest.approx(5.0)

    def test_a_chain_is_a_sum(self) -> None:
        graph = graph_of({"a": (General(), BATCH), "b": (General(), ("a", "batch"))})
        assert seconds_of(graph, Colocate(gpus=1), fixed(a=2.0, b=3.0)) == pytest.approx(5.0)

    def test_roles_of_one_slot_follow_each_other_and_those_of_two_do_not(self) -> None:
        nodes: Nodes = {"a": (Ask(), BATCH), "b": (Ask(engine=Role("ref")), BATCH)}
        graph = graph_of(nodes, actor=OnSlots(), ref=OnSlots())
        assert seconds_of(graph, Colocate(gpus=1), fixed(a=2.0, b=3.0)) == pytest.approx(5.0)
        assert seconds_of(graph, Colocate(gpus=2), fixed(a=2.0, b=3.0)) == pytest.approx(3.0)

    def test_taking_turns_takes_time_while_the_driver_waits(self) -> None:
        nodes: Nodes = {"a": (Ask(), BATCH), "b": (Ask(engine=Role("ref")), BATCH)}
        graph = graph_of(nodes, actor=OnSlots(), ref=OnSlots())
        turns = {"sleep": {"a": 0.1, "b": 0.2}, "wake": {"a": 0.3, "b": 0.4}}
        costs = Costs("by hand", {}, turns=turns).given(a=2.0, b=3.0)
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(5.0 + 0.1 + 0.2 + 0.3 + 0.4)
        assert seconds_of(graph, Colocate(gpus=2), costs) == pytest.approx(3.0)  # all stay awake

    def test_a_role_that_has_its_turn_keeps_it(self) -> None:
        nodes: Nodes = {"a": (Ask(), BATCH), "b": (Ask(), ("a", "a")), "c": (Ask(engine=Role("ref")), ("b", "b"))}
        graph = graph_of(nodes, actor=OnSlots(), ref=OnSlots())
        costs = Costs("by hand", {}, turns={"sleep": {"a": 1.0}, "wake": {"a": 10.0}}).given(a=0.0, b=0.0, c=0.0)
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(2 * 11.0)

    def test_a_sync_wakes_the_trainer_before_the_engine(self) -> None:
        nodes: Nodes = {
            "answer": (Answer(), BATCH),
            "train": (Train(), ("answer",) * 2),
            "carry": (Carry(), ("train",) * 2),
        }
        graph = graph_of(nodes, actor=OnSlots(), rollout=Generating())
        costs = Costs("by hand", {}, turns={"sleep": {"answer": 1.0}, "wake": {"answer": 10.0}})
        costs = costs.given(answer=1.0, train=1.0, carry=1.0)
        # train and carry each put one to sleep and wake the other; answer finds the engine awake
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(3.0 + 2 * 11.0)

    def test_an_engine_that_forgets_is_synced_before_it_generates(self) -> None:
        nodes: Nodes = {
            "answer": (Answer(), BATCH),
            "carry": (Carry(), ("answer",) * 2),
            "ask": (Ask(), ("carry",) * 2),
        }
        for forgets, syncs in ((False, 1), (True, 2)):
            graph = graph_of(nodes, actor=OnSlots(), rollout=Generating(loses_weights_asleep=forgets))
            costs = fixed(answer=1.0, carry=10.0, ask=1.0)
            assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(2.0 + 10.0 * syncs)

    def test_ranks_share_rows(self) -> None:
        graph = graph_of({"a": (Ask(), BATCH)}, actor=OnSlots(ranks=2))
        costs = Costs("by hand", {"a": {1: Cost(fixed=1.0)}}, lengths={})
        assert seconds_of(graph, Colocate(gpus=2), costs, rows=8) == pytest.approx(1.0)

    def test_what_passes_between_nodes_and_between_steps(self) -> None:
        graph = graph_of({"a": (General(), BATCH), "b": (General(), ("a", "a"))})
        costs = Costs("by hand", {}, gaps={"a": 0.1, "b": 0.2}, between=0.7).given(a=2.0, b=3.0)
        for place in (None, Colocate(gpus=1)):
            assert seconds_of(graph, place, costs) == pytest.approx(6.0)

    def test_lag_overlaps_generation_and_training_on_slots_of_their_own(self) -> None:
        nodes: Nodes = {
            "answer": (Answer(), BATCH),
            "train": (Train(), ("answer",) * 2),
            "carry": (Carry(), ("train",) * 2),
        }
        costs = fixed(answer=3.0, train=2.0, carry=0.0)
        backends = {"actor": OnSlots(), "rollout": Generating()}
        for lag, wanted in ((0, 5.0), (1, 3.0)):
            found = predict(graph_of(nodes, lag, **backends), Split(), 8, costs)
            assert (found.seconds, found.bound) == (pytest.approx(wanted), pytest.approx(wanted))
        assert seconds_of(graph_of(nodes, 1, **backends), Colocate(gpus=1), costs) == pytest.approx(5.0)


class TestPrediction:
    def test_idle_shares_and_bounds(self) -> None:
        nodes: Nodes = {
            "answer": (Answer(), BATCH),
            "train": (Train(), ("answer",) * 2),
            "carry": (Carry(), ("train",) * 2),
        }
        graph = graph_of(nodes, actor=OnSlots(), rollout=Generating())
        found = predict(graph, Split(train=2), 8, fixed(answer=3.0, train=1.0, carry=0.5))
        assert found.idle == pytest.approx({"slot 0": 1 - 1.5 / 4.5, "slot 1": 1.0, "slot 2": 1 - 3.5 / 4.5})
        assert (found.path, found.path_seconds) == (("answer", "train", "carry"), pytest.approx(4.5))
        assert (found.busiest, found.bound) == (pytest.approx(3.5), pytest.approx(4.5))
        assert str(found) == (
            "Split(train=2): a step takes 4.500 s\n"
            "  at least 4.500 s: the critical path answer → train → carry\n"
            "  with lag at least 3.500 s: the work of the busiest slot\n"
            "  idle: slot 0 67%, slot 1 100%, slot 2 22%\n"
            "  by hand ran in one process, so it does not say what syncs and turns between processes cost here"
        )

    def test_in_one_process(self) -> None:
        found = predict(graph_of({"a": (General(), BATCH)}), None, 8, fixed(a=2.0))
        assert str(found) == (
            "in one process: a step takes 2.000 s\n  at least 2.000 s: the work of the busiest slot\n  idle: slot 0 0%"
        )

    def test_a_node_that_was_not_measured(self) -> None:
        with pytest.raises(DataError, match=r"by hand has not measured b of toy; run that graph once.*--cost b=0.1"):
            predict(graph_of({"a": (General(), BATCH), "b": (General(), BATCH)}), None, 8, fixed(a=1.0))

    def test_an_unbound_role(self) -> None:
        with pytest.raises(BindError, match=r"toy leaves 'actor' unbound, so nobody knows which slots of Colocate\(\)"):
            predict(graph_of({"a": (Ask(), BATCH)}), Colocate(), 8, fixed(a=1.0))


# ------------------------------------------------------------------------------------------------- the schedule, walked

KINDS: list[Operator] = [General(), Whole(), Ask(), Train(), Ask(engine=Role("ref")), Answer(), Carry()]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs in which no role has two writers."""
    nodes: dict[str, tuple[Operator, Wires]] = {}
    for i in range(draw(st.integers(1, 7))):
        sources = st.sampled_from(["batch", *nodes])
        operator = draw(st.sampled_from([kind for kind in KINDS if not writes(kind) or not written(kind, nodes)]))
        nodes[f"n{i}"] = operator, (draw(sources), draw(sources))
    backends = {"actor": OnSlots(draw(st.integers(1, 2))), "ref": OnSlots(), "rollout": Generating()}
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


class Watched(PretendRunner):
    """Counts the versions of all roles as nodes write them, and holds against them what nodes read."""

    def __init__(self, graph: Graph, place: Place | None, costs: Costs, lose: Sequence[int] = ()) -> None:
        super().__init__(None if place is None else lay_out(graph, place), costs)
        self.graph, self.lose = graph, set(lose)
        self.order: list[tuple[int | None, str]] = []
        self.launches: Counter[tuple[int | None, str]] = Counter()
        self.running: dict[tuple[int | None, str], Node] = {}
        self.versions: Counter[str] = Counter()
        self.kept: dict[str, int] = {}
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

    def wait(self) -> Sequence[Done]:
        number = sum(self.launches.values())
        self.launches.update(dict.fromkeys(self.running, 1))
        if number in self.lose:
            self.lose.discard(number)
            self.running.clear()
            self._running.clear()
            raise NodeError("lost")
        finished = super().wait()
        for one in finished:
            node = self.running.pop((one.task.step, one.task.node.name))
            self.done.add((one.task.step, node.name))
            self.versions.update(node.writes if one.task.step is not None else ())
        return finished

    def mends(self, error: NodeError) -> bool:
        return True

    def mend(self, error: NodeError) -> None:
        pass

    def save(self, role: str, folder: Path) -> None:
        folder.mkdir()
        self.kept[str(folder)] = self.versions[role]

    def load(self, role: str, folder: Path) -> None:
        self.versions[role] = self.kept[str(folder)]


def assume_possible(plan: Plan, lag: int) -> None:
    """Where generation depends on training in its own step, it cannot run ahead of it."""
    assume(nx.is_directed_acyclic_graph(Schedule(plan, lag).network(range(10))))


def run(graph: Graph, runner: Watched, steps: int, lag: int, spare: Path | None = None) -> tuple[list[int], list[int]]:
    """The steps for which batches were drawn, in order, and how many were done when each was."""
    plan, drawn, done = Plan(graph), list[int](), list[int]()
    walk = Steps(plan, runner, 0, TrainedWeights(plan, runner, 0, spare))
    assume_possible(plan, lag)
    finished = 0

    def draw(step: int) -> DataProto:
        drawn.append(step)
        done.append(finished)
        return blank_batch(graph, 4)

    if spare is not None:
        walk.sync()
    for _ in walk.run(draw, range(steps), lag=lag):
        finished += 1
    return drawn, done


costs_of = st.fixed_dictionaries({f"n{i}": st.sampled_from([0.0, 1.0, 2.0, 5.0]) for i in range(7)})
places = st.sampled_from([None, Colocate(gpus=2), Split(train=2), Split(train=3)])


class TestWalk:
    @given(graphs(), costs_of, places, st.integers(0, 3), st.integers(1, 5))
    @settings(max_examples=200)
    def test_every_instance_runs_once_after_all_that_it_waits_for(
        self, graph: Graph, seconds: dict[str, float], place: Place | None, lag: int, steps: int
    ) -> None:
        runner = Watched(graph, place, fixed(**seconds))
        drawn, done = run(graph, runner, steps, lag)
        names = [node.name for node in Plan(graph).order]
        assert sorted(runner.order) == sorted((step, name) for step in range(steps) for name in names)
        assert drawn == list(range(steps))
        assert all(step - before <= lag for step, before in zip(drawn, done, strict=True))
        self.check_versions(graph, runner, lag)

    def check_versions(self, graph: Graph, runner: Watched, lag: int) -> None:
        """Whoever reads a role sees what was written before; only what generates sees what is `lag` steps old."""
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
        first, second = (Watched(graph, None, fixed(**seconds)) for seconds in (some, others))
        for runner in (first, second):
            run(graph, runner, 3, lag)
        assert first.order == second.order

    @given(graphs(), costs_of, places, st.sets(st.integers(1, 12), max_size=2))
    def test_what_is_lost_is_repeated_with_the_same_batches_and_weights(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        graph: Graph,
        seconds: dict[str, float],
        place: Place | None,
        lose: set[int],
    ) -> None:
        runner = Watched(graph, place, fixed(**seconds), sorted(lose))
        drawn, _ = run(graph, runner, 4, 0, tmp_path_factory.mktemp("spare"))
        assert drawn == list(range(4))
        names = [node.name for node in Plan(graph).order]
        assert {(step, name) for step, name in runner.order if step is not None} == {
            (step, name) for step in range(4) for name in names
        }
        trained = set(graph.trained)
        assert all(runner.versions[role] == 4 for role in trained)
        for (step, name, role), version in runner.seen.items():
            if role in trained:
                [writer] = [node.name for node in graph.nodes.values() if role in node.writes]
                assert version == step + (name in graph.descendants(writer))

    @given(graphs(), costs_of, st.integers(0, 2))
    def test_a_step_is_never_shorter_than_its_bound(self, graph: Graph, seconds: dict[str, float], lag: int) -> None:
        runner = PretendRunner(lay_out(graph, Split(train=2)), fixed(**seconds))
        plan, ends = Plan(graph), [0.0]
        assume_possible(plan, lag)
        for _ in Steps(plan, runner, 0, TrainedWeights(plan, runner, 0)).run(
            lambda step: blank_batch(graph, 4), range(12), lag=lag
        ):
            ends.append(runner.now)
        bound = predict(graph, Split(train=2), 4, fixed(**seconds)).busiest
        assert (ends[-1] - ends[0]) / 12 >= bound - 1e-9

    def test_a_lag_that_cannot_be_is_refused(self) -> None:
        nodes: Nodes = {
            "train": (Train(), BATCH),
            "carry": (Carry(), ("train",) * 2),
            "answer": (Answer(), ("train",) * 2),
        }
        graph = graph_of(nodes, 1, actor=OnSlots(), rollout=Generating())
        with pytest.raises(
            GraphError, match=r"toy cannot let generation run 1 version\(s\) ahead: it would wait.*answer in step"
        ):
            predict(graph, Split(), 4, fixed(train=1.0, carry=1.0, answer=1.0))
