"""Graphs as data: immutable nodes, and queries on them. `flowrl.Graph` adds the methods that edit, bind and draw."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import networkx as nx

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.inference import infer
from flowrl.core.graphs.lag import ON_POLICY, Lag, SupportsLiveSync, lag_of
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.operator_validation import refuse_live_engines, refuse_misdeclared, sample_steps
from flowrl.core.operators.ports import PortField, Signature, signature_of_record
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.core.operators.when import ALWAYS, When, first_idle
from flowrl.errors import BindError, GraphError, offer, type_of
from flowrl.protocols.backend import members, refuse_unfit
from flowrl.protocols.protocols import Synced
from flowrl.records import rows_per_item


class Input(Operator):
    """The node of an algorithm's input: its outputs are the columns of `record`."""

    record: type

    @property
    def signature(self) -> Signature:
        return signature_of_record(self.record)

    @property
    def rows_factor(self) -> int:
        """The rows per sampled prompt: 1, unless the record declares more."""
        return rows_per_item(self.record)

    def __repr__(self) -> str:
        return f"Input({self.record.__name__})"


class Use(NamedTuple):
    """One node's use of a role's weights, through one role field of its operator.

    `asked` is a use by a field of several roles, such as ``others.user``: the node may ask it, but what the node writes
    are not its samples.
    """

    node: str
    field: str
    role: str
    mode: Literal["reads", "writes"]
    protocol: type
    asked: bool = False

    def goes_through(self, protocol: type) -> bool:
        """Whether the use needs every member of `protocol`."""
        return members(protocol) <= members(self.protocol)


@dataclass(frozen=True)
class Node:
    """An operator in a graph, and the edge that each field of its ports reads."""

    name: str
    operator: Operator
    inputs: Mapping[PortField, Edge]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        refuse_misdeclared(self.name, self.operator)
        refuse_live_engines(self.name, self.operator)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """Its uses of roles, in the order of the operator's fields."""
        return tuple(
            Use(self.name, path, ref.name, use.mode, use.protocol, use.several)
            for field, use in self.operator.role_uses.items()
            for path, ref in use.of(self.operator, field).items()
        )

    @cached_property
    def signature(self) -> Signature:
        """The ports of its operator."""
        return self.operator.signature

    @property
    def when(self) -> When:
        """The steps in which it runs by itself; it also skips the steps that one of its sources skips."""
        return self.operator._when

    def in_step(self, step: int) -> Node:
        """The node with the values of its operator's schedules in a step; itself if it has none."""
        operator = self.operator.in_step(step)
        return self if operator is self.operator else replace(self, operator=operator)

    @cached_property
    def effects(self) -> frozenset[str]:
        """What its operator does, in any step, that rules look for."""
        return frozenset().union(*(operator.effects for operator in sample_steps(self.operator)))

    @cached_property
    def initial_operator(self) -> Operator:
        """Its operator with plain numbers instead of schedules, so that what it declares is the same in all steps."""
        return sample_steps(self.operator)[0]

    @property
    def rows_factor(self) -> int:
        """How many rows go out for every row that comes in."""
        return self.initial_operator.rows_factor

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """Parameters of its operator that must divide the number of rows."""
        return self.initial_operator.row_divisors

    @property
    def prior_updates(self) -> int:
        """See `Operator.prior_updates`."""
        return self.initial_operator.prior_updates

    @cached_property
    def reads(self) -> list[str]:
        """The roles whose weights it reads."""
        return list(dict.fromkeys(use.role for use in self.uses if use.mode == "reads"))

    @cached_property
    def writes(self) -> list[str]:
        """The roles whose weights it writes."""
        return list(dict.fromkeys(use.role for use in self.uses if use.mode == "writes"))

    @cached_property
    def roles(self) -> list[str]:
        """Its roles; those that it writes come first."""
        return list(dict.fromkeys([*self.writes, *self.reads]))

    @cached_property
    def home(self) -> str | None:
        """The role whose process runs it: the first that it writes, else the first that it reads; None without any."""
        return next(iter(self.roles), None)

    @cached_property
    def is_sync(self) -> bool:
        """Whether it sends weights to an engine that generates."""
        return any(use.goes_through(Synced) and use.mode == "writes" for use in self.uses)

    @property
    def is_input(self) -> bool:
        return isinstance(self.operator, Input)

    @cached_property
    def sources(self) -> list[str]:
        """The nodes that it reads from, without duplicates."""
        return list(dict.fromkeys(edge.node for edge in self.inputs.values()))


