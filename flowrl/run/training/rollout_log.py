"""The rollout log: prompt, response and score of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import trained_on
from flowrl.core.operators.symbols import Edge
from flowrl.data.proto.dataproto import DataProto
from flowrl.protocols.protocols import Trainer
from flowrl.rules.rule import writers

_COLUMNS = {
    "row_id": "row_id",
    "uid": "uid",
    "prompt": "raw_prompt",
    "response": "response_text",
    "ground_truth": "ground_truth",
    "episode": "episode",
}
"""The keys of a record and their columns; a custom source need not have all of them."""


def logged_columns(graph: Graph) -> dict[str, Edge]:
    """The logged columns by key; empty for a graph without responses.

    If several nodes write responses, it takes the trained ones; in a graph that trains none, those with the last score.
    """
    scores = [edge for edge, typed in graph.types.items() if getattr(typed.type, "kind", "") == "score"]
    answered = [edge for edge in graph.types if edge.output == "response_text" and not graph[edge.node].is_input]
    if not answered:
        return {}
    of_score = graph.types[scores[-1]].axes[1:] if scores else ()
    trained = {other.name for node, _ in writers(graph, Trainer) for other in trained_on(graph, node.name)}
    scored = [edge for edge in answered if f"response@{edge.node}" in of_score]
    answer = [*(edge for edge in answered if edge.node in trained), *scored, *answered][0]
    rows = graph.types[answer].axes[0]
    of_rows = [edge for edge, typed in graph.types.items() if typed.axes[:1] == (rows,)]
    of_its_own = [edge for edge in of_rows if edge.node == answer.node]
    found = {edge.output: edge for edge in (*of_rows, *of_its_own)}
    logged = {key: found[name] for key, name in _COLUMNS.items() if name in found}
    on_rows = [edge for edge in scores if graph.types[edge].axes[0] == rows]
    if on_rows:
        of_answer = [edge for edge in on_rows if f"response@{answer.node}" in graph.types[edge].axes]
        logged["score"] = (of_answer or on_rows)[-1]
    return logged


def rollout_records(edges: Mapping[str, Edge], columns: Mapping[str, DataProto]) -> list[dict[str, Any]]:
    """One record per row, of the edges from `logged_columns`. Nodes that did not run in this step have no columns."""
    found: dict[str, Any] = {
        key: columns[edge.node].columns[edge.output] for key, edge in edges.items() if edge.node in columns
    }
    if "response" not in found:
        return []
    if "score" in found:
        found["score"] = found["score"].sum(-1).tolist()
    return [{key: column[row] for key, column in found.items()} for row in range(len(found["response"]))]
