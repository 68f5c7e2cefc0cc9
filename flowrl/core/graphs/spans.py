"""The graph that runs if a `Lag` has spans.

In it every sync swaps weights while requests are in flight, and a node that reads `policy_version` and has an optional
port `token_version` reads the version of each token, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar, cast

from flowrl.columns import ColumnType
from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lag import SupportsLiveSync
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge

GraphT = TypeVar("GraphT", bound=Graph)


def swaps(graph: Graph) -> list[str]:
    """The nodes of a graph that swap weights while requests are in flight."""
    return [
        node.name for node in graph.nodes.values() if graph.lag.spans and isinstance(node.operator, SupportsLiveSync)
    ]


def spanned(graph: GraphT) -> GraphT:
    """The graph that runs; `graph` itself if its lag has no spans."""
    if not graph.lag.spans:
        return graph
    nodes = dict(graph.nodes)
    for name in swaps(graph):
        operator = cast(SupportsLiveSync, nodes[name].operator).swapping(graph.lag.caches)
        nodes[name] = replace(nodes[name], operator=operator)
    for name, node in graph.nodes.items():
        rows = [edge for field, edge in node.inputs.items() if _column(node, field) == "policy_version"]
        for field in _open(node) if rows else ():
            if (edge := _of_tokens(nodes, rows[0])) is not None:
                nodes[name] = replace(nodes[name], inputs={**nodes[name].inputs, field: edge})
    return graph.build(graph.name, nodes, graph.sinks, graph.lag, graph.bindings, graph.allow)


def _column(node: Node, field: PortField) -> str | None:
    """The name of the column that a field reads; None for a value."""
    type = node.operator.signature.fields[field]
    return type.name if isinstance(type, ColumnType) else None


def _open(node: Node) -> Iterator[PortField]:
    """The unwired fields of optional ports that read `token_version`."""
    for port in node.operator.signature.ports.values():
        if port.optional:
            yield from (f for f in port.fields if f not in node.inputs and _column(node, f) == "token_version")


def _of_tokens(nodes: dict[str, Node], row: Edge) -> Edge | None:
    """The `token_version` of the `policy_version` at `row`, routed through the gates in between."""
    node = nodes[row.node]
    if not isinstance(gate := node.operator, Gate):
        return Edge(row.node, "token_version") if "token_version" in gate.signature.outputs else None
    if (before := _of_tokens(nodes, node.inputs[PortField(ROWS, row.output)])) is None:
        return None
    passed = {edge: field.name for field, edge in node.inputs.items() if field.port == ROWS}
    if before not in passed:
        name = passed[before] = str(before) if "token_version" in gate.columns else "token_version"
        operator = gate.passing({**gate.columns, name: "token_version"})
        inputs = {**node.inputs, PortField(ROWS, name): before}
        nodes[row.node] = replace(node, operator=operator, inputs=inputs)
    return Edge(row.node, passed[before])
