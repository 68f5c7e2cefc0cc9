"""`Picture`: the contents of a drawing of a graph or of a diff, independent of the format.

Boxes are nodes, grouped by the role whose weights they use; a box that uses several is placed between them. Arrows are
data (labeled by the record or the columns that flow), state ("reads the weights before they are written", only if no
data arrow implies it) and the back-edge across steps, with its lag.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import networkx as nx

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Input, Node
from flowrl.core.graphs.plan import state_edges
from flowrl.core.graphs.spans import swaps
from flowrl.core.operators.ports import snake_case
from flowrl.draw.colors import colors
from flowrl.rules.check import allowances
from flowrl.spec import Spec, non_default, shown

Mark = Literal["", "added", "removed", "changed"]

WIDTH = 34
"""Characters in a line of a box; longer texts are wrapped."""
LONGEST = 4 * WIDTH
"""Characters of one parameter's value; what is longer ends in an ellipsis."""


@dataclass(frozen=True)
class Box:
    """A node: its name, the lines below it (what differs from the defaults), what it writes, and its style."""

    name: str
    lines: tuple[str, ...]
    writes: str
    role: str
    shape: Literal["input", "reads", "writes"]
    mark: Mark = ""


@dataclass(frozen=True)
class Arrow:
    """A line from `source` to `target`; `whole` if all outputs of the source flow, not some of them."""

    source: str
    target: str
    label: str
    kind: Literal["data", "state", "back"]
    mark: Mark = ""
    whole: bool = False


