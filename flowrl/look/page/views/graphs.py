"""The graph of a run for the page: its drawing, and what its nodes are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrl.core.graphs.graph import Graph, Node
from flowrl.draw import mermaid
from flowrl.draw.picture import Picture, format_value, picture
from flowrl.draw.svg import draw
from flowrl.spec import shown

PREFERRED = ("reward/mean", "/entropy", "kl/ref", "response_length/mean", "/vf_loss", "loss", "/mean", "/version", "")
"""Ends of the keys of a node's number on the drawing, the first that it has."""

_ROOM = ("0" * 22, "000 ms · 00 %")
_ROW_GAP = 15.0


def graph_view(graph: Graph, reporters: Mapping[str, str]) -> dict[str, Any]:
    """The drawing, with room in each box for two lines of numbers; nodes with parameters, and edges with columns.

    Args:
        reporters: the node that reports a metric, by its key.
    """
    drawn = picture(graph)
    colors = role_colors(drawn)
    boxes = tuple(replace(box, lines=_ROOM if box.shape != "input" else ("00000 rows",)) for box in drawn.boxes)
    arrows = tuple(replace(arrow, label="") if arrow.kind != "back" else arrow for arrow in drawn.arrows)
    roles = {box.name: box.role for box in drawn.boxes}
    return {
        "svg": draw(replace(drawn, boxes=boxes, arrows=arrows), row_gap=_ROW_GAP),
        "mermaid": mermaid.draw(graph),
        "nodes": [_node(node, roles[node.name], colors.get(node.name), reporters) for node in graph.nodes.values()],
        "edges": [
            {"from": arrow.source, "to": arrow.target, "label": arrow.label, "rows": _on_rows(graph, arrow.source)}
            for arrow in drawn.arrows
            if arrow.kind == "data"
        ],
    }


def _on_rows(graph: Graph, source: str) -> bool:
    """Whether a node writes columns with rows."""
    return any(typed.axes for edge, typed in graph.types.items() if edge.node == source)


def role_colors(drawn: Picture) -> dict[str, int]:
    """The number of each node's color, from 0; nodes without a role have none."""
    order = list(drawn.roles)
    return {box.name: order.index(box.role) % 6 for box in drawn.boxes if box.role}


def badge(keys: list[str]) -> str | None:
    """The key of the number that a node shows on the drawing."""
    return next((key for end in PREFERRED for key in keys if key.endswith(end)), None)


def _node(node: Node, role: str, color: int | None, reporters: Mapping[str, str]) -> dict[str, Any]:
    operator = node.initial_operator
    values = {} if node.is_input else shown(operator)
    return {
        "name": node.name,
        "operator": type(operator).__name__,
        "role": role,
        "color": color,
        "parameters": [[name, format_value(value)] for name, value in values.items() if name not in operator.role_uses],
        "metrics": [key for key, reporter in reporters.items() if reporter == node.name],
    }
