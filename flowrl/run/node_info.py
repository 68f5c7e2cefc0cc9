"""`NodeInfo`: what is known of a node before it runs, so that a step asks nothing twice."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.columns import ColumnType
from flowrl.core.graph import Graph, Node
from flowrl.core.ports import PortField
from flowrl.core.symbols import Edge
from flowrl.core.when import When
from flowrl.run.runner import Runner
from flowrl.run.schedule import Schedule


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
        whens: what says in which steps it runs.
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
    whens: tuple[When, ...]

    def runs(self, step: int) -> bool:
        """Whether it runs in a step. Otherwise it only takes its place in the order, and leaves nothing."""
        return all(when.runs(step) for when in self.whens)

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
                graph.whens(node.name),
            )
        return infos


def _row_axes(graph: Graph, node: Node) -> tuple[str | None, str | None]:
    """The row axis of what a node reads, and of what it writes; None where these are no columns."""
    read = (graph.types[edge].axes for edge in node.inputs.values())
    written = (graph.types[Edge(node.name, output)].axes for output in node.operator.signature.outputs)
    first, second = (next((axes[0] for axes in side if axes), None) for side in (read, written))
    return first, second