@dataclass(frozen=True)
class Picture:
    """Boxes, arrows, and the title of every role (with its backend where one is bound, both where it is swapped)."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    roles: dict[str, str]

    def colors(self, role: str, mark: Mark = "") -> tuple[str, str]:
        """Fill and line of a box of this role and mark, each of which may be ``""``."""
        return colors(list(self.roles).index(role) if role else None, mark)

    @property
    def legend(self) -> dict[tuple[str, Mark], str]:
        """What the colors mean: by role and mark, of which one is ``""``, the text."""
        found: dict[tuple[str, Mark], str] = {(role, ""): title for role, title in self.roles.items()}
        found |= {("", box.mark): str(box.mark) for box in self.boxes if box.mark}
        return found


class Change(Protocol):
    """Two graphs and what differs; `flowrl.edits.diff.Diff` is one."""

    @property
    def before(self) -> Graph: ...
    @property
    def after(self) -> Graph: ...
    @property
    def added(self) -> Sequence[str]: ...
    @property
    def removed(self) -> Sequence[str]: ...
    @property
    def pruned(self) -> Sequence[str]: ...
    @property
    def changed(self) -> Mapping[str, object]: ...
    @property
    def renamed(self) -> Mapping[str, str]: ...


def picture(subject: Graph | Change) -> Picture:
    """What to draw of a graph; of a diff, both graphs in one, with what was added, removed and changed marked."""
    if isinstance(subject, Graph):
        boxes = _with_allowances(subject, tuple(_box(node, _details(node)) for node in subject.nodes.values()))
        return Picture(subject.name, boxes, tuple(_arrows(subject)), _roles(boxes, subject))
    before, after = subject.before, subject.after
    boxes = (
        *(_marked_box(subject, node) for node in after.nodes.values()),
        *(
            _box(n, _details(n), "removed")
            for n in before.nodes.values()
            if n.name in (*subject.removed, *subject.pruned)
        ),
    )
    boxes = _with_allowances(after, boxes)
    names = subject.renamed
    now = (
        replace(a, source=names.get(a.source, a.source), target=names.get(a.target, a.target)) for a in _arrows(before)
    )
    old, new = ({(a.source, a.target, a.kind): a for a in arrows} for arrows in (now, _arrows(after)))
    arrows = [
        replace(arrow, mark="removed" if key not in new else "" if key in old else "added")
        for key, arrow in {**old, **new}.items()
    ]
    return Picture(f"{before.name} -> {after.name}", boxes, tuple(arrows), _roles(boxes, before, after))


def _with_allowances(graph: Graph, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """Boxes that also name the rule that their node may break, and why."""
    notes: dict[str, list[str]] = {}
    for allowance in allowances(graph):
        for name in dict.fromkeys(finding.node for finding in allowance.findings):
            text = f"allowed: {allowance.rule}, {allowance.reason}"
            notes.setdefault(name, []).extend(textwrap.wrap(text, WIDTH, max_lines=5, placeholder=" …"))
    return tuple(replace(box, lines=(*box.lines, *notes.get(box.name, ()))) for box in boxes)


def _box(node: Node, details: list[str], mark: Mark = "") -> Box:
    if isinstance(node.operator, Input):
        return Box(node.name, (node.operator.record.__name__,), "", "", "input", mark)
    lines = []
    if len(node.roles) > 1:
        lines.append(" → ".join(", ".join(side) for side in (node.reads, node.writes) if side))
    lines += [line for detail in details for line in textwrap.wrap(detail, WIDTH)]
    role = node.roles[0] if len(node.roles) == 1 else ""
    writes = "" if node.writes else _written(node)
    return Box(node.name, tuple(lines), writes, role, "writes" if node.writes else "reads", mark)


def _written(node: Node) -> str:
    """The columns that a node writes, or the record of them where they are many."""
    signature = node.signature
    record, outputs = signature.output_record, list(signature.outputs)
    return ", ".join(outputs) if record is None or len(outputs) <= 2 else record.__name__


def _marked_box(diff: Change, node: Node) -> Box:
    """A node of the later graph; where it changed, its parameters are shown as ``n: 1 → 8``."""
    if node.name in diff.added:
        return _box(node, _details(node), "added")
    if was := next((old for old, new in diff.renamed.items() if new == node.name), None):
        return _box(node, [*_details(node), f"renamed from {was}"], "changed")
    if node.name not in diff.changed:
        return _box(node, _details(node))
    old, new = diff.before[node.name].operator, node.operator
    details = _details(node)
    if type(old) is type(new):
        pairs = ((name, value, getattr(new, name)) for name, value in shown(old).items())
        details = [f"{name}: {format_value(a)} → {format_value(b)}" for name, a, b in pairs if a != b]
        whens = [str(graph[node.name].when) or "always" for graph in (diff.before, diff.after)]
        details += [" → ".join(whens)] if whens[0] != whens[1] else []
    return _box(node, details, "changed")


def _roles(boxes: tuple[Box, ...], *graphs: Graph) -> dict[str, str]:
    """Titles of the roles that have a box, in their order, with their backends: ``rollout: TorchRollout → VLLM``."""
    titles = {}
    for role in dict.fromkeys(box.role for box in boxes if box.role):
        backends = dict.fromkeys(type(g.bindings[role]).__name__ for g in graphs if role in g.bindings)
        titles[role] = f"{role}: {' → '.join(backends)}" if backends else role
    return titles


def _arrows(graph: Graph) -> Iterator[Arrow]:
    for node in graph.nodes.values():
        for source in node.sources:
            label, whole = _flow(graph, source, node)
            yield Arrow(source, node.name, label, "data", whole=whole)
    for edge in state_edges(graph):
        if not nx.has_path(graph.network, edge.before, edge.after):
            yield Arrow(edge.before, edge.after, f"reads {edge.role} first", "state")
    for node in graph.nodes.values():
        if isinstance(gate := node.initial_operator, Gate) and gate.rounds_at_most > 1:
            for source in (name for name in graph.inputs if name in graph.ancestors(node.name)):
                yield Arrow(node.name, source, f"again, at most {gate.rounds_at_most} rounds", "back")
    for sync, generate in graph.back_edges:
        how = ", spans" if sync in swaps(graph) else "" if graph.lag.versions else " (on-policy)"
        yield Arrow(sync, generate, f"lag {graph.lag.versions}{how}", "back")


def _flow(graph: Graph, source: str, node: Node) -> tuple[str, bool]:
    """What an edge carries, the record where a whole one is read, else columns; and whether that is all there is."""
    signature = graph[source].signature
    record = signature.output_record
    reads_record = any(
        port.record is not None and field in node.inputs and node.inputs[field].node == source
        for port in node.signature.ports.values()
        for field in port.fields
    )
    if record is not None and reads_record:
        return record.__name__, True
    columns = list(dict.fromkeys(edge.output for edge in node.inputs.values() if edge.node == source))
    return ", ".join(columns), len(columns) == len(signature.outputs)


def _details(node: Node) -> list[str]:
    """The operator's class, if it differs from the node's name, and its parameters that are not the defaults."""
    values = {k: v for k, v in non_default(node.operator).items() if k not in node.operator.role_uses}
    shown = ", ".join(f"{name}={format_value(value)}" for name, value in values.items())
    cls = type(node.operator).__name__
    if node.name != snake_case(cls):
        shown = f"{cls}({shown})"
    return [line for line in (shown, str(node.when)) if line]


def format_value(value: Any) -> str:
    """A parameter's value as short text: functions and classes by name, specs by what differs from their defaults."""
    if isinstance(value, Spec):
        shown = f"{type(value).__name__}({', '.join(f'{k}={format_value(v)}' for k, v in non_default(value).items())})"
    elif isinstance(value, tuple | list):
        shown = f"[{', '.join(map(format_value, value))}]"
    elif callable(value):
        shown = getattr(value, "__name__", type(value).__name__)
    else:
        shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
