"""`Steps`: runs the steps of a plan: draws batches, flies them, and goes back where something is lost.

A `Flight` holds the steps that are under way: which instances are ready, and what those that are done left. Where
things run is the runner's alone: in this process, on Ray, or on a virtual clock.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.core.graph import Graph, Node
from flowrl.core.plan import Plan
from flowrl.core.ports import PortField
from flowrl.core.symbols import Edge
from flowrl.data.dataproto import DataProto
from flowrl.data.metrics import Metric, Metrics
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.errors import GraphError
from flowrl.run.runner import Counts, Done, Held, Lengths, Runner, Task
from flowrl.run.schedule import Schedule
from flowrl.run.timeline import Timeline
from flowrl.run.weights import TrainedWeights

Draw = Callable[[int], DataProto]
OnNode = Callable[[str], None]


@dataclass(frozen=True)
class StepResult:
    """What one step left.

    Args:
        columns: the columns of the nodes that were asked for, by node.
        values: their batchless values, by node.
        metrics: every number that was reported; a key that two nodes report is prefixed by the node.
        seconds: how long each node took.
    """

    columns: Mapping[str, DataProto]
    values: Mapping[str, Mapping[str, Any]]
    metrics: Metrics
    seconds: Mapping[str, float]


@dataclass
class _Step:
    """A step under way.

    Args:
        batch: what it was opened with.
        waits: by node that has not started, how many instances it still waits for.
        outputs: what nodes left that is still read, or wanted in the end.
        readers: by node, how many of its readers are not done.
        lengths: of the rows of each batch axis.
        metrics, seconds: of the nodes that are done.
    """

    batch: DataProto
    waits: dict[str, int] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, Mapping[str, Held]] = field(default_factory=dict)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeInfo:
    """What is known of a node before it runs.

    Args:
        node: which.
        is_input: whether the batch stands for it.
        position: in the plan's order.
        slots: that it takes while it runs.
        inputs: of each port field, the node that writes it, and the output.
        columns: of its outputs, those that are columns.
        read, written: the row axis of what it reads and of what it writes; None where these are no columns.
        waits, frees: see `Schedule`.
        readers: how many nodes read what it writes.
    """

    node: Node
    is_input: bool
    position: int
    slots: frozenset[int]
    inputs: tuple[tuple[PortField, str, str], ...]
    columns: tuple[str, ...]
    read: str | None
    written: str | None
    waits: tuple[tuple[str, int], ...]
    frees: tuple[tuple[str, int], ...]
    readers: int

    @staticmethod
    def all(schedule: Schedule, runner: Runner) -> dict[str, NodeInfo]:
        """Every node of a schedule's plan: the inputs, then the others in the plan's order."""
        plan, graph = schedule.plan, schedule.plan.graph
        nodes = [*(graph[name] for name in graph.inputs), *plan.order]
        infos = {}
        for position, node in enumerate(nodes):
            outputs = node.operator.signature.outputs.items()
            infos[node.name] = NodeInfo(
                node,
                node.is_input,
                position,
                frozenset() if node.is_input else runner.slots(node),
                tuple((place, edge.node, edge.output) for place, edge in node.inputs.items()),
                tuple(name for name, wanted in outputs if isinstance(wanted, ColumnType)),
                *_row_axes(graph, node),
                schedule.waits[node.name],
                schedule.frees[node.name],
                plan.readers.get(node.name, 0),
            )
        return infos


class Flight:
    """Steps under way: their instances run in the schedule's order, as far as what they wait for allows.

    Args:
        infos: the nodes, by name.
        lag: see `Schedule`.
        runner: where they run.
        seed: root of the keys.
        steps: all steps of the run.
        state: the state cells of all operators.
        wanted: nodes whose outputs the results hold.
        on_node: called with the name of each node as it starts.
        during: see `Task`.
    """

    def __init__(
        self,
        infos: Mapping[str, NodeInfo],
        lag: int,
        runner: Runner,
        seed: int,
        steps: range,
        state: Mapping[str, Any],
        wanted: set[str],
        on_node: OnNode,
        during: str | None,
    ) -> None:
        self._infos, self._lag, self._runner, self._seed, self._all = infos, lag, runner, seed, steps
        self._wanted, self._on_node, self._during = wanted, on_node, during
        self._order = list(infos.values())
        self._count = sum(not info.is_input for info in self._order)
        self.state = dict(state)
        self._committed = dict(state)  # as it was when the last step was closed
        self._steps: dict[int, _Step] = {}
        self._ready: list[tuple[int, int]] = []  # a heap of (step, position)
        self._done: set[tuple[int, str]] = set()
        self._busy: set[int] = set()

    def __contains__(self, step: object) -> bool:
        return step in self._steps

    def open(self, step: int, batch: DataProto) -> None:
        """Take up a step with its batch, which has the columns of all inputs."""
        self._steps[step] = _Step(batch)
        self._begin(step)

    def restart(self) -> None:
        """Begin all open steps anew, from the state cells after the last one that was closed."""
        self.state = dict(self._committed)
        self._ready, self._busy = [], set()
        self._done = {instance for instance in self._done if instance[0] not in self._steps}
        for step, opened in self._steps.items():
            self._steps[step] = _Step(opened.batch)
        for step in self._steps:
            self._begin(step)

    def finish(self, step: int) -> StepResult:
        """Run until a step is done; what it left.

        Raises:
            NodeError: an instance failed, of this step or of one after it.
        """
        one = self._steps[step]
        while len(one.seconds) < self._count:
            self._launch()
            self._collect()
        return self._result(one)

    def close(self, step: int) -> None:
        """A step that is done will not be run again: from now on, others begin anew from after it."""
        del self._steps[step]
        self._done = {instance for instance in self._done if instance[0] >= step - self._lag}
        self._committed = dict(self.state)

    def _begin(self, step: int) -> None:
        """Put in the batch of a step, and see what its instances wait for."""
        one = self._steps[step]
        for name, info in self._infos.items():
            one.readers[name] = info.readers
            if not info.is_input:
                before = [(step - k, other) for other, k in info.waits if step - k in self._all]
                one.waits[name] = sum(instance not in self._done for instance in before)
                if not one.waits[name]:
                    heapq.heappush(self._ready, (step, info.position))
        for name, info in self._infos.items():
            if info.is_input:
                given = {column: one.batch.columns[column] for column in info.columns}
                one.outputs[name] = self._runner.put(info.node, given)
                if (lengths := lengths_of(given)) is not None and info.written is not None:
                    one.lengths[info.written] = lengths
                self._free(step, info)

    def _launch(self) -> None:
        """Start what is ready, as far as its slots are free; what comes first in the schedule's order goes first."""
        blocked = []
        while self._ready:
            step, position = entry = heapq.heappop(self._ready)
            info, one = self._order[position], self._steps[step]
            if info.slots & self._busy:
                blocked.append(entry)
                continue
            self._on_node(info.node.name)
            inputs = {place: one.outputs[node][output] for place, node, output in info.inputs}
            lengths = None if info.read is None else one.lengths.get(info.read)
            self._runner.launch(Task(info.node, step, self._seed, inputs, self.state, lengths, self._during))
            self._busy |= info.slots
        for entry in blocked:
            heapq.heappush(self._ready, entry)

    def _collect(self) -> None:
        """Wait, and enter what is done; in a frame of its own, so that nothing here holds on to it."""
        for done in self._runner.wait():
            self._accept(done)

    def _accept(self, done: Done) -> None:
        """Enter what an instance left, and let go of what nobody reads any more."""
        step, name = done.task.step, done.task.node.name
        assert step is not None
        info, one = self._infos[name], self._steps[step]
        one.metrics[name], one.seconds[name] = done.metrics, done.seconds
        if done.lengths is not None and info.written is not None:
            one.lengths[info.written] = done.lengths
        self.state |= done.state
        if info.readers or name in self._wanted:
            one.outputs[name] = done.outputs
        for source in info.node.sources:
            one.readers[source] -= 1
            if not one.readers[source] and source not in self._wanted:
                del one.outputs[source]
        self._busy -= info.slots
        self._free(step, info)

    def _free(self, step: int, info: NodeInfo) -> None:
        """An instance is done: those that waited for nothing else are ready."""
        self._done.add((step, info.node.name))
        for other, k in info.frees:
            if (one := self._steps.get(step + k)) is not None and other in one.waits:
                one.waits[other] -= 1
                if not one.waits[other]:
                    heapq.heappush(self._ready, (step + k, self._infos[other].position))

    def _result(self, one: _Step) -> StepResult:
        columns: dict[str, DataProto] = {}
        values: dict[str, dict[str, Any]] = {}
        for name in (name for name in self._infos if name in self._wanted):
            info, left = self._infos[name], one.outputs[name]
            fetched = {output: self._runner.fetch(info.node, output, left[output]) for output in info.columns}
            columns[name] = DataProto(fetched) if fetched else _EMPTY
            values[name] = {output: value for output, value in left.items() if output not in fetched}
        ordered = {name: one.metrics[name] for name in self._infos if name in one.metrics}
        return StepResult(columns, values, merge_metrics(ordered), one.seconds)


