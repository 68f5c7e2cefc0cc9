"""How an edit inserts gates, and which columns pass existing ones.

A gate filters one row axis. Upstream of it are its anchor, the sources of its `predicate`, and their ancestors; every
edge from these to another node goes through the gate. `Graph.build` removes the columns that no node reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar, cast

from flowrl.columns import ColumnType
from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.plan import gates_of
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.edits.wiring import wire_by_type
from flowrl.errors import GraphError

GraphT = TypeVar("GraphT", bound=Graph)


def expose_columns(graph: GraphT) -> GraphT:
    """A graph whose gates pass all columns that they can, so that an edit can wire new readers to them."""
    gates, nodes = gates_of(graph), dict(graph.nodes)
    for name in gates:
        node, gate = nodes[name], cast(Gate, nodes[name].operator)
        rows, before = _rows_axis(graph, node), graph.ancestors(name)
        columns, inputs = dict(gate.columns), dict(node.inputs)
        through = {edge for field, edge in inputs.items() if field.port == ROWS}
        for source in reversed(
            [other for other in graph.nodes if other in before]
        ):  # the nearest source gets the short name
            for output, type in nodes[source].signature.outputs.items():
                edge = Edge(source, output)
                if edge in through or not isinstance(type, ColumnType) or _axis(graph, edge) not in (rows, None):
                    continue
                free = output if output not in columns else str(edge)
                columns[free], inputs[PortField(ROWS, free)] = type.name, edge
        nodes[name] = replace(node, operator=gate.passing(columns), inputs=inputs)
    return replace(graph, nodes=MappingProxyType(nodes)) if gates else graph


def _axis(graph: Graph, edge: Edge) -> str | None:
    """The row axis of an output; None for an output of an earlier gate that had no reader."""
    return graph.types[edge].axes[0] if edge in graph.types else None


def _rows_axis(graph: Graph, gate: Node) -> str:
    """The row axis that a gate filters."""
    axes = (graph.types[edge].axes for edge in gate.inputs.values())
    return next(found[0] for found in axes if found)


def insert_gate(graph: GraphT, name: str, gate: Gate, anchor: str, by_hand: Mapping[PortField, Edge]) -> GraphT:
    """`graph` with the gate `name` after `anchor`; `by_hand` are edges of the ports of its `predicate`."""
    rows = next((graph.types[Edge(anchor, o)].axes[:1] for o in graph[anchor].signature.outputs), ())
    if not rows:
        raise GraphError(
            f"{name} is inserted after {anchor}, which writes no rows. Insert it after a node that does: "
            f"After('reward', ...).",
            code="gate.no-rows",
            node=name,
            anchor=anchor,
        )
    here = {edge: typed for edge, typed in graph.types.items() if typed.axes[:1] == rows}
    near, line = {anchor}, graph.ancestors(anchor)
    others = set(graph.nodes) - near - line - graph.descendants(anchor)
    pools = [{edge: typed for edge, typed in here.items() if edge.node in pool} for pool in (near, line, others)]
    bare = gate.passing({}).named(name)
    reads = {**wire_by_type(name, bare, {}, pools, graph.types, by_hand), **by_hand}
    before = {anchor, *line}
    for edge in reads.values():
        before |= {edge.node, *graph.ancestors(edge.node)}
    through: dict[Edge, str] = {}
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        inputs = {}
        for field, edge in node.inputs.items():
            if node.name not in before and edge.node in before and edge in here:
                through[edge] = str(edge)
                edge = Edge(name, through[edge])
            inputs[field] = edge
        nodes[node.name] = replace(node, inputs=inputs)
    if not through:
        raise GraphError(
            f"{name} is inserted after {anchor}, but nothing downstream of {anchor} reads its rows. Insert it earlier.",
            code="gate.no-reader",
            node=name,
            anchor=anchor,
        )
    columns = {output: _named(graph, edge) for edge, output in through.items()}
    passes = {PortField(ROWS, output): edge for edge, output in through.items()}
    last = max(list(nodes).index(edge.node) for edge in (*reads.values(), *through))
    order = list(nodes.items())
    order.insert(last + 1, (name, Node(name, bare.passing(columns), {**reads, **passes})))
    return graph.build(graph.name, dict(order), graph.sinks, graph.lag)


def _named(graph: Graph, edge: Edge) -> str:
    type = graph.types[edge].type
    assert isinstance(type, ColumnType)
    return type.name


def anchor_of(name: str, anchor: str, inserted: Mapping[str, str], rewriting: Sequence[str], new_name: str) -> str:
    """The node of the changed graph that a gate comes after: its anchor, or the last node inserted there before it.

    `inserted` has the anchors of all inserted nodes, in order; `rewriting` are the inserted gates, and the inserted
    nodes that rewrite columns of their anchor. `new_name` is the anchor's name in the changed graph.
    """
    order = list(inserted)
    between = [other for other in order[: order.index(name)] if inserted[other] == anchor and other in rewriting]
    return between[-1] if between else new_name
