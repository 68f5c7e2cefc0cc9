"""`Flight`: the steps of a run that are under way: which instances are ready, and what those that are done left."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.columns import ColumnType
from flowrl.core.graph import Graph
from flowrl.core.symbols import Edge
from flowrl.data.dataproto import DataProto
from flowrl.data.metrics import Metric, Metrics
from flowrl.errors import GraphError
from flowrl.run.runner import Done, Held, Lengths, Runner, Task
from flowrl.run.schedule import Instance, Schedule


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


class Flight:
    """Instances of steps that are under way, run in the schedule's order as far as what they wait for allows.

    Args:
        schedule: what an instance waits for.
        runner: where it runs.
        seed: root of the keys.
        steps: all steps of the run.
        state: the state cells of all operators.
        wanted: nodes whose outputs the results hold.
        on_node: called with the name of each node as it starts.
    """

    def __init__(
        self,
        schedule: Schedule,
        runner: Runner,
        seed: int,
        steps: range,
        state: Mapping[str, Any],
        wanted: set[str],
        on_node: Callable[[str], None],
    ) -> None:
        self._schedule, self._runner, self._seed, self._all = schedule, runner, seed, steps
        self._wanted, self._on_node = wanted, on_node
        self._plan, self._graph = schedule.plan, schedule.plan.graph
        self._position = {node.name: position for position, node in enumerate(self._plan.order)}
        self._slots = {node.name: runner.slots(node) for node in self._plan.order}
        self._rows = {name: rows_axes(self._graph, name) for name in self._graph.nodes}
        self.state = dict(state)
        self._committed = self.state  # as it was when the last step was finished
        self._steps: dict[int, _Step] = {}
        self._ready: list[tuple[int, int]] = []  # a heap of (step, position)
        self._done: set[Instance] = set()
        self._busy: set[int] = set()

    def __contains__(self, step: object) -> bool:
        return step in self._steps

    def open(self, step: int, batch: DataProto) -> None:
        """Take up a step with its batch.

        Raises:
            GraphError: `batch` lacks a column of an input.
        """
        self._steps[step] = _Step(batch)
        self._begin(step)

    def restart(self) -> None:
        """Begin all open steps anew, from the state cells after the last one that was finished."""
        self.state = dict(self._committed)
        self._ready, self._busy = [], set()
        self._done = {one for one in self._done if one.step not in self._steps}
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
        while len(one.seconds) < len(self._plan.order):
            self._launch()
            self._collect()
        return self._result(one)

    def close(self, step: int) -> None:
        """A step that is done will not be run again: from now on, others begin anew from after it."""
        del self._steps[step]
        self._done = {instance for instance in self._done if instance.step >= step - self._schedule.lag}
        self._committed = dict(self.state)

    def _begin(self, step: int) -> None:
        """Put in the batch of a step, and see what its instances wait for."""
        one = self._steps[step]
        one.readers = dict(self._plan.readers)
        for node in self._plan.order:
            before = self._schedule.before(Instance(step, node.name), self._all)
            one.waits[node.name] = sum(instance not in self._done for instance in before)
            if not one.waits[node.name]:
                heapq.heappush(self._ready, (step, self._position[node.name]))
        for name in self._graph.inputs:
            columns = columns_of_input(self._graph, name)
            if missing := [column for column in columns if column not in one.batch]:
                raise GraphError(
                    f"the input {name!r} of {self._graph.name} wants the columns {', '.join(columns)}, and the batch "
                    f"lacks {', '.join(missing)}; pass a batch that has them, such as "
                    f"PromptData(...).load(...).next(n)."
                )
            given = {column: one.batch[column] for column in columns}
            one.outputs[name] = self._runner.put(self._graph[name], given)
            self._free(Instance(step, name))

    def _launch(self) -> None:
        """Start what is ready, as far as its slots are free; what comes first in the schedule's order goes first."""
        blocked = []
        while self._ready:
            step, position = entry = heapq.heappop(self._ready)
            node, one = self._plan.order[position], self._steps[step]
            slots = self._slots[node.name]
            if slots & self._busy:
                blocked.append(entry)
                continue
            self._on_node(node.name)
            inputs = {place: one.outputs[edge.node][edge.output] for place, edge in node.inputs.items()}
            read, _ = self._rows[node.name]
            lengths = one.lengths.get(read) if read is not None else None
            self._runner.launch(Task(node, step, self._seed, inputs, self.state, lengths))
            self._busy |= slots
        for entry in blocked:
            heapq.heappush(self._ready, entry)

    def _collect(self) -> None:
        """Wait, and enter what is done; in a frame of its own, so that nothing here holds on to it."""
        for done in self._runner.wait():
            self._accept(done)

    def _accept(self, done: Done) -> None:
        """Enter what an instance left, and let go of what nobody reads any more."""
        node, step = done.task.node, done.task.step
        assert step is not None
        one = self._steps[step]
        one.metrics[node.name], one.seconds[node.name] = done.metrics, done.seconds
        _, written = self._rows[node.name]
        if done.lengths is not None and written is not None:
            one.lengths[written] = done.lengths
        self.state |= done.state
        if one.readers.get(node.name) or node.name in self._wanted:
            one.outputs[node.name] = done.outputs
        for source in node.sources:
            one.readers[source] -= 1
            if not one.readers[source] and source not in self._wanted:
                del one.outputs[source]
        self._busy -= self._slots[node.name]
        self._free(Instance(step, node.name))

    def _free(self, instance: Instance) -> None:
        """An instance is done: those that waited for nothing else are ready."""
        self._done.add(instance)
        for other, offset in self._schedule.frees[instance.node]:
            step = instance.step + offset
            if step in self._steps and other in self._position:
                waits = self._steps[step].waits
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(self._ready, (step, self._position[other]))

    def _result(self, one: _Step) -> StepResult:
        columns: dict[str, DataProto] = {}
        values: dict[str, dict[str, Any]] = {}
        for name in (name for name in self._graph.nodes if name in self._wanted):
            node, left = self._graph[name], one.outputs[name]
            types = node.operator.signature.outputs
            held = {output: held for output, held in left.items() if isinstance(types[output], ColumnType)}
            columns[name] = DataProto({output: self._runner.fetch(node, output, held[output]) for output in held})
            values[name] = {output: value for output, value in left.items() if output not in held}
        ordered = {node.name: one.metrics[node.name] for node in self._plan.order}
        return StepResult(columns, values, merge_metrics(ordered), one.seconds)


def columns_of_input(graph: Graph, name: str) -> dict[str, ColumnType]:
    """The columns of an input of a graph."""
    outputs = graph[name].operator.signature.outputs
    return {column: wanted for column, wanted in outputs.items() if isinstance(wanted, ColumnType)}


def rows_axes(graph: Graph, name: str) -> tuple[str | None, str | None]:
    """The row axis of what a node reads, and of what it writes; None where these are no columns."""
    node = graph[name]
    read = (graph.types[edge].axes[:1] for edge in node.inputs.values())
    written = (graph.types[Edge(name, output)].axes[:1] for output in node.operator.signature.outputs)
    first = (next((axes[0] for axes in side if axes), None) for side in (read, written))
    return next(first), next(first)


def merge_metrics(reported: Mapping[str, Metrics]) -> Metrics:
    """All nodes' metrics; a key that two nodes report is prefixed by the node."""
    merged: dict[str, Metric] = {}
    times = Counter(key for metrics in reported.values() for key in metrics)
    for node, metrics in reported.items():
        for key, metric in metrics.items():
            merged[f"{node}/{key}" if times[key] > 1 else key] = metric
    return Metrics(merged)
