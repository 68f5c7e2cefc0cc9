"""How an edit maps the edges of the original graph to the changed one.

Everything resolves against the original graph: which edges a node keeps, what its readers read instead of a dropped or
replaced node, and which readers move to an inserted node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node, unknown_node
from flowrl.core.graphs.inference import Available
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.operator_validation import refuse_misdeclared
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.edits.fixes import FixableError, Verbs, added
from flowrl.edits.suggest import suggest_readers
from flowrl.edits.wiring import End, same, wire_by_type
from flowrl.errors import GraphError, offer
from flowrl.record_types import FieldType, ValueType, accepts


class Rewiring:
    """The original graph, and how its edges map to the changed one.

    Args:
        anchors: the node that each of `insert` comes after.
    Attributes:
        operators: the operator of each node that the changed graph may have, by new name, in order.
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
        for name in insert:  # in order: a later one may read an earlier one by an explicit edge
            self.rewrites[name] = self._rewritten(name)

    def reached(self) -> tuple[dict[str, Node], list[str]]:
        """The nodes of the changed graph in order, and its sinks."""
        sinks = self._sinks()
        nodes = self._resolved(sinks)
        # a node that writes weights stays without readers; the rules then report what is missing
        if writers := [new for new in self.old_names if new not in nodes and _writes(self.operators[new])]:
            sinks += writers
            nodes = self._resolved(sinks)
        if not sinks:
            raise GraphError(
                f"edit drops every sink ({', '.join(self.graph.sinks)}), so the graph computes nothing. Leave one in.",
                code="graph.no-sink",
                sinks=self.graph.sinks,
            )
        self._refuse_unread_edits(nodes, sinks)
        return {n: nodes[n] for n in self.operators if n in nodes}, sinks

    def _resolved(self, sinks: Sequence[str]) -> dict[str, Node]:
        """The nodes that the sinks reach; only their ports need a source."""
        nodes: dict[str, Node] = {}
        open_ends = [*sinks]
        while open_ends:
            reached = open_ends.pop()
            if reached not in nodes:
                nodes[reached] = self._node(reached)
                open_ends += nodes[reached].sources
        return nodes

    # ---- inserted nodes

    def _rewritten(self, name: str) -> dict[Edge, Edge]:
        """The outputs of its anchor that an inserted node reads and rewrites, with the same kind, dtype and axes."""
        anchor, outputs = self.anchors[name], self.operators[name].signature.outputs
        theirs, read = self.graph[anchor].signature.outputs, self._read(name)
        matches = {old: [new for new, other in outputs.items() if same(type, other)] for old, type in theirs.items()}
        types = [theirs[old] for old, found in matches.items() if found and Edge(anchor, old) in read]
        rewritten: dict[Edge, Edge] = {}
        for old, found in matches.items():
            edge = Edge(anchor, old)
            unread = edge not in read and any(same(theirs[old], type) for type in types)
            if not found or not types or unread:
                continue
            if old not in found and len(found) > 1:
                raise GraphError(
                    f"{name} is inserted after {anchor}, and each of its outputs {', '.join(found)} could rewrite "
                    f"{edge}. Name one of these outputs {old!r}.",
                    code="edit.ambiguous-source",
                    node=name,
                    port=str(edge),
                    known=found,
                )
            rewritten[edge] = Edge(name, old if old in found else found[0])
        return rewritten

    def _read(self, name: str) -> set[Edge]:
        """The edges of the original graph that an inserted node reads, directly or as another node rewrites them."""
        read = set(self._edges_as_it_was(name).values())
        for edge in self.wires.get(name, {}).values():
            before = {new: old for rewritten in self.rewrites.values() for old, new in rewritten.items()}
            read.add(before.get(edge, self._as_it_was(edge)))
        return read

    def _as_it_was(self, edge: Edge) -> Edge:
        """An edge of the changed graph with the old name of its node."""
        return edge._replace(node=self.old_names.get(edge.node, edge.node))

    # ---- explicit edges

    def _parse_wires(self, wire: Mapping[str, str]) -> dict[str, dict[PortField, Edge]]:
        """``wire=`` as edges by new node name and field; nodes may have their old or new names."""
        wires: dict[str, dict[PortField, Edge]] = {}
        for end, source in wire.items():
            node, _, port = end.partition(".")
            reader = self.new_names.get(node, node)
            if reader not in self.operators:
                raise unknown_node(f"wire={{{end!r}: ...}} names the unknown node {node!r}", node, self.operators)
            signature, field = self.operators[reader].signature, PortField.parse(port)
            if port in signature.ports and signature.ports[port].record is not None and "." not in source:
                pairs = {field: f"{source}.{field.name}" for field in signature.ports[port].fields}
            elif field in signature.fields:
                pairs = {field: source}
            else:
                known = offer(port, dict.fromkeys([*signature.ports, *map(str, signature.fields)]), f"{reader} has:")
                raise GraphError(
                    f"wire={{{end!r}: ...}} does not name a port; {known}",
                    code="edit.unknown-port",
                    node=reader,
                    port=port,
                )
            found = {field: self._parse_output(output, end, source) for field, output in pairs.items()}
            wires.setdefault(reader, {}).update(found)
        return wires

    def _parse_output(self, output: str, end: str, source: str) -> Edge:
        """The edge of the changed graph that `output` names; ``wire={end: source}`` is for the message."""
        written = Edge.parse(output)
        edge = Edge(self.new_names.get(written.node, written.node), written.output)
        outputs = self.operators[edge.node].signature.outputs if edge.node in self.operators else {}
        if edge.output not in outputs:
            wrong, there = (edge.output, outputs) if outputs else (edge.node, self.operators)
            raise GraphError(
                f"wire={{{end!r}: {source!r}}} names {output!r}, which is not an output; expected 'node.column', "
                f"{offer(wrong, there, 'with one of:')}",
                code="graph.unknown-output",
                node=end.partition(".")[0],
                output=output,
            )
        return edge

    # ---- edges

    def _node(self, name: str) -> Node:
        """A node of the changed graph, with its edges there."""
        operator, by_hand = self.operators[name], self.wires.get(name, {})
        ends = {field: End(name, field, type) for field, type in operator.signature.fields.items()}
        edges = self._edges_as_it_was(name)
        carried = {field: self._follow(edge, ends[field]) for field, edge in edges.items() if field not in by_hand}
        return Node(name, operator.named(name), {**carried, **by_hand})

    def _edges_as_it_was(self, name: str) -> Mapping[PortField, Edge]:
        """The edges of a node of the changed graph, in terms of the original; explicit ones may be included."""
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
        """The outputs that an operator in the place of a node may read, the preferred ones first."""
        remaining = set(self.graph.nodes).difference(self.drop, [node])
        ancestors = remaining & self.graph.ancestors(node)
        others = remaining - ancestors - self.graph.descendants(node)
        types = self.graph.types.items()
        return [{edge: typed for edge, typed in types if edge.node in pool} for pool in (ancestors, others)]

    def _follow(self, edge: Edge, end: End) -> Edge:
        """The source in the changed graph of an edge of the original one, given its end."""
        for name, rewritten in reversed(self.rewrites.items()):
            if edge in rewritten and not self._comes_first(end.node, name):
                return rewritten[edge]
        if edge.node in self.drop:
            return self._from_replacement_upstream(edge) or self._follow(self._bypass(edge, end), end)
        if edge.node in self.replace:
            return self._of_replacement(edge, end)
        return Edge(self.new_names[edge.node], edge.output)

    def _from_replacement_upstream(self, edge: Edge) -> Edge | None:
        """The output of an upstream replacement that newly writes the column of a dropped node."""
        written, upstream = self.graph.types[edge].type, self.graph.ancestors(edge.node)
        for old in self.replace.keys() & upstream:
            made = self.replace[old].signature.outputs.get(edge.output)
            if edge.output not in self.graph[old].signature.outputs and made is not None and same(made, written):
                return Edge(self.new_names[old], edge.output)
        return None

    def _bypass(self, edge: Edge, end: End) -> Edge:
        """The source of a reader of a dropped node: its only input that fits; for a gate, the column that passes."""
        if isinstance(self.graph[edge.node].operator, Gate):
            return self.graph[edge.node].inputs[PortField(ROWS, edge.output)]
        inputs = self.graph[edge.node].inputs.values()
        fitting = {e for e in inputs if accepts(end.expected, self.graph.types[e].type)}
        if len(fitting) != 1:
            found = ", ".join(sorted(map(str, fitting))) or "none"
            is_sink = self.old_names.get(end.node) in self.graph.sinks
            raise FixableError(
                f"{edge.node} cannot be dropped: {end} reads {edge} and expects {end.expected}, but not exactly one "
                f"input of {edge.node} fits (found: {found}).",
                f"Wire the port{' or drop its reader' if is_sink else ''}",
                [*({"wire": {str(end): str(e)}} for e in sorted(fitting)), *self._other_sources(edge, end, is_sink)],
                f"wire={{'{end}': 'node.column'}}{f', or drop {end.node} too' if is_sink else ''}",
                code="edit.lost-source",
                node=edge.node,
                port=str(end),
                known=sorted(map(str, fitting)),
            )
        return fitting.pop()

    def _other_sources(self, lost: Edge, end: End, is_sink: bool) -> Iterator[Verbs]:
        """The edits that wire `end` to another output of the changed graph, the nearest first, or drop its node."""
        before = self.graph.ancestors(lost.node)
        for name in sorted(reversed(self.operators), key=lambda new: self.old_names.get(new) not in before):
            for output, written in self.operators[name].signature.outputs.items():
                if name != end.node and accepts(end.expected, written):
                    yield {"wire": {str(end): f"{name}.{output}"}}
        if is_sink:
            yield {"drop": [self.old_names[end.node]]}

    def _of_replacement(self, edge: Edge, end: End) -> Edge:
        """The source of a reader of a replaced node: the output with the same name, else the only one that fits."""
        name, outputs = self.new_names[edge.node], self.replace[edge.node].signature.outputs
        if edge.output in outputs:
            return Edge(name, edge.output)
        fitting = [output for output, written in outputs.items() if accepts(end.expected, written)]
        if len(fitting) != 1:
            is_sink = self.old_names.get(end.node) in self.graph.sinks
            raise FixableError(
                f"{end} reads {edge} and expects {end.expected}, but the replacement {name} writes "
                f"{', '.join(outputs) or 'nothing'}.",
                f"Wire the port{' or drop its reader' if is_sink else ''}",
                self._other_sources(edge, end, is_sink),
                f"wire={{'{end}': 'node.column'}}",
                code="edit.lost-source",
                node=edge.node,
                port=str(end),
                known=fitting,
            )
        return Edge(name, fitting[0])

    def _comes_first(self, reader: str, inserted: str) -> bool:
        """Whether `reader` is inserted at the same anchor as `inserted`, before it or at its place."""
        if reader not in self.anchors or self.anchors[reader] != self.anchors[inserted]:
            return False
        order = list(self.anchors)
        return order.index(reader) <= order.index(inserted)

    # ---- sinks

    def _sinks(self) -> list[str]:
        """The remaining sinks, new nodes without outputs, and inserted nodes that return an unread value (`Sync`)."""
        rewritten_by = {self.anchors[name]: name for name, rewritten in self.rewrites.items() if rewritten}
        sinks = [rewritten_by.get(s, self.new_names[s]) for s in self.graph.sinks if s not in self.drop]
        without_outputs = [self.new_names[old] for old, op in self.replace.items() if not op.signature.outputs]
        sinks += [name for name in without_outputs if name not in sinks]
        sources = {edge.node for edges in self.wires.values() for edge in edges.values()}
        for name, anchor in self.anchors.items():
            if self.rewrites[name] or name in sources:
                continue
            outputs = self.operators[name].signature.outputs
            if not all(isinstance(t, ValueType) for t in outputs.values()):
                self._refuse_unread_insert(name, anchor, outputs)
            sinks.append(name)
        return sinks

    def _refuse_unread_insert(self, name: str, anchor: str, outputs: Mapping[str, FieldType]) -> None:
        """Refuse an inserted node whose columns no node would read."""
        self._refuse_second_kl(name)
        theirs = self.graph[anchor].signature.outputs
        output = next((new for new, t in outputs.items() if any(same(t, old) for old in theirs.values())), None)
        fixes, wire = suggest_readers(name, self.operators), f"wire={{'node.port': '{name}.{next(iter(outputs))}'}}"
        if output is not None:
            operator = type(self.operators[name]).__name__
            raise FixableError(
                f"{name} is inserted after {anchor} and writes {output} without reading {anchor}.{output}, so it does "
                f"not rewrite it, and no node reads {name}.",
                f"Replace {anchor}, replace={{{anchor!r}: {operator}(...)}}, or wire a reader to {name}",
                fixes,
                wire,
                code="edit.unread-node",
                node=name,
                anchor=anchor,
            )
        raise FixableError(
            f"{name} is inserted after {anchor} but rewrites none of its columns ({', '.join(theirs)}), so no node "
            f"reads {name}.",
            "Wire a reader to it",
            fixes,
            wire,
            code="edit.unread-node",
            node=name,
            anchor=anchor,
        )

    def _refuse_second_kl(self, name: str) -> None:
        """Refuse an unread node with the KL that another node counts: to wire it would count KL twice."""
        new, others = self.operators[name], {n: op for n, op in self.operators.items() if n != name}
        counting = next((n for n, op in others.items() if Effect.KL in op.effects), None)
        if Effect.KL not in new.effects or counting is None:
            return
        same_kind, kind = isinstance(others[counting], type(new)), type(new).__name__
        without: Verbs = {"set": {f"{counting}.kl": None}}
        raise FixableError(
            f"{self.graph.name} counts KL to the reference in {counting}, so {name} would count it a second time, and "
            f"no node reads {name}.",
            f"Leave {name} out, or change the KL that is counted",
            [] if same_kind else [added(without, wired) for wired in suggest_readers(name, self.operators)],
            f"edit(replace={{{counting!r}: {kind}(...)}})"
            if same_kind
            else f"set={{'{counting}.kl': None}}, wire={{'node.port': '{name}.{next(iter(new.signature.outputs))}'}}",
            code="edit.unread-node",
            node=name,
            counted_by=counting,
        )

    def _refuse_unread_edits(self, nodes: Mapping[str, Node], sinks: Sequence[str]) -> None:
        """Refuse an edit of nodes that no sink reaches, which would have no effect."""
        touched = [("replace", self.new_names[n]) for n in self.replace] + [("insert", n) for n in self.anchors]
        touched += [("rename", new) for new in self.rename.values()] + [("wire", n) for n in self.wires]
        for verb, name in touched:
            if name not in nodes:
                output = next(iter(self.operators[name].signature.outputs))  # one without outputs is a sink
                raise FixableError(
                    f"edit({verb}=...) names {name!r}, but no node of the changed graph reads it, and it is not a sink "
                    f"({', '.join(sinks)}).",
                    f"Leave {verb}= out, or wire a reader to it",
                    suggest_readers(name, self.operators),
                    f"wire={{'node.port': '{name}.{output}'}}",
                    code="edit.unread-node",
                    node=name,
                    verb=verb,
                )


def _writes(operator: Operator) -> bool:
    return any(use.mode == "writes" for use in operator.role_uses.values())
