"""`Executor`, and the `LocalExecutor`, which walks a plan in one process.

There are no threads and there is no Ray: breakpoints work inside every operator.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.core.graph import Graph, Node
from flowrl.core.operator import Operator
from flowrl.core.plan import Plan
from flowrl.core.ports import PortField
from flowrl.core.session import Session
from flowrl.data.dataproto import DataProto
from flowrl.data.metrics import Metrics
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.errors import FlowrlError, GraphError, NodeError
from flowrl.records import Updated
from flowrl.run.timeline import Trace

Outputs = dict[str, tuple[DataProto, Mapping[str, Any]]]


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


class Executor(Protocol):
    """Walks a plan. Executors differ in where a node runs, never in what it computes."""

    plan: Plan
    trace: Trace

    @property
    def state(self) -> dict[str, Any]:
        """The state cells of the graph's operators."""
        ...

    def fork(self, plan: Plan, seed: int) -> Executor:
        """Another plan on the same engines, with keys and state cells of its own."""
        ...

    def tokenizer(self) -> ChatTokenizer:
        """The tokeniser of the engine that generates."""
        ...

    def sync(self) -> None:
        """Carry the trainers' weights to the engines that generate: before step 0, and after a restore."""
        ...

    def step(
        self, batch: DataProto, step: int, *, keep: tuple[str, ...] = (), on_node: Callable[[str], None] = ...
    ) -> StepResult:
        """Run every node once."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own."""
        ...

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync."""
        ...

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write the weights of a role as a Hugging Face folder."""
        ...


