"""How an edit carries the edges of a graph over into the changed one.

All that is asked here is asked of the graph as it was: which edges a node keeps, what stands in for what is dropped or
replaced, and which readers move to what is inserted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.inference import Available
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.operator_validation import refuse_misdeclared
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.edits.suggest import suggest_reader
from flowrl.edits.wiring import End, same, wire_by_type
from flowrl.errors import GraphError, offer
from flowrl.record_types import FieldType, ValueType, accepts


class Rewiring:
    """The graph as it was, and how its edges carry over into the new one.

    Args:
        graph: as it was.
        replace: operators by the node that they take the place of.
        drop: nodes that go.
        insert: new operators by name.
        anchors: the node that each of `insert` stands behind.
        rename: new names by old.
        wire: edges that are set by hand, as `edit` takes them.

    Attributes:
        operators: of every node that the new graph may have, by new name, in order.

    Raises:
        GraphError: a wire that names what is not there; or it is not clear what an inserted node reads or rewrites.
    """

    def __init__(
        self,
        graph: Graph,
        replace: Mapping[str, Operator],
        drop: Sequence[str],
        insert: Mapping[str, Operator],
        anchors: Mapping[str, str],
        rename: Mapping[str, str],
        wire: Mapping[str, str],
    ) -> None:
        self.graph, self.replace, self.drop, self.anchors, self.rename = graph, replace, drop, anchors, rename
        self.new_names = {n: n for n in graph.nodes} | {old: op.name for old, op in replace.items()} | dict(rename)
        self.old_names = {self.new_names[n]: n for n in graph.nodes if n not in drop}
        self.operators = {new: replace.get(old, graph[old].operator) for new, old in self.old_names.items()}
        self.operators |= insert
        for name, operator in {**{self.new_names[n]: op for n, op in replace.items()}, **insert}.items():
            refuse_misdeclared(name, operator)
        self.wires = self._parse_wires(wire)
        self.rewrites: dict[str, dict[Edge, Edge]] = {}
        for name in insert:  # in their order, since a later one may read an earlier one by hand
            self.rewrites[name] = self._rewritten(name)

    def reached(self) -> tuple[dict[str, Node], list[str]]:
        """The nodes of the new graph in order, and its sinks.

        Raises:
            GraphError: it is not clear what a port reads, or a node that the edit names falls away.
        """
        sinks = self._sinks()
        nodes = self._resolved(sinks)
        # What writes weights does not fall away with its last reader; rules then say what is missing.
        if left := [new for new in self.old_names if new not in nodes and _writes(self.operators[new])]:
            sinks += left
            nodes = self._resolved(sinks)
        if not sinks:
            raise GraphError(
                f"edit drops every sink ({', '.join(self.graph.sinks)}), so nothing would be computed; keep one."
            )
        self._refuse_vanished(nodes, sinks)
        return {n: nodes[n] for n in self.operators if n in nodes}, sinks

    def _resolved(self, sinks: Sequence[str]) -> dict[str, Node]:
        """The nodes that the sinks reach; only these have to resolve."""
        nodes: dict[str, Node] = {}
        open_ends = [*sinks]
        while open_ends:
            reached = open_ends.pop()
            if reached not in nodes:
                nodes[reached] = self._node(reached)
                open_ends += nodes[reached].sources
        return nodes

    # ---- what is inserted

    def _rewritten(self, name: str) -> dict[Edge, Edge]:
        """The outputs of its anchor that an inserted node reads and writes anew, in the same kind, dtype and axes.

        Of a record of which it reads a part, it also rewrites the columns that are of no type that it reads.
        """
        anchor, outputs = self.anchors[name], self.operators[name].signature.outputs
        theirs, read = self.graph[anchor].signature.outputs, self._read(name)
        anew = {old: [new for new, other in outputs.items() if same(type, other)] for old, type in theirs.items()}
        types = [theirs[old] for old, written in anew.items() if written and Edge(anchor, old) in read]
        rewritten: dict[Edge, Edge] = {}
        for old, written in anew.items():
            edge = Edge(anchor, old)
            beside = edge not in read and any(same(theirs[old], type) for type in types)
            if not written or not types or beside:
                continue
            if old not in written and len(written) > 1:
                raise GraphError(
                    f"{name} is inserted after {anchor}, and each of {', '.join(written)} could be what it makes of "
                    f"{edge}; let it write one of them under the name {old!r}."
                )
            rewritten[edge] = Edge(name, old if old in written else written[0])
        return rewritten

    def _read(self, name: str) -> set[Edge]:
        """What an inserted node reads, in terms of the old graph; behind another at its anchor, what that rewrites."""
        read = set(self._edges_as_it_was(name).values())
        for edge in self.wires.get(name, {}).values():
            before = {new: old for rewritten in self.rewrites.values() for old, new in rewritten.items()}
            read.add(before.get(edge, self._as_it_was(edge)))
        return read

    def _as_it_was(self, edge: Edge) -> Edge:
        """An edge of the new graph under the old name of its node."""
        return edge._replace(node=self.old_names.get(edge.node, edge.node))

    # ---- what is wired by hand

    def _parse_wires(self, wire: Mapping[str, str]) -> dict[str, dict[PortField, Edge]]:
        """``wire=`` as new node name to field to edge; nodes may be called by their old or new names.

        A whole record goes by the node that writes it: ``wire={"value.rollout": "generate"}``.
        """
        wires: dict[str, dict[PortField, Edge]] = {}
        for end, source in wire.items():
            said = f"wire={{{end!r}: ...}}"
            node, _, port = end.partition(".")
            reader = self.new_names.get(node, node)
            if reader not in self.operators:
                known = offer(reader, self.operators, " of one of:")
                raise GraphError(f"{said} does not name a node; expected 'node.port'{known}")
            signature, field = self.operators[reader].signature, PortField.parse(port)
            if port in signature.ports and signature.ports[port].record is not None and "." not in source:
                pairs = {field: f"{source}.{field.name}" for field in signature.ports[port].fields}
            elif field in signature.fields:
                pairs = {field: source}
            else:
                known = offer(port, dict.fromkeys([*signature.ports, *map(str, signature.fields)]), f"{reader} has:")
                raise GraphError(f"{said} does not name a port; {known}")
            found = {field: self._parse_output(output, end, source) for field, output in pairs.items()}
            wires.setdefault(reader, {}).update(found)
        return wires

    def _parse_output(self, output: str, end: str, source: str) -> Edge:
        """The edge of the new graph that `output` names; ``wire={end: source}`` is what was given."""
        written = Edge.parse(output)
        edge = Edge(self.new_names.get(written.node, written.node), written.output)
        outputs = self.operators[edge.node].signature.outputs if edge.node in self.operators else {}
        if edge.output not in outputs:
            wrong, there = (edge.output, outputs) if outputs else (edge.node, self.operators)
            raise GraphError(
                f"wire={{{end!r}: {source!r}}} names {output!r}, which is not an output; expected 'node.column', "
                f"{offer(wrong, there, 'with one of:')}"
            )
        return edge

    # ---- edges

    def _node(self, name: str) -> Node:
        """A node of the new graph, with every edge from where it starts there."""
        operator, by_hand = self.operators[name], self.wires.get(name, {})
        ends = {field: End(name, field, wanted) for field, wanted in operator.signature.fields.items()}
        edges = self._edges_as_it_was(name)
        carried = {field: self._follow(edge, ends[field]) for field, edge in edges.items() if field not in by_hand}
        return Node(name, operator.named(name), {**carried, **by_hand})

    def _edges_as_it_was(self, name: str) -> Mapping[PortField, Edge]:
        """The edges of a node of the new graph, in terms of the old one; those that are set by hand may be among them.

        A replacement inherits its predecessor's; an inserted node reads its anchor before anything else.
        """
        operator, types = self.operators[name], self.graph.types
        by_hand = {field: self._as_it_was(edge) for field, edge in self.wires.get(name, {}).items()}
        if name in self.anchors:
            anchor = self.anchors[name]
            near = {edge: typed for edge, typed in types.items() if edge.node == anchor}
            return wire_by_type(name, operator, {}, [near, *self._written_before(anchor)], types, by_hand)
        old = self.graph[self.old_names[name]]
        if old.name in self.replace:
            return wire_by_type(name, operator, old.inputs, self._written_before(old.name), types, by_hand)
        return old.inputs

    def _written_before(self, node: str) -> list[Available]:
        """What may be read in the place of a node of the old graph, the nearest first.

        That is what its ancestors write, and then what the others write that do not depend on it; nothing that is
        dropped is among either.
        """
        kept = set(self.graph.nodes).difference(self.drop, [node])
        ancestors = kept & self.graph.ancestors(node)
        others = kept - ancestors - self.graph.descendants(node)
        types = self.graph.types.items()
        return [{edge: typed for edge, typed in types if edge.node in pool} for pool in (ancestors, others)]

    def _follow(self, edge: Edge, end: End) -> Edge:
        """Where an edge of the graph as it was starts in the new one, given where it ends."""
        for name, rewritten in reversed(self.rewrites.items()):
            if edge in rewritten and not self._comes_first(end.node, name):
                return rewritten[edge]
        if edge.node in self.drop:
            return self._taken_over(edge) or self._follow(self._bypass(edge, end), end)
        if edge.node in self.replace:
            return self._of_replacement(edge, end)
        return Edge(self.new_names[edge.node], edge.output)

    def _taken_over(self, edge: Edge) -> Edge | None:
        """Where a replacement ahead of a dropped node writes the column that this wrote, and that before it did not."""
        written, ahead = self.graph.types[edge].type, self.graph.ancestors(edge.node)
        for old in self.replace.keys() & ahead:
            made = self.replace[old].signature.outputs.get(edge.output)
            if edge.output not in self.graph[old].signature.outputs and made is not None and same(made, written):
                return Edge(self.new_names[old], edge.output)
        return None

    def _bypass(self, edge: Edge, end: End) -> Edge:
        """What a reader of a dropped node reads instead: its one input that fits; of a gate, what passes."""
        if isinstance(self.graph[edge.node].operator, Gate):
            return self.graph[edge.node].inputs[PortField(ROWS, edge.output)]
        inputs = self.graph[edge.node].inputs.values()
        fitting = {e for e in inputs if accepts(end.wanted, self.graph.types[e].type)}
        if len(fitting) != 1:
            found = ", ".join(sorted(map(str, fitting))) or "none"
            is_sink = self.old_names.get(end.node) in self.graph.sinks
            raise GraphError(
                f"{edge.node} cannot be dropped, since {end} reads {edge} and wants {end.wanted}: of the inputs of "
                f"{edge.node} exactly one would have to fit, and these do: {found}; say what it should read: "
                f"wire={{'{end}': 'node.column'}}{f', or drop {end.node} too' if is_sink else ''}."
            )
        return fitting.pop()

    def _of_replacement(self, edge: Edge, end: End) -> Edge:
        """What a reader of a replaced node reads now: the output of the same name, else the one that fits."""
        name, outputs = self.new_names[edge.node], self.replace[edge.node].signature.outputs
        if edge.output in outputs:
            return Edge(name, edge.output)
        fitting = [output for output, written in outputs.items() if accepts(end.wanted, written)]
        if len(fitting) != 1:
            raise GraphError(
                f"{end} reads {edge} and wants {end.wanted}, and the replacement {name} writes "
                f"{', '.join(outputs) or 'nothing'}; "
                f"say what it should read: wire={{'{end}': 'node.column'}}."
            )
        return Edge(name, fitting[0])

    def _comes_first(self, reader: str, inserted: str) -> bool:
        """Whether `reader` is itself inserted at the anchor of `inserted`, at its place or before it."""
        if reader not in self.anchors or self.anchors[reader] != self.anchors[inserted]:
            return False
        order = list(self.anchors)
        return order.index(reader) <= order.index(inserted)

    # ---- what is left

    def _sinks(self) -> list[str]:
        """The old sinks that are left, new nodes that write nothing, and inserted ones that return a value which nobody
        reads (a `Sync`, say)."""
        rewritten_by = {self.anchors[name]: name for name, rewritten in self.rewrites.items() if rewritten}
        sinks = [rewritten_by.get(s, self.new_names[s]) for s in self.graph.sinks if s not in self.drop]
        silent = [self.new_names[old] for old, op in self.replace.items() if not op.signature.outputs]
        sinks += [name for name in silent if name not in sinks]
        sources = {edge.node for edges in self.wires.values() for edge in edges.values()}
        for name, anchor in self.anchors.items():
            if self.rewrites[name] or name in sources:
                continue
            outputs = self.operators[name].signature.outputs
            if not all(isinstance(t, ValueType) for t in outputs.values()):
                self._refuse_unread(name, anchor, outputs)
            sinks.append(name)
        return sinks

    def _refuse_unread(self, name: str, anchor: str, outputs: Mapping[str, FieldType]) -> None:
        """Refuse an inserted node whose columns nobody would read."""
        theirs = self.graph[anchor].signature.outputs
        output = next((new for new, t in outputs.items() if any(same(t, old) for old in theirs.values())), None)
        unread = output or next(iter(outputs))
        wire = f"wire={{'{suggest_reader(outputs[unread], self.operators, name)}': '{name}.{unread}'}}"
        if output is not None:
            operator = type(self.operators[name]).__name__
            raise GraphError(
                f"{name} is inserted after {anchor} and writes {output} without reading {anchor}'s, so it stands "
                f"beside {anchor} and rewrites nothing, and nothing would read it; wire a reader to it: {wire}, or "
                f"let it take the place of {anchor}: replace={{{anchor!r}: {operator}(...)}}."
            )
        raise GraphError(
            f"{name} is inserted after {anchor} but rewrites none of its columns ({', '.join(theirs)}), so nothing "
            f"would read it; wire a reader to it: {wire}."
        )

    def _refuse_vanished(self, nodes: Mapping[str, Node], sinks: Sequence[str]) -> None:
        """Refuse an edit of nodes that fall away: it would silently do nothing."""
        touched = [("replace", self.new_names[n]) for n in self.replace] + [("insert", n) for n in self.anchors]
        touched += [("rename", new) for new in self.rename.values()] + [("wire", n) for n in self.wires]
        for verb, name in touched:
            if name not in nodes:
                output, type = next(iter(self.operators[name].signature.outputs.items()))  # what has none is a sink
                raise GraphError(
                    f"edit({verb}=...) names {name!r}, which nothing reads in the graph that is left, so it would fall "
                    f"away; the sinks are {', '.join(sinks)}: leave {verb}= out, or wire a reader to it: "
                    f"wire={{'{suggest_reader(type, self.operators, name)}': '{name}.{output}'}}."
                )


def _writes(operator: Operator) -> bool:
    return any(use.mode == "writes" for use in operator.role_uses.values())