class Steps:
    """Runs the steps of a plan.

    Args:
        plan: what to run.
        runner: where.
        seed: root of the keys.
        weights: of the job, which forks share; when something is lost, all trained roles go back to what they were
            after the last step, and what was in flight is repeated with the same batches and keys. So no row is lost,
            and none is trained on twice.
    """

    def __init__(self, plan: Plan, runner: Runner, seed: int, weights: TrainedWeights) -> None:
        self.plan, self.runner, self.seed = plan, runner, seed
        self.timeline = Timeline()
        self.state: dict[str, Any] = {}
        self.during: str | None = None  # for messages, where its steps are none of a training
        self._weights = weights
        self._infos: dict[int, dict[str, NodeInfo]] = {}  # by lag

    def fork(self, plan: Plan, seed: int) -> Steps:
        """Another plan on the same engines, with keys and state cells of its own."""
        return Steps(plan, self.runner, seed, self._weights)

    def step(
        self, batch: DataProto, step: int, *, keep: Sequence[str] = (), on_node: OnNode = lambda name: None
    ) -> StepResult:
        """Run every node once.

        Args:
            batch: columns of the graph's inputs.
            step: the step's number, from which keys are derived.
            keep: nodes whose outputs the result holds, besides the sinks.
            on_node: called with the name of each node as it starts; again, where a step is repeated.

        Raises:
            NodeError: a node raised, or a process died; names node and step, with the error as its cause.
            GraphError: `batch` lacks a column of an input, or `keep` names a node that is not there.
        """
        [result] = self.run(lambda step: batch, range(step, step + 1), keep=keep, on_node=on_node)
        return result

    def run(
        self, draw: Draw, steps: range, *, lag: int = 0, keep: Sequence[str] = (), on_node: OnNode = lambda name: None
    ) -> Iterator[StepResult]:
        """Run these steps, and give the result of each, in order.

        Nothing starts while the caller holds a result, so with ``lag=0`` the engines stand still between two steps.

        Args:
            draw: gives the batch of a step, called once for each, in order.
            steps: their numbers.
            lag: see `Schedule`.
            keep, on_node: see `step`.

        Raises:
            NodeError, GraphError: see `step`; or the graph does not allow this lag.
        """
        wanted = {*map(self._known, keep), *self.plan.graph.sinks}
        if lag not in self._infos:
            schedule = Schedule(self.plan, lag)
            if lag:
                schedule.refuse_deadlock()
            self._infos[lag] = NodeInfo.all(schedule, self.runner)
        flight = Flight(self._infos[lag], lag, self.runner, self.seed, steps, self.state, wanted, on_node, self.during)
        for step in steps:
            self.runner.timeline = self.timeline
            for ahead in steps[steps.index(step) :][: lag + 1]:
                if ahead not in flight:
                    flight.open(ahead, self._complete(draw(ahead), lag))
            finish = functools.partial(self._finish, flight, step)
            result = self._weights.protect(finish, flight.restart) if self._weights.spare else finish()
            flight.close(step)
            self.state = flight.state
            yield result

    def _complete(self, batch: DataProto, lag: int) -> DataProto:
        """The batch, which has the columns of all inputs."""
        for name, info in self._infos[lag].items():
            wanted = info.columns if info.is_input else ()
            if missing := [column for column in wanted if column not in batch.columns]:
                raise GraphError(
                    f"the input {name!r} of {self.plan.graph.name} wants the columns {', '.join(wanted)}, and the "
                    f"batch lacks {', '.join(missing)}; pass a batch that has them, such as "
                    f"PromptData(...).load(...).next(n)."
                )
        return batch

    def _known(self, name: str) -> str:
        return self.plan.graph[name].name

    def _finish(self, flight: Flight, step: int) -> StepResult:
        if self.runner.needs_sync:
            self._weights.sync()
        result = flight.finish(step)
        if self._weights.spare and self.plan.graph.trained:
            self._weights.keep()
        return result

    # ---- between steps

    def sync(self, syncs: Sequence[Node] | None = None) -> None:
        """Carry weights to the engines that generate, before the first step and after a restore; or by `syncs` alone.

        Raises:
            NodeError: they did not arrive; with a `SyncError` as its cause.
        """
        self.runner.timeline = self.timeline
        self._weights.protect(lambda: self._weights.sync(syncs))
        if syncs is None:
            self._weights.keep()

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own.

        Raises:
            DataError: machines that would write there do not share the folder.
        """
        self._weights.protect(lambda: self._weights.save(folder))

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync.

        Raises:
            DataError: a role's folder is of another model or optimiser, or damaged.
        """
        self._weights.load(folder)
        self._weights.keep()

    def save_pretrained(self, role: str, folder: str | Path) -> None:
        """Write the weights of a role as a Hugging Face folder."""
        self._weights.protect(lambda: self.runner.save_pretrained(role, Path(folder)))

    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the engine that generates."""
        return self.runner.tokenizer(self.plan.graph.generators[0])


_EMPTY = DataProto({})


def _row_axes(graph: Graph, node: Node) -> tuple[str | None, str | None]:
    """The row axis of what a node reads, and of what it writes; None where these are no columns."""
    read = (graph.types[edge].axes for edge in node.inputs.values())
    written = (graph.types[Edge(node.name, output)].axes for output in node.operator.signature.outputs)
    first, second = (next((axes[0] for axes in side if axes), None) for side in (read, written))
    return first, second


def merge_metrics(reported: Mapping[str, Metrics]) -> Metrics:
    """All nodes' metrics; a key that two nodes report is prefixed by the node."""
    merged: dict[str, Metric] = {}
    times = Counter(key for metrics in reported.values() for key in metrics)
    for node, metrics in reported.items():
        for key, metric in metrics.items():
            merged[f"{node}/{key}" if times[key] > 1 else key] = metric
    return Metrics(merged)


def lengths_of(columns: Mapping[str, Any]) -> Lengths | None:
    """How long the rows of a node that writes tokens are; None of one that does not."""
    attended = columns.get("attention_mask", columns.get("prompt_mask"))
    if attended is None:
        return None
    response = columns.get("response_mask")
    return Lengths(_counted(attended), None if response is None else _counted(response))


def _counted(mask: Tensor) -> Counts:
    counted: Counts = mask.sum(-1).cpu().numpy()
    return counted
