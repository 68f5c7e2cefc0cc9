"""Graphs as Mermaid text, made offline.

Nodes are grouped by the role whose weights they use; those that write weights are hexagons; inputs are rounded. Edges
bear the record or the columns that they carry. A thin grey edge says "reads the weights before they are written"; the
dotted one is the back-edge across steps, with its lag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx

from flowrl.graph import Graph, Input, Node
from flowrl.plan import StateEdge, state_edges

if TYPE_CHECKING:
    from flowrl.diff import Diff

_CLASSES = {
    "added": "fill:#d7f5dd,stroke:#1a7f37,color:#0b3d1a",
    "removed": "fill:#ffe1e1,stroke:#cf222e,color:#5c0f14,stroke-dasharray:5 3",
    "changed": "fill:#fff3c4,stroke:#9a6700,color:#4d3300",
}
_THIN = "stroke:#9aa0a6,stroke-width:1px"
_RESERVED = {"end", "graph", "subgraph", "class", "classdef", "click", "style", "default", "flowchart", "direction"}


def draw(graph: Graph) -> str:
    """`graph` as a Mermaid flowchart."""
    return _Drawing([graph]).text()


def draw_diff(diff: Diff) -> str:
    """Both graphs of `diff` in one flowchart: nodes classed ``added``, ``removed`` or ``changed``."""
    marks = dict.fromkeys(diff.added, "added") | dict.fromkeys((*diff.removed, *diff.pruned), "removed")
    marks |= dict.fromkeys(diff.changed, "changed")
    return _Drawing([diff.after, diff.before], marks).text()


class _Drawing:
    """One flowchart of one graph, or of two of which the first wins where both have a node or an edge."""

    def __init__(self, graphs: list[Graph], marks: dict[str, str] | None = None) -> None:
        self.graphs, self.marks = graphs, marks or {}
        self.nodes: dict[str, Node] = {}
        for graph in graphs:
            self.nodes = {**graph.nodes, **self.nodes}

    def text(self) -> str:
        lines = ["flowchart TD"]
        groups: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            groups.setdefault(_role(node), []).append(node)
        for role, nodes in groups.items():
            if not role:
                lines += [f"    {_box(node)}" for node in nodes]
                continue
            lines.append(f'    subgraph role_{role}["{_title(self.graphs[0], role)}"]')
            lines += [f"        {_box(node)}" for node in nodes]
            lines.append("    end")
        links: list[str] = []
        styles: list[str] = []
        drawn: set[tuple[str, str]] = set()
        for position, graph in enumerate(self.graphs):
            for node in graph.nodes.values():
                for source in node.sources:
                    if (source, node.name) not in drawn:
                        drawn.add((source, node.name))
                        if position:
                            styles.append(f"    linkStyle {len(links)} stroke:#cf222e,stroke-dasharray:5 3")
                        links.append(f'    {_id(source)} -->|"{_label(graph, source, node)}"| {_id(node.name)}')
        for edge in _bare_state_edges(self.graphs[0]):
            styles.append(f"    linkStyle {len(links)} {_THIN}")
            links.append(f'    {_id(edge.before)} -->|"reads {edge.role} first"| {_id(edge.after)}')
        lag = self.graphs[0].lag
        for sync, generate in self.graphs[0].back_edges:
            label = f"lag {lag}" + (" (on-policy)" if lag == 0 else "")
            links.append(f'    {_id(sync)} -. "{label}" .-> {_id(generate)}')
        lines += links + styles
        for mark, style in _CLASSES.items():
            if members := [_id(name) for name, m in self.marks.items() if m == mark]:
                lines += [f"    classDef {mark} {style}", f"    class {','.join(members)} {mark}"]
        return "\n".join(lines)


def _role(node: Node) -> str:
    """The role a node is drawn with: the one it writes, else the one it reads, else none."""
    uses = sorted(node.operator.role_uses.items(), key=lambda item: item[1].mode != "writes")
    for field, _ in uses:
        return str(getattr(node.operator, field).name)
    return ""


def _title(graph: Graph, role: str) -> str:
    backend = graph.bindings.get(role)
    return role if backend is None else f"{role}: {type(backend).__name__}"


def _box(node: Node) -> str:
    from flowrl.diff import describe

    if isinstance(node.operator, Input):
        return f'{_id(node.name)}(["{node.name}: {node.operator.record.__name__}"])'
    text = _escape(describe(node))
    label = f"<b>{node.name}</b><br/>{text}"
    writes = any(use.mode == "writes" for use in node.operator.role_uses.values())
    return f'{_id(node.name)}{{{{"{label}"}}}}' if writes else f'{_id(node.name)}["{label}"]'


def _label(graph: Graph, source: str, node: Node) -> str:
    """The record that an edge carries, where a whole one is read, else its columns."""
    record = graph[source].operator.signature.output_record
    reads_record = any(
        port.record is not None and node.inputs.get(slot, ("",))[0] == source
        for port in node.operator.signature.ports.values()
        for slot in port.slots
    )
    if record is not None and reads_record:
        return record.__name__
    return "<br/>".join(dict.fromkeys(edge.output for edge in node.inputs.values() if edge.node == source))


def _bare_state_edges(graph: Graph) -> list[StateEdge]:
    """The state edges that no path of data implies; the others would only clutter the picture."""
    return [edge for edge in state_edges(graph) if not nx.has_path(graph.network, edge.before, edge.after)]


def _id(name: str) -> str:
    return f"{name}_" if name.lower() in _RESERVED else name


def _escape(text: str) -> str:
    for character, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return text
