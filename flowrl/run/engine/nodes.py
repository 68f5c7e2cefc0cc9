"""Static information on the nodes of a plan, and the lengths of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.core.operators.when import When
from flowrl.run.engine.execution_graph import ExecutionGraph
from flowrl.run.engine.runner import Counts, Lengths, Runner
from flowrl.spec import schedules


@dataclass(frozen=True)
class NodeInfo:
    """Static information on a node.

    Args:
        is_input: whether the batch provides its outputs.
        slots: that it occupies while it runs.
        inputs: by port field, the node that writes it, and the output.
        read, written: the row axes of its inputs and of its outputs; None if there are no columns.
        lag: by how many versions generation may be ahead of what it trains.
        skipped_by: the gates with which it is skipped.
        masks: by column that it writes, the masks on the same rows and tokens, in the graph's order.
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
    changes: bool
    lag: int
    skipped_by: frozenset[str]
    masks: Mapping[str, tuple[Edge, ...]]

    def runs(self, step: int) -> bool:
        """Whether it runs in a step; otherwise it keeps its place in the order and has no outputs."""
        return all(when.runs(step) for when in self.whens)

    @staticmethod
    def all(instances: ExecutionGraph, runner: Runner) -> dict[str, NodeInfo]:
        """Every node of the graph: the inputs, then the others in the plan's order."""
        plan, graph = instances.plan, instances.plan.graph
        nodes = [*(graph[name] for name in graph.inputs), *plan.order]
        infos = {}
        for position, node in enumerate(nodes):
            outputs = node.signature.outputs.items()
            infos[node.name] = NodeInfo(
                node,
                node.is_input,
                position,
                frozenset() if node.is_input else runner.slots(node),
                tuple((place, edge.node, edge.output) for place, edge in node.inputs.items()),
                tuple(name for name, typed in outputs if isinstance(typed, ColumnType)),
                *_row_axes(graph, node),
                instances.waits[node.name],
                instances.frees[node.name],
                plan.readers.get(node.name, 0),
                graph.whens(node.name),
                bool(schedules(node.operator)),
                _ahead(graph, node, instances.lag),
                instances.skipped_by[node.name],
                _masks(graph, node),
            )
        return infos


@dataclass(frozen=True)
class Region:
    """The nodes of a plan that run in rounds.

    Args:
        collector: the gate that decides whether there is another round; None if nothing runs in rounds.
        makers: by output of the collector, the node that generated the responses; columns of one are equally wide.
    """

    collector: str | None
    nodes: frozenset[str]
    makers: Mapping[str, str]

    @staticmethod
    def of(plan: Plan) -> Region:
        """The region of a plan."""
        makers: dict[str, str] = {}
        for edge, typed in plan.graph.types.items() if plan.collector is not None else ():
            if edge.node == plan.collector and isinstance(typed.type, ColumnType):
                made = (i.partition("@") for i in typed.axes)
                makers[edge.output] = next((by for axis, _, by in made if axis in ("response", "sequence")), "")
        return Region(plan.collector, plan.region, makers)


def _ahead(graph: Graph, node: Node, lag: int) -> int:
    """By how many versions generation may be ahead of the weights that a node trains; a version is one update."""
    trained = set(node.writes) & set(graph.trained)
    writers = [use.mode == "writes" for role in trained for use in graph.roles()[role]]
    return lag * sum(writers)


def ahead_of(infos: Mapping[str, NodeInfo], region: Region) -> frozenset[str]:
    """The nodes whose outputs depend on weights that may change before the outputs are used: the readers of synced
    roles, and of those that run in rounds, the collector."""
    synced = {role for info in infos.values() if info.node.is_sync for role in info.node.writes}
    found = {name for name, info in infos.items() if synced & set(info.node.reads)}
    if region.collector is None or not found & region.nodes:
        return frozenset(found)
    return frozenset({*(found - region.nodes), region.collector})


def _row_axes(graph: Graph, node: Node) -> tuple[str | None, str | None]:
    """The row axes of a node's inputs and of its outputs; None if there are no columns."""
    fields = node.signature.fields
    on_batch = (edge for field, edge in node.inputs.items() if getattr(fields[field], "on_batch", False))
    read = (graph.types[edge].axes for edge in on_batch)
    written = (graph.types[Edge(node.name, output)].axes for output in node.signature.outputs)
    first, second = (next((axes[0] for axes in side if axes), None) for side in (read, written))
    return first, second


def _masks(graph: Graph, node: Node) -> dict[str, tuple[Edge, ...]]:
    """By column that a node writes, the masks with the same rows and tokens."""
    types = graph.types
    masks = {edge: typed.axes for edge, typed in types.items() if getattr(typed.type, "kind", "") == "mask"}
    axes = {name: types[Edge(node.name, name)].axes for name in node.signature.outputs}
    return {name: tuple(mask for mask, own in masks.items() if own == axes[name][:2]) for name in axes}


def lengths_of(columns: Mapping[str, Any]) -> Lengths | None:
    """The row lengths of a node that writes tokens; None of others."""
    attended = columns.get("attention_mask", columns.get("prompt_mask"))
    if attended is None:
        return None
    response = columns.get("response_mask")
    return Lengths(_count(attended), None if response is None else _count(response))


def _count(mask: Tensor) -> Counts:
    counts: Counts = mask.sum(-1).cpu().numpy()
    return counts


def joined_lengths(parts: Sequence[Lengths]) -> Lengths:
    """The concatenated lengths of several rounds."""
    responses = [part.response for part in parts if part.response is not None]
    joined = np.concatenate(responses) if len(responses) == len(parts) else None
    return Lengths(np.concatenate([part.tokens for part in parts]), joined)
