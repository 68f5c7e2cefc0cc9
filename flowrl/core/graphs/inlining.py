"""`inline`: the nodes of a graph, called on the columns of another graph or on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.core.graphs.graph import Graph
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge, prefix
from flowrl.errors import GraphError


def inline(graph: Graph, records: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call every node of a graph, in order, in place of its inputs on these records.

    While another graph is recorded, its nodes become nodes of that graph; on tensors they compute.

    Args:
        records: of the inputs, in their order.
        named: of further inputs, by name.

    Returns:
        What the sinks return: one value, or a tuple of several.

    Raises:
        GraphError: an input lacks its record, or columns that the graph reads; or the graph has a lag.
    """
    given = _by_input(graph, records, named)
    if graph.lag.versions:
        raise GraphError(
            f"{graph.name} has lag={graph.lag}, which is of a whole graph, so it cannot join another one. Nest it with "
            f"edit(lag=0), and set the lag of the outer graph.",
            code="lag.unsupported",
            graph=graph.name,
            lag=graph.lag,
        )
    values: dict[Edge, Any] = {}
    results: dict[str, Any] = {}
    for node in graph.nodes.values():
        if node.is_input:
            for output in node.signature.outputs:
                if hasattr(given[node.name], output):
                    values[Edge(node.name, output)] = getattr(given[node.name], output)
            continue
        inputs = {place: _read(graph, node.name, place, edge, values) for place, edge in node.inputs.items()}
        result = results[node.name] = node.operator.named(f"{prefix()}{node.name}").on(inputs)
        single = node.signature.output_record is None
        for output in node.signature.outputs:
            values[Edge(node.name, output)] = result if single else getattr(result, output)
    found = [results[sink] for sink in graph.sinks]
    return found[0] if len(found) == 1 else tuple(found)


def _by_input(graph: Graph, records: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The record of each input."""
    given = dict(zip(graph.inputs, records, strict=False)) | dict(named)
    if len(records) > len(graph.inputs) or given.keys() != graph.inputs.keys():
        raise GraphError(
            f"{graph.name}(...) got {len(records) + len(named)} records, and has the inputs "
            f"{', '.join(graph.inputs)}. Pass one record for each: {graph.name}({', '.join(graph.inputs)}, ...).",
            code="algorithm.bad-call",
            algorithm=graph.name,
            expected=list(graph.inputs),
        )
    return given


def _read(graph: Graph, node: str, place: PortField, edge: Edge, values: Mapping[Edge, Any]) -> Any:
    if edge not in values:
        raise GraphError(
            f"{graph.name}(...) got no {edge.output} as {edge.node}, which {node}.{place} reads. Pass a record with "
            f"this column.",
            code="algorithm.bad-call",
            algorithm=graph.name,
            node=node,
            missing=str(edge),
        )
    return values[edge]