def refuse_non_graph(given: object) -> None:
    """Refuse a value that is not a `Graph`; the message shows how to get one from it."""
    if isinstance(given, Graph):
        return
    if isinstance(given, str | Path):
        graph = f"flowrl.load({str(given)!r})"
    else:
        graph = f"{getattr(given, '__name__', 'algorithm')}(...)" if callable(given) else "job.graph"
    raise GraphError(
        f"Expected a Graph, not {type_of(given)}. Pass {graph}.", code="graph.not-a-graph", found=type(given).__name__
    )


def unknown_node(what: str, node: object, nodes: Iterable[str]) -> GraphError:
    """The error for `what`; it lists the nodes, and the one with the most similar name."""
    return GraphError(f"{what}; {offer(node, nodes)}", code="graph.unknown-node", node=node)


def _in_order(data: nx.DiGraph[str]) -> list[str]:
    """Nodes in topological order, ties by their position; refuses a cycle."""
    try:
        return list(nx.lexicographical_topological_sort(data, key=lambda n: data.nodes[n]["position"]))
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(data)]
        raise GraphError(
            f"The nodes {' -> '.join([*cycle, cycle[0]])} form a cycle. A graph is acyclic within a step; the edge "
            f"Sync -> Generate to the next step is implicit. Wire one of these nodes to another source.",
            code="graph.cycle",
            nodes=cycle,
        ) from None


def prune_gates(nodes: Mapping[str, Node], sinks: Sequence[str]) -> Mapping[str, Node]:
    """The nodes that the sinks reach, with gates that pass only columns that downstream nodes read; without gates, all
    nodes. A column keeps its name if no other column of that name passes, else the name has its source's as prefix."""
    if not any(isinstance(node.operator, Gate) for node in nodes.values()):
        return nodes
    read = _read_of_gates(nodes, sinks)
    gates: dict[str, dict[str, str]] = {}  # by gate, the new names of the columns that pass
    for name, node in nodes.items():
        if isinstance(node.operator, Gate):
            passes = {o: node.inputs[PortField(ROWS, o)] for o in node.operator.columns if o in read.get(name, ())}
            plain = [edge.output for edge in passes.values()]
            gates[name] = {o: e.output if plain.count(e.output) == 1 else str(e) for o, e in passes.items()}

    def moved(edge: Edge) -> Edge:
        return edge._replace(output=gates.get(edge.node, {}).get(edge.output, edge.output))

    changed = {}
    for name, node in nodes.items():
        if name not in read:
            continue
        operator, inputs = node.operator, node.inputs
        if isinstance(operator, Gate):
            new = gates[name]
            order = sorted(new, key=new.__getitem__)
            operator = operator.passing({new[o]: operator.columns[o] for o in order})
            others = {field: edge for field, edge in inputs.items() if field.port != ROWS}
            inputs = others | {PortField(ROWS, new[o]): inputs[PortField(ROWS, o)] for o in order}
        changed[name] = replace(node, operator=operator, inputs={field: moved(edge) for field, edge in inputs.items()})
    return changed


def _read_of_gates(nodes: Mapping[str, Node], sinks: Sequence[str]) -> dict[str, set[str]]:
    """By node, its outputs that nodes on the way to the sinks read; all outputs of a sink."""
    read: dict[str, set[str]] = {}
    ends = [sink for sink in sinks if isinstance(sink, str) and sink in nodes]
    for sink in ends:
        read.setdefault(sink, set()).update(nodes[sink].signature.outputs)
    while ends:
        node = nodes[ends.pop()]
        for end, edge in node.inputs.items():
            passes = isinstance(node.operator, Gate) and end.port == ROWS
            if edge.node in nodes and not (passes and end.field not in read[node.name]):
                known = read.setdefault(edge.node, set())
                if edge.output not in known:
                    known.add(edge.output)
                    ends.append(edge.node)
    return read


