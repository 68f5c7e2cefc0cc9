"""`Graph.edit`: one atomic change.

Everything resolves against the graph as it was; what nothing reaches any more vanishes once, at the end; the original
is untouched.

- ``replace={"gae": GroupAdvantage()}``: the replacement bears its own name. A slot takes the predecessor's edge of the
  same name, else the one ancestor that writes the column it wants.
- ``drop=["whiten"]``: a sink is gone; an inner node is bypassed where exactly one of its inputs is acceptable to its
  readers.
- ``insert={"length_penalty": After("reward", LengthPenalty())}``: every reader of what it re-writes moves to it.
- ``wire={"gae.values": "old_values.values"}``: sets edges by hand and overrides all of the above.
- ``rename={"old": "new"}``, ``bind={"rollout": ...}``, ``lag=1``, ``name="grpo"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.columns import ColumnType
from flowrl.errors import GraphError
from flowrl.graph import Graph, Node
from flowrl.operator import Operator
from flowrl.ports import SlotType, ValueType
from flowrl.symbols import Available, Edge, candidates


@dataclass(frozen=True)
class After:
    """Where `edit(insert=...)` puts an operator: behind `node`."""

    node: str
    operator: Operator


def edit(
    graph: Graph,
    replace: Mapping[str, Operator],
    drop: Sequence[str],
    insert: Mapping[str, After],
    wire: Mapping[str, str],
    rename: Mapping[str, str],
    bind: Mapping[str, Any],
    lag: int | None,
    name: str | None,
) -> Graph:
    """See the module's docstring.

    Raises:
        GraphError: a node that is not there, one named twice, an edit that leaves a port without an unambiguous edge;
            the message names the `wire=` that settles it.
        PortError: the changed graph connects what does not fit.
        BindError: a backend for a role that the changed graph does not have, or that cannot serve it.
    """
    _refuse_misuse(graph, replace, drop, insert, rename, lag)
    edit = _Edit(graph, replace, drop, insert, rename)
    wires = edit.parse_wires(wire)

    # Every node with edges into the graph as it was, then each edge led to where it ends in the new one.
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        if node.name in drop:
            continue
        new_name = edit.new_name(node.name)
        by_hand = wires.get(new_name, {})
        operator = replace.get(node.name, node.operator)
        edges = edit.wire_replacement(node, operator, by_hand) if node.name in replace else node.inputs
        slots = operator.signature.slots
        led = {s: edit.follow(e, slots[s], f"{new_name}.{s}") for s, e in edges.items() if s not in by_hand}
        nodes[new_name] = Node(new_name, operator.named(new_name), {**led, **by_hand})
    for new_name, after in insert.items():
        by_hand = wires.get(new_name, {})
        slots = after.operator.signature.slots
        edges = edit.wire_inserted(new_name, after, by_hand)
        led = {
            s: edit.follow(e, slots[s], f"{new_name}.{s}", before=new_name)
            for s, e in edges.items()
            if s not in by_hand
        }
        nodes[new_name] = Node(new_name, after.operator.named(new_name), {**led, **by_hand})

    changed = Graph.build(name or graph.name, nodes, edit.sinks(nodes), graph.lag if lag is None else lag)
    if changed.lag and not changed.back_edges:
        raise GraphError(
            f"lag={changed.lag} belongs to the back-edge Sync -> Generate, which {changed.name} does not have; add a Sync, or "
            f"edit(lag=0)."
        )
    kept = {role: backend for role, backend in graph.bindings.items() if role in changed.roles()}
    return changed.bound({**kept, **bind})


def _refuse_misuse(
    graph: Graph,
    replace: Mapping[str, Operator],
    drop: Sequence[str],
    insert: Mapping[str, After],
    rename: Mapping[str, str],
    lag: int | None,
) -> None:
    """What can be refused without looking at types."""
    named = [("replace", n) for n in replace] + [("drop", n) for n in drop] + [("rename", n) for n in rename]
    named += [("insert", after.node) for after in insert.values()]
    for verb, node in named:
        if node not in graph:
            raise GraphError(
                f"edit({verb}=...) names {node!r}, which {graph.name} does not have; it has {', '.join(graph.nodes)}."
            )
    changed = [node for verb, node in named if verb != "insert"]
    if twice := next((n for n in changed if changed.count(n) > 1), None):
        raise GraphError(f"edit names {twice!r} more than once in replace=, drop= and rename=; name it once.")
    if anchor := next((after.node for after in insert.values() if after.node in drop), None):
        raise GraphError(f"edit inserts after {anchor!r} and drops it; use replace={{{anchor!r}: ...}}.")
    if source := next((n for n in drop if graph[n].is_input), None):
        raise GraphError(f"edit drops the input {source!r}; an input falls away by itself once nothing reads it.")
    if lag is not None and (isinstance(lag, bool) or not isinstance(lag, int) or lag < 0):
        raise GraphError(f"lag={lag!r}; expected how many versions generation may run ahead: 0, 1, 2, ...")
    names = [op.name for op in replace.values()] + list(rename.values()) + list(insert)
    names += [n for n in graph.nodes if n not in (*replace, *drop, *rename)]
    if clash := next((n for n in names if names.count(n) > 1), None):
        raise GraphError(f'edit leaves two nodes named {clash!r}; give one another name: .named("{clash}_2nd").')


class _Edit:
    """The graph as it was, and how its edges are led into the new one."""

    def __init__(
        self,
        graph: Graph,
        replace: Mapping[str, Operator],
        drop: Sequence[str],
        insert: Mapping[str, After],
        rename: Mapping[str, str],
    ) -> None:
        self.graph, self.replace, self.drop, self.insert = graph, replace, drop, insert
        self.new_names = {old: op.name for old, op in replace.items()} | dict(rename)
        self.wired: set[str] = set()
        self.rewrites: dict[str, dict[Edge, Edge]] = {
            name: self._rewritten(name, after) for name, after in insert.items()
        }

    def new_name(self, node: str) -> str:
        return self.new_names.get(node, node)

    def _rewritten(self, name: str, after: After) -> dict[Edge, Edge]:
        """Which outputs of its anchor an inserted operator writes anew: those of the same kind, dtype and axes."""
        anchor = self.graph[after.node].operator.signature.outputs
        return {
            Edge(after.node, old): Edge(name, new)
            for old, old_type in anchor.items()
            for new, new_type in after.operator.signature.outputs.items()
            if isinstance(old_type, ColumnType) and isinstance(new_type, ColumnType)
            and old_type.kind == new_type.kind and new_type.accepts(old_type)
        }  # fmt: skip

    def parse_wires(self, wire: Mapping[str, str]) -> dict[str, dict[str, Edge]]:
        """``wire=`` as new node name to slot to edge; nodes may be called by their old or new names."""
        outputs = {
            self.new_name(n.name): self.replace.get(n.name, n.operator)
            for n in self.graph.nodes.values()
            if n.name not in self.drop
        }
        outputs |= {name: after.operator for name, after in self.insert.items()}
        wires: dict[str, dict[str, Edge]] = {}
        for port, source in wire.items():
            node, _, slot = port.partition(".")
            node, edge = self.new_name(node), Edge.parse(source)
            edge = Edge(self.new_name(edge.node), edge.output)
            if node not in outputs or slot not in outputs[node].signature.slots:
                known = ", ".join(outputs[node].signature.slots) if node in outputs else ", ".join(outputs)
                raise GraphError(f"wire={{{port!r}: ...}} names no port; expected 'node.port', one of: {known}.")
            if edge.node not in outputs or edge.output not in outputs[edge.node].signature.outputs:
                known = ", ".join(outputs[edge.node].signature.outputs) if edge.node in outputs else ", ".join(outputs)
                raise GraphError(
                    f"wire={{{port!r}: {source!r}}} names no output; expected 'node.column', one of: {known}."
                )
            wires.setdefault(node, {})[slot] = edge
            self.wired.add(edge.node)
        return wires

    def wire_replacement(self, old: Node, operator: Operator, by_hand: Mapping[str, Edge]) -> dict[str, Edge]:
        """Old edges for a replacement: the predecessor's by slot name, then the one ancestor that writes what is wanted."""
        ancestors = self.graph.ancestors(old.name)
        pool = {edge: typed for edge, typed in self.graph.types.items() if edge.node in ancestors}
        return self._wire(operator, dict(old.inputs), [pool], by_hand)

    def wire_inserted(self, name: str, after: After, by_hand: Mapping[str, Edge]) -> dict[str, Edge]:
        """Old edges for an inserted operator: what its anchor writes, else the one ancestor that writes what is wanted."""
        ancestors = self.graph.ancestors(after.node)
        near = {edge: typed for edge, typed in self.graph.types.items() if edge.node == after.node}
        far = {edge: typed for edge, typed in self.graph.types.items() if edge.node in ancestors}
        return self._wire(after.operator.named(name), {}, [near, far], by_hand)

    def _wire(
        self, operator: Operator, inherited: Mapping[str, Edge], pools: Sequence[Available], by_hand: Mapping[str, Edge]
    ) -> dict[str, Edge]:
        types = self.graph.types
        wants = operator.wants()
        edges: dict[str, Edge] = {}
        binding: dict[str, tuple[str, str, Edge]] = {}

        def take(slot: str, wanted: SlotType, edge: Edge) -> None:
            edges[slot] = edge
            if isinstance(wanted, ColumnType):
                for axis, identity in zip(wanted.axes, types[edge].axes, strict=True):
                    binding.setdefault(axis, (identity, slot, edge))

        open_slots: list[tuple[str, SlotType]] = []
        for port in operator.signature.ports.values():
            if wants.get(port.name) is False:
                continue
            for slot, wanted in port.slots.items():
                if slot in inherited and wanted.accepts(types[inherited[slot]].type):  # type: ignore[arg-type]
                    take(slot, wanted, inherited[slot])
                elif slot not in by_hand and (wants.get(port.name) or not port.optional):
                    open_slots.append((slot, wanted))
        for slot, wanted in open_slots:
            found = next((c for pool in pools if (c := candidates(wanted, binding, pool))), [])
            if len(found) != 1:
                what = (
                    f"several nodes write one: {', '.join(map(str, found))}"
                    if found
                    else "no node before it writes one"
                )
                choice = str(found[0]) if found else "node.column"
                raise GraphError(
                    f"{operator.name}.{slot} wants {wanted}, and {what}; say which: wire={{'{operator.name}.{slot}': '{choice}'}}."
                )
            take(slot, wanted, found[0])
        return edges

    def follow(self, edge: Edge, wanted: SlotType, reader: str, before: str | None = None) -> Edge:
        """Where an edge of the graph as it was ends in the new one.

        Args:
            edge: the old edge.
            wanted: what the reader's slot wants.
            reader: the slot, for messages.
            before: an inserted node, which reads what was written before it.
        """
        for name, rewritten in reversed(self.rewrites.items()):
            if before is not None and list(self.rewrites).index(name) >= list(self.rewrites).index(before):
                continue
            if edge in rewritten:
                return rewritten[edge]
        if edge.node in self.drop:
            dropped = self.graph[edge.node]
            fitting = {e for e in dropped.inputs.values() if wanted.accepts(self.graph.types[e].type)}  # type: ignore[arg-type]
            if len(fitting) != 1:
                found = ", ".join(sorted(map(str, fitting))) or "none"
                raise GraphError(
                    f"{edge.node} cannot be dropped, since {reader} reads {edge} and wants {wanted}: of the inputs of "
                    f"{edge.node} exactly one would have to fit, and these do: {found}; say what it shall read: "
                    f"wire={{'{reader}': 'node.column'}}."
                )
            return self.follow(fitting.pop(), wanted, reader, before)
        if edge.node in self.replace:
            outputs = self.replace[edge.node].signature.outputs
            if edge.output in outputs:
                return Edge(self.new_name(edge.node), edge.output)
            fitting_outputs = [o for o, t in outputs.items() if wanted.accepts(t)]  # type: ignore[arg-type]
            if len(fitting_outputs) != 1:
                raise GraphError(
                    f"{reader} reads {edge}, and its replacement {self.new_name(edge.node)} writes {', '.join(outputs)}; say "
                    f"what it shall read: wire={{'{reader}': 'node.column'}}."
                )
            return Edge(self.new_name(edge.node), fitting_outputs[0])
        return Edge(self.new_name(edge.node), edge.output)

    def sinks(self, nodes: Mapping[str, Node]) -> list[str]:
        """The old sinks that are left, and inserted nodes that return a value which nobody reads (a `Sync`, say)."""
        rewritten_by = {after.node: name for name, after in self.insert.items() if self.rewrites[name]}
        sinks = [rewritten_by.get(s, self.new_name(s)) for s in self.graph.sinks if s not in self.drop]
        for name, after in self.insert.items():
            if self.rewrites[name] or name in self.wired:
                continue
            if not all(isinstance(t, ValueType) for t in after.operator.signature.outputs.values()):
                raise GraphError(
                    f"{name} is inserted after {after.node} but re-writes none of its columns "
                    f"({', '.join(self.graph[after.node].operator.signature.outputs)}), so nothing would read it; wire a reader to "
                    f"it: wire={{'node.port': '{name}.{next(iter(after.operator.signature.outputs))}'}}."
                )
            sinks.append(name)
        if not sinks:
            raise GraphError(
                f"edit drops every sink ({', '.join(self.graph.sinks)}), so nothing would be computed; keep one."
            )
        return sinks