class LocalExecutor:
    """Runs steps of a plan, node after node, in this process.

    Args:
        plan: what to run.
        session: engines, keys and state.
    """

    def __init__(self, plan: Plan, session: Session) -> None:
        self.plan, self.session = plan, session
        self.trace = Trace()

    @property
    def state(self) -> dict[str, Any]:
        """The state cells of the graph's operators."""
        return self.session.state

    def fork(self, plan: Plan, seed: int) -> LocalExecutor:
        """Another plan on the same engines, with keys and state cells of its own."""
        return LocalExecutor(plan, Session(self.session.engines, seed))

    def tokenizer(self) -> ChatTokenizer:
        """The tokeniser of the engine that generates."""
        found: ChatTokenizer = self.session.engines[self.plan.graph.generators[0]].tokenizer
        return found

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own."""
        for role in self.plan.graph.trained:
            self.session.engines[role].save_checkpoint(str(folder / role))

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync.

        Raises:
            DataError: a role's folder is of another model or optimiser, or damaged.
        """
        for role in self.plan.graph.trained:
            self.session.engines[role].load_checkpoint(str(folder / role))
        self.sync()

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write the weights of a role as a Hugging Face folder."""
        self.session.engines[role].save_pretrained(folder)

    def sync(self) -> None:
        """Carry the trainers' weights to the engines that generate: before step 0, and after a restore.

        Raises:
            SyncError: they did not arrive.
        """
        with self.session.active():
            for node in self.plan.syncs:
                trainer = next(self.session.engine(role, node.name) for role in node.reads)
                node.operator.run(dict.fromkeys(node.inputs, Updated(trainer.version)))
        self.session.metrics = {}

    def step(
        self,
        batch: DataProto,
        step: int,
        *,
        keep: tuple[str, ...] = (),
        on_node: Callable[[str], None] = lambda name: None,
    ) -> StepResult:
        """Run every node once.

        Args:
            batch: columns of the graph's inputs.
            step: the step's number, from which keys are derived.
            keep: nodes whose outputs the result holds, besides the sinks.
            on_node: called with the name of each node as it starts.

        Raises:
            NodeError: a node raised; names node, step and the shapes that it was given, with the error as its cause.
            GraphError: `batch` lacks a column of an input, or `keep` names a node that is not there.
        """
        for name in keep:
            self.plan.graph[name]
        self.session.begin_step(step)
        outputs = self._feed(batch)
        wanted = {*keep, *self.plan.graph.sinks}
        seconds: dict[str, float] = {}
        with self.session.active():
            for node in self.plan.order:
                on_node(node.name)
                with self.trace.span(node.name, "this process"):
                    outputs[node.name] = self._run(node, outputs, step)
                seconds[node.name] = self.trace.spans[-1].seconds
                for source in node.sources:  # what nobody reads any more is let go
                    if self.plan.last_reader[source] == node.name and source not in wanted:
                        del outputs[source]
        return StepResult(
            {name: outputs[name][0] for name in outputs if name in wanted},
            {name: outputs[name][1] for name in outputs if name in wanted},
            merge_metrics(self.session.metrics),
            seconds,
        )

    def _feed(self, batch: DataProto) -> Outputs:
        outputs: Outputs = {}
        for name in self.plan.graph.inputs:
            outputs[name] = (batch.select(*columns_of_input(self.plan.graph, name, batch)), {})
        return outputs

    def _run(self, node: Node, outputs: Outputs, step: int) -> tuple[DataProto, Mapping[str, Any]]:
        inputs: dict[PortField, Any] = {}
        for field, edge in node.inputs.items():
            columns, values = outputs[edge.node]
            inputs[field] = columns[edge.output] if edge.output in columns else values[edge.output]
        try:
            written = node.operator.signature.unpack(node.operator.run(inputs))
        except Exception as error:
            raise NodeError(failure(node.operator, f"in step {step}", error, inputs)) from error
        types = node.operator.signature.outputs
        batched = {name: value for name, value in written.items() if isinstance(types[name], ColumnType)}
        return DataProto(batched), {name: value for name, value in written.items() if name not in batched}


def columns_of_input(graph: Graph, name: str, batch: DataProto) -> dict[str, ColumnType]:
    """The columns of an input of a graph, all of which `batch` has.

    Raises:
        GraphError: it lacks some.
    """
    outputs = graph[name].operator.signature.outputs
    columns = {column: wanted for column, wanted in outputs.items() if isinstance(wanted, ColumnType)}
    if missing := [column for column in columns if column not in batch]:
        raise GraphError(
            f"the input {name!r} of {graph.name} wants the columns {', '.join(columns)}, and the batch lacks "
            f"{', '.join(missing)}; pass a batch that has them, such as PromptData(...).load(...).next(n)."
        )
    return columns


def merge_metrics(reported: Mapping[str, Metrics]) -> Metrics:
    """All nodes' metrics; a key that two nodes report is prefixed by the node."""
    merged: dict[str, Any] = {}
    keys = [key for metrics in reported.values() for key in metrics]
    for node, metrics in reported.items():
        for key, metric in metrics.items():
            merged[f"{node}/{key}" if keys.count(key) > 1 else key] = metric
    return Metrics(merged)


def failure(operator: Operator, when: str, error: Exception, inputs: Mapping[PortField, Any]) -> str:
    """The message of a `NodeError`: what an operator raised, where in its own file, and on what."""
    call = getattr(type(operator).__call__, "__wrapped__", None)
    own = [f for f in traceback.extract_tb(error.__traceback__) if call and f.filename == call.__code__.co_filename]
    # what flowrl itself raises says where to look
    where = f"\n  at {own[-1].filename}:{own[-1].lineno}" if own and not isinstance(error, FlowrlError) else ""
    return (
        f"{operator.name} failed {when}: {type(error).__name__}: {error}{where}\n"
        f"  it is {operator!r}\n"
        f"  it was given {shapes(inputs)}"
    )


def shapes(inputs: Mapping[PortField, Any]) -> str:
    def shape(value: Any) -> str:
        if isinstance(value, Tensor | np.ndarray):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value)

    return ", ".join(f"{field}: {shape(value)}" for field, value in inputs.items())