@dataclass(frozen=True)
class Graph:
    """A dataflow graph; see `flowrl.graph.Graph`."""

    name: str
    nodes: Mapping[str, Node]
    sinks: tuple[str, ...]
    lag: Lag = ON_POLICY
    bindings: Mapping[str, Any] = field(default_factory=dict)
    allow: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        name: str,
        nodes: Mapping[str, Node],
        sinks: Sequence[str],
        lag: int | Lag = 0,
        bindings: Mapping[str, Any] | None = None,
        allow: Mapping[str, str] | None = None,
    ) -> Self:
        """A checked graph of those of `nodes` that `sinks` reach."""
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w .+-]*", name):
            raise GraphError(
                f"Invalid graph name {name!r}: use letters, digits, spaces or `_.+-`, as in 'grpo'.",
                code="graph.invalid-name",
                given=name,
            )
        nodes = prune_gates(nodes, sinks)
        data: nx.DiGraph[str] = nx.DiGraph()
        for position, node in enumerate(nodes.values()):
            data.add_node(node.name, position=position)
        for node in nodes.values():
            for port_field, edge in node.inputs.items():
                if edge.node not in nodes or edge.output not in nodes[edge.node].signature.outputs:
                    raise GraphError(
                        f"{node.name}.{port_field} reads {edge}, which {name} does not have; it has the nodes "
                        f"{', '.join(nodes)}.",
                        code="graph.unknown-output",
                        node=node.name,
                        port=str(port_field),
                        output=str(edge),
                    )
                data.add_edge(edge.node, node.name)
        if not sinks:
            raise GraphError(
                f"{name} has no sink, so it computes nothing. Return at least one output.", code="graph.no-sink"
            )
        if unknown := [sink for sink in sinks if not isinstance(sink, str) or sink not in nodes]:
            raise unknown_node(f"{name} has no node {unknown[0]!r} for a sink", unknown[0], nodes)
        reached = set(sinks).union(*(nx.ancestors(data, sink) for sink in sinks))
        graph = cls(
            name,
            MappingProxyType({n: nodes[n] for n in _in_order(data.subgraph(reached))}),
            tuple(dict.fromkeys(sinks)),
            lag_of(name, lag),
            MappingProxyType(dict(bindings or {})),
            MappingProxyType(dict(allow or {})),
        )
        _ = graph.types  # checks every edge
        graph._check_lag()
        return graph

    def refuse_idle(self) -> None:
        """Refuse a graph with a step in which no sink runs: its prompts would be sampled for nothing."""
        if (idle := first_idle([self.whens(sink) for sink in self.sinks])) is not None:
            raise GraphError(
                f"No sink of {self.name} ({', '.join(self.sinks)}) runs in step {idle + 1}, so its prompts would be "
                f"sampled for nothing. Change when(every=..., start=...) of one, so that a sink runs in every step.",
                code="graph.idle-step",
                step=idle + 1,
            )

    def _check_lag(self) -> None:
        if self.lag.versions and not self.back_edges:
            raise GraphError(
                f"lag={self.lag} needs the edge Sync -> Generate to the next step, which {self.name} does not have. "
                f"Add a Sync, or pass edit(lag=0).",
                code="lag.unsupported",
                lag=self.lag,
            )
        if self.lag.spans and not any(isinstance(node.operator, SupportsLiveSync) for node in self.nodes.values()):
            raise GraphError(
                f"{self.lag!r} updates weights while requests are in flight, but no node of {self.name} can do that. "
                f"Use the operator Sync, or pass edit(lag={self.lag.versions}).",
                code="lag.unsupported",
                lag=self.lag,
            )

    @cached_property
    def types(self) -> Mapping[Edge, EdgeType]:
        """The type of every output."""
        types: dict[Edge, EdgeType] = {}
        for node in self.nodes.values():
            inputs = {port_field: (edge, types[edge]) for port_field, edge in node.inputs.items()}
            for output, typed in infer(node.name, node.operator, inputs, types).items():
                types[Edge(node.name, output)] = typed
        return MappingProxyType(types)

    def __getitem__(self, name: str) -> Node:
        if name not in self.nodes:
            raise unknown_node(f"The graph {self.name} has no node {name!r}", name, self.nodes)
        return self.nodes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.nodes

    @cached_property
    def inputs(self) -> dict[str, type]:
        """Record class of every input."""
        return {n.name: n.operator.record for n in self.nodes.values() if isinstance(n.operator, Input)}

    @cached_property
    def network(self) -> nx.DiGraph[str]:
        """The data edges as a networkx graph: nodes have ``operator``, edges ``fields`` (`PortField` to `Edge`)."""
        network: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for node in self.nodes.values():
            network.add_node(node.name, operator=node.operator)
            for source in node.sources:
                network.add_edge(source, node.name, fields={f: e for f, e in node.inputs.items() if e.node == source})
        nx.freeze(network)
        return network

    @property
    def back_edges(self) -> list[tuple[str, str]]:
        """The edges to the next step: from each node that writes an engine's weights to each that generates."""
        engines = [uses for uses in self.roles().values() if any(use.goes_through(Synced) for use in uses)]
        pairs = ((one, other) for uses in engines for one in uses for other in uses)
        return [(one.node, other.node) for one, other in pairs if (one.mode, other.mode) == ("writes", "reads")]

    @property
    def generators(self) -> list[str]:
        """The roles that generate."""
        roles = self.roles().items()
        return [role for role, uses in roles if any(use.goes_through(Synced) and use.mode == "reads" for use in uses)]

    @property
    def trained(self) -> list[str]:
        """The roles whose weights are trained."""
        return [
            role
            for role, uses in self.roles().items()
            if any(use.mode == "writes" and not use.goes_through(Synced) for use in uses)
        ]

    def bound(self, bindings: Mapping[str, Any]) -> Self:
        """The same graph with exactly these backends."""
        roles = self.roles()
        for role, backend in bindings.items():
            if role not in roles:
                raise BindError(
                    f"{self.name} has no role {role!r} to bind; {offer(role, roles)} To bind only its roles from many "
                    f"backends, pass bind(**{{role: backends[role] for role in graph.roles()}}).",
                    code="graph.unknown-role",
                    role=role,
                )
            for use in roles[role]:
                refuse_unfit(role, backend, use.node, use.protocol)
        return replace(self, bindings=MappingProxyType(dict(bindings)))

    def ancestors(self, name: str) -> set[str]:
        """The nodes that `name` depends on by data."""
        return set(nx.ancestors(self.network, self[name].name))

    def descendants(self, name: str) -> set[str]:
        """The nodes that depend on `name` by data."""
        return set(nx.descendants(self.network, self[name].name))

    def whens(self, name: str) -> tuple[When, ...]:
        """The conditions on the steps in which a node runs: all of them must hold."""
        found = (self[other].when for other in (name, *sorted(self.ancestors(name))))
        return tuple(dict.fromkeys(when for when in found if when != ALWAYS))

    def roles(self) -> dict[str, list[Use]]:
        """The uses of each role."""
        roles: dict[str, list[Use]] = {}
        for node in self.nodes.values():
            for use in node.uses:
                roles.setdefault(use.role, []).append(use)
        return roles

    def subgraph(self, until: str | Iterable[str]) -> Self:
        """The part that computes `until` (one or several nodes), for validation or inspection.

        It has only the bindings of its roles, and the lag only if it has a sync.

        Raises:
            GraphError: an unknown node.
        """
        if not isinstance(until, Iterable):
            raise unknown_node(f"subgraph(until={until!r}) does not name nodes", until, self.nodes)
        sinks = (until,) if isinstance(until, str) else tuple(until)
        part = self.build(self.name, self.nodes, sinks, allow=self.allow)
        bindings = {role: backend for role, backend in self.bindings.items() if role in part.roles()}
        return replace(part, lag=self.lag if part.back_edges else ON_POLICY, bindings=MappingProxyType(bindings))

    def __repr__(self) -> str:
        lines = [f"{self.name}: {len(self.nodes)} nodes -> {', '.join(self.sinks)}"]
        for node in self.nodes.values():
            operator = ".".join(filter(None, (repr(node.operator), str(node.when))))
            lines.append(f"  {node.name:<16} {operator}" + (f"  <- {', '.join(node.sources)}" if node.sources else ""))
        return "\n".join(lines)
