"""`Graph.edit`: one atomic change.

Everything resolves against the graph as it was; what nothing reaches any more vanishes once, at the end; the original
is untouched.

- ``replace={"gae": GroupAdvantage()}``: the replacement has its own name. A port keeps the edge that the predecessor's
  port of that name has, else it takes the one ancestor that writes the column it wants, else the one node that writes
  it and does not depend on what is replaced.
- ``drop=["whiten"]``: a sink is gone; an inner node is bypassed where exactly one of its inputs is acceptable to its
  readers.
- ``insert={"length_penalty": After("reward", LengthPenalty())}``: every reader of what it rewrites moves to it. Its
  ports take what ``reward`` writes, else are found in the same way.
- ``wire={"gae.values": "old_values.values"}``: sets edges by hand and overrides all of the above.
- ``set={"generate.temperature": 0.7, "update_actor.loss.clip_high": 0.28}``: one parameter of an operator, or of a spec
  that is one; the others stay.
- ``rename={"old": "new"}``, ``bind={"rollout": ...}``, ``lag=1``, ``name="grpo"``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from flowrl.core.graph import Graph, Node
from flowrl.core.inference import Available
from flowrl.core.operator import Operator
from flowrl.core.ports import PortField
from flowrl.core.symbols import Edge
from flowrl.core.wiring import End, wire_by_type
from flowrl.data.record_types import ValueType, accepts
from flowrl.errors import GraphError, offer
from flowrl.spec import Spec, parameters

GraphT = TypeVar("GraphT", bound=Graph)
SpecT = TypeVar("SpecT", bound=Spec)


@dataclass(frozen=True)
class After:
    """Where `edit(insert=...)` puts an operator: behind `node`."""

    node: str
    operator: Operator


def edit(
    graph: GraphT,
    *,
    replace: Mapping[str, Operator] | None = None,
    drop: str | Iterable[str] = (),
    insert: Mapping[str, After] | None = None,
    set: Mapping[str, Any] | None = None,
    wire: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    bind: Mapping[str, Any] | None = None,
    lag: int | None = None,
    name: str | None = None,
) -> GraphT:
    """A changed copy of `graph`; see the module's docstring.

    Raises:
        GraphError: a node that is not there, one named twice, an edit after which it is not clear what a port reads;
            the message names the `wire=` that settles it.
        PortError: the changed graph connects what does not fit.
        BindError: a backend for a role that the changed graph does not have, or that cannot serve it.
    """
    drop = (drop,) if isinstance(drop, str) else tuple(drop)
    replace = _with_parameters(graph, replace or {}, set or {})
    insert, wire, rename, bind = insert or {}, wire or {}, rename or {}, bind or {}
    _refuse_unmapped(insert=insert, wire=wire, rename=rename, bind=bind)
    _refuse_misuse(graph, replace, drop, insert, rename)
    change = _Edit(graph, replace, drop, insert, rename, wire)
    sinks = change.sinks()
    nodes: dict[str, Node] = {}
    open_ends = [*sinks]
    while open_ends:  # only what the new graph reaches has to resolve
        reached = open_ends.pop()
        if reached not in nodes:
            nodes[reached] = change.node(reached)
            open_ends += nodes[reached].sources
    change.refuse_vanished(nodes, sinks)
    ordered = {n: nodes[n] for n in change.operators if n in nodes}
    changed = graph.build(name or graph.name, ordered, sinks, graph.lag if lag is None else lag)
    kept = {role: backend for role, backend in graph.bindings.items() if role in changed.roles()}
    return changed.bound({**kept, **bind})


def _with_parameters(graph: Graph, replace: Mapping[str, Operator], set: Mapping[str, Any]) -> dict[str, Operator]:
    """`replace`, and for every node that `set` names its operator with these parameters.

    Raises:
        GraphError: a node or parameter that is not there, or a node that is replaced too.
    """
    _refuse_unmapped(replace=replace, set=set)
    changed: dict[str, Operator] = {}
    for path, value in set.items():
        node, _, parameter = path.partition(".")
        if node not in graph:
            raise GraphError(
                f"edit(set={{{path!r}: ...}}) names {node!r}, which {graph.name} does not have; "
                f"{offer(node, graph.nodes)}"
            )
        if node in replace:
            raise GraphError(f"edit replaces {node!r} and sets {path!r}; give the parameter to the replacement.")
        operator = changed.get(node, graph[node].operator)
        changed[node] = _with(operator, node, parameter, value, path).named(node)
    return {**replace, **changed}


def _with(spec: SpecT, where: str, parameter: str, value: Any, path: str) -> SpecT:
    """`spec` with another value of a parameter, which may be one of a spec that is a parameter: ``loss.clip_high``."""
    name, _, inner = parameter.partition(".")
    if name not in (known := parameters(spec)):
        raise GraphError(f"edit(set={{{path!r}: ...}}) does not name a parameter; {offer(name, known, f'{where} has')}")
    if inner:
        if not isinstance(known[name], Spec):
            raise GraphError(
                f"edit(set={{{path!r}: ...}}) goes into {where}.{name}, which is {known[name]!r} and has no "
                f"parameters; set it as a whole: set={{'{where}.{name}': ...}}."
            )
        value = _with(known[name], f"{where}.{name}", inner, value, path)
    return cast("SpecT", dataclasses.replace(cast(Any, spec), **{name: value}))


def _refuse_unmapped(**verbs: Any) -> None:
    """Refuse anything but a mapping for the verbs that say what happens to which node or role."""
    for verb, given in verbs.items():
        if not isinstance(given, Mapping):
            raise GraphError(f"edit({verb}={given!r}) does not say where; expected {verb}={{{_EXAMPLES[verb]}}}.")


_EXAMPLES = {
    "replace": "'gae': GAE(lam=0.9)",
    "set": "'gae.lam': 0.9",
    "insert": "'length_penalty': After('reward', LengthPenalty())",
    "wire": "'gae.values': 'value.values'",
    "rename": "'gae': 'advantage'",
    "bind": "'rollout': TorchRollout()",
}


def _refuse_misuse(
    graph: Graph,
    replace: Mapping[str, Operator],
    drop: Sequence[str],
    insert: Mapping[str, After],
    rename: Mapping[str, str],
) -> None:
    """Refuse what is wrong whatever the types are."""
    for node, operator in replace.items():
        if not isinstance(operator, Operator):
            raise GraphError(f"edit(replace={{{node!r}: ...}}) gives {_no_operator(operator)}.")
    for node, after in insert.items():
        if not isinstance(after, After):
            raise GraphError(
                f"edit(insert={{{node!r}: {after!r}}}) does not say where; expected "
                f"{{{node!r}: After('reward', Operator())}}."
            )
        if not isinstance(after.operator, Operator):
            raise GraphError(
                f"edit(insert={{{node!r}: After({after.node!r}, ...)}}) gives {_no_operator(after.operator)}."
            )
    named = [("replace", n) for n in replace] + [("drop", n) for n in drop] + [("rename", n) for n in rename]
    named += [("insert", after.node) for after in insert.values()]
    for verb, node in named:
        if node not in graph:
            raise GraphError(
                f"edit({verb}=...) names {node!r}, which {graph.name} does not have; {offer(node, graph.nodes)}"
            )
    changed = [node for verb, node in named if verb != "insert"]
    if twice := next((n for n in changed if changed.count(n) > 1), None):
        raise GraphError(
            f"edit names {twice!r} more than once in replace=, set=, drop= and rename=; name it once, and edit the "
            f"result for the rest."
        )
    if anchor := next((after.node for after in insert.values() if after.node in drop), None):
        raise GraphError(f"edit inserts after {anchor!r} and drops it; use replace={{{anchor!r}: ...}}.")
    if source := next((n for n in drop if graph[n].is_input), None):
        raise GraphError(f"edit drops the input {source!r}; an input falls away by itself once nothing reads it.")
    names = [op.name for op in replace.values()] + list(rename.values()) + list(insert)
    names += [n for n in graph.nodes if n not in (*replace, *drop, *rename)]
    if clash := next((n for n in names if names.count(n) > 1), None):
        other = f"{clash}_2nd"
        by_key = f"insert={{{other!r}: ...}}" if clash in insert else f"rename={{...: {other!r}}}"
        how = by_key if clash in (*insert, *rename.values()) else f'.named("{other}")'
        raise GraphError(f"edit leaves two nodes named {clash!r}; give one another name: {how}.")


def _no_operator(given: Any) -> str:
    if isinstance(given, type) and issubclass(given, Operator):
        return f"the class {given.__name__}; expected an operator, which has parameters: {given.__name__}(...)"
    return f"{given!r}, which is not an operator; expected one, such as GAE(lam=0.9)"


class _Edit:
    """The graph as it was, and how its edges carry over into the new one.

    Attributes:
        operators: of every node that the new graph may have, by new name, in order.
    """

    def __init__(
        self,
        graph: Graph,
        replace: Mapping[str, Operator],
        drop: Sequence[str],
        insert: Mapping[str, After],
        rename: Mapping[str, str],
        wire: Mapping[str, str],
    ) -> None:
        self.graph, self.replace, self.drop, self.insert, self.rename = graph, replace, drop, insert, rename
        self.new_names = {n: n for n in graph.nodes} | {old: op.name for old, op in replace.items()} | dict(rename)
        self.old_names = {self.new_names[n]: n for n in graph.nodes if n not in drop}
        self.operators = {new: replace.get(old, graph[old].operator) for new, old in self.old_names.items()}
        self.operators |= {name: after.operator for name, after in insert.items()}
        self.rewrites = {name: self._rewritten(name, after) for name, after in insert.items()}
        self.wires = self._parse_wires(wire)

    def _rewritten(self, name: str, after: After) -> dict[Edge, Edge]:
        """The outputs of its anchor that an inserted operator rewrites: those of the same kind, dtype and axes."""
        return {
            Edge(after.node, old): Edge(name, new)
            for old, old_type in self.graph[after.node].operator.signature.outputs.items()
            for new, new_type in after.operator.signature.outputs.items()
            if accepts(old_type, new_type) and accepts(new_type, old_type)
        }

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

    def node(self, name: str) -> Node:
        """A node of the new graph, with every edge from where it starts there."""
        operator, by_hand = self.operators[name], self.wires.get(name, {})
        ends = {field: End(name, field, wanted) for field, wanted in operator.signature.fields.items()}
        edges = self._edges_as_it_was(name)
        carried = {field: self.follow(edge, ends[field]) for field, edge in edges.items() if field not in by_hand}
        return Node(name, operator.named(name), {**carried, **by_hand})

    def _edges_as_it_was(self, name: str) -> Mapping[PortField, Edge]:
        """The edges of a node of the new graph, in terms of the old one; those that are set by hand may be among them.

        A replacement inherits its predecessor's; an inserted node reads its anchor before anything else.
        """
        operator, types, by_hand = self.operators[name], self.graph.types, self.wires.get(name, {})
        if name in self.insert:
            anchor = self.insert[name].node
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

    def follow(self, edge: Edge, end: End) -> Edge:
        """Where an edge of the graph as it was starts in the new one, given where it ends."""
        for name, rewritten in reversed(self.rewrites.items()):
            if edge in rewritten and not self._comes_first(end.node, name):
                return rewritten[edge]
        if edge.node in self.drop:
            return self.follow(self._bypass(edge, end), end)
        if edge.node in self.replace:
            return self._of_replacement(edge, end)
        return Edge(self.new_names[edge.node], edge.output)

    def _bypass(self, edge: Edge, end: End) -> Edge:
        """What a reader of a dropped node reads instead: the one input of that node that fits."""
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
                f"{end} reads {edge} and wants {end.wanted}, and the replacement {name} writes {', '.join(outputs)}; "
                f"say what it should read: wire={{'{end}': 'node.column'}}."
            )
        return Edge(name, fitting[0])

    def _comes_first(self, reader: str, inserted: str) -> bool:
        """Whether `reader` is itself inserted at the anchor of `inserted`, at its place or before it."""
        if reader not in self.insert or self.insert[reader].node != self.insert[inserted].node:
            return False
        order = list(self.insert)
        return order.index(reader) <= order.index(inserted)

    def sinks(self) -> list[str]:
        """The old sinks that are left, and inserted nodes that return a value which nobody reads (a `Sync`, say)."""
        rewritten_by = {after.node: name for name, after in self.insert.items() if self.rewrites[name]}
        sinks = [rewritten_by.get(s, self.new_names[s]) for s in self.graph.sinks if s not in self.drop]
        # A dropped sink (a Sync, say) must not take the update that it read with it; rules then say what is missing.
        read = [n for s in self.graph.sinks if s in self.drop for n in self.graph[s].sources if n not in self.drop]
        sinks += [self.new_names[n] for n in read if self.graph[n].writes]
        sources = {edge.node for edges in self.wires.values() for edge in edges.values()}
        for name, after in self.insert.items():
            if self.rewrites[name] or name in sources:
                continue
            if not all(isinstance(t, ValueType) for t in after.operator.signature.outputs.values()):
                raise GraphError(
                    f"{name} is inserted after {after.node} but rewrites none of its columns "
                    f"({', '.join(self.graph[after.node].operator.signature.outputs)}), so nothing would read it; wire "
                    f"a reader to it: wire={{'node.port': '{name}.{next(iter(after.operator.signature.outputs))}'}}."
                )
            sinks.append(name)
        if not sinks:
            raise GraphError(
                f"edit drops every sink ({', '.join(self.graph.sinks)}), so nothing would be computed; keep one."
            )
        return sinks

    def refuse_vanished(self, nodes: Mapping[str, Node], sinks: Sequence[str]) -> None:
        """Refuse an edit of nodes that fall away: it would silently do nothing."""
        touched = [("replace", self.new_names[n]) for n in self.replace] + [("insert", n) for n in self.insert]
        touched += [("rename", new) for new in self.rename.values()] + [("wire", n) for n in self.wires]
        for verb, name in touched:
            if name not in nodes:
                raise GraphError(
                    f"edit({verb}=...) names {name!r}, which nothing reads in the graph that is left, so it would fall "
                    f"away; the sinks are {', '.join(sinks)}: leave {verb}= out, or wire a reader to it: "
                    f"wire={{'node.port': '{name}.{next(iter(self.operators[name].signature.outputs))}'}}."
                )
