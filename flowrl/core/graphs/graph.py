"""Graphs as data: immutable nodes, and what can be asked of them. `flowrl.Graph` adds the verbs."""

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
from flowrl.core.graphs.lag import ON_POLICY, CanSwap, Lag, lag_of
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.operator_validation import refuse_misdeclared, sample_steps
from flowrl.core.operators.ports import PortField, Signature
from flowrl.core.operators.roles import RoleRef
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.core.operators.when import ALWAYS, When, first_idle
from flowrl.errors import BindError, GraphError, offer, type_of
from flowrl.protocols.backend import members, refuse_unfit
from flowrl.protocols.protocols import Synced
from flowrl.record_types import record_columns
from flowrl.records import rows_of_draw


class Input(Operator):
    """The node of an algorithm's input: it computes nothing, its outputs are the columns of `record`."""

    record: type

    @property
    def signature(self) -> Signature:
        return Signature({}, {}, record_columns(self.record), self.record)

    @property
    def rows_factor(self) -> int:
        """The rows of a draw: 1, unless the record says that they are more."""
        return rows_of_draw(self.record)

    def __repr__(self) -> str:
        return f"Input({self.record.__name__})"


class Use(NamedTuple):
    """One node's use of a role's weights, by one of its operator's role fields."""

    node: str
    field: str
    role: str
    mode: Literal["reads", "writes"]
    protocol: type

    def goes_through(self, protocol: type) -> bool:
        """Whether the engine is asked for all of `protocol`: by itself, by one that extends it, or by one alike."""
        return members(protocol) <= members(self.protocol)


@dataclass(frozen=True)
class Node:
    """An operator in a graph: where each field of its ports comes from.

    Raises:
        GraphError: a role field holds a live engine; graphs are drawn, saved and bound, so they only name roles.
    """

    name: str
    operator: Operator
    inputs: Mapping[PortField, Edge]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        refuse_misdeclared(self.name, self.operator)
        for name in self.operator.role_uses:
            if not isinstance(engine := getattr(self.operator, name), RoleRef):
                raise GraphError(
                    f"{self.name}.{name} is a live engine ({type(engine).__name__}), and the nodes of a graph only "
                    f"name roles; write {type(self.operator).__name__}({name}=Role({name!r})), and bind the role: "
                    f"graph.bind({name}=...). An operator with a live engine can be called on tensors."
                )

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What the node does with which roles, in the order of the operator's fields."""
        return tuple(
            Use(self.name, field_name, getattr(self.operator, field_name).name, use.mode, use.protocol)
            for field_name, use in self.operator.role_uses.items()
        )

    @cached_property
    def signature(self) -> Signature:
        """The ports of its operator."""
        return self.operator.signature

    @property
    def when(self) -> When:
        """In which steps it runs, as far as that is up to itself: it does not run where a source of it does not."""
        return self.operator._when

    def in_step(self, step: int) -> Node:
        """The node with the numbers that its operator has in a step; itself where these do not change."""
        operator = self.operator.in_step(step)
        return self if operator is self.operator else replace(self, operator=operator)

    @cached_property
    def effects(self) -> frozenset[str]:
        """What its operator does, in any step, that rules look for."""
        return frozenset().union(*(said.effects for said in sample_steps(self.operator)))

    @cached_property
    def initial_operator(self) -> Operator:
        """Its operator with plain numbers: what it says of itself by them is the same in all steps."""
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
        """How many updates its weights may be ahead of its rows; see `Operator.prior_updates`."""
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
        """Its roles, those that it writes first."""
        return list(dict.fromkeys([*self.writes, *self.reads]))

    @cached_property
    def home(self) -> str | None:
        """The role in whose process it runs: the one that it writes, else the one that it reads; None without any."""
        return next(iter(self.roles), None)

    @cached_property
    def is_sync(self) -> bool:
        """Whether it carries weights to an engine that generates."""
        return any(use.goes_through(Synced) and use.mode == "writes" for use in self.uses)

    @property
    def is_input(self) -> bool:
        return isinstance(self.operator, Input)

    @cached_property
    def sources(self) -> list[str]:
        """The nodes it reads from, without repetition."""
        return list(dict.fromkeys(edge.node for edge in self.inputs.values()))


def refuse_no_graph(given: object) -> None:
    """Raise a `GraphError` for what is no `Graph`, which says how to get one from it."""
    if isinstance(given, Graph):
        return
    if isinstance(given, str | Path):
        graph = f"flowrl.load({str(given)!r})"
    else:
        graph = f"{getattr(given, '__name__', 'algorithm')}(...)" if callable(given) else "job.graph"
    raise GraphError(f"{type_of(given)} is not a graph; expected a Graph: {graph}.")


def _in_order(data: nx.DiGraph[str]) -> list[str]:
    """Nodes by what they depend on, and else by their position; refuses a cycle."""
    try:
        return list(nx.lexicographical_topological_sort(data, key=lambda n: data.nodes[n]["position"]))
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(data)]
        raise GraphError(
            f"the nodes {' -> '.join([*cycle, cycle[0]])} form a cycle; within a step a graph is acyclic, and the "
            f"one edge across steps is Sync -> Generate, which is implied."
        ) from None


def prune_gates(nodes: Mapping[str, Node], sinks: Sequence[str]) -> Mapping[str, Node]:
    """The nodes that the sinks reach, with gates that let through just what is read behind them: each column under its
    own name where one of that name passes, else under those of its source and of itself. Without gates, all nodes."""
    if not any(isinstance(node.operator, Gate) for node in nodes.values()):
        return nodes
    read = _read_of_gates(nodes, sinks)
    gates: dict[str, dict[str, str]] = {}  # by gate, the new names of what passes
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
            kept = {field: edge for field, edge in inputs.items() if field.port != ROWS}
            inputs = kept | {PortField(ROWS, new[o]): inputs[PortField(ROWS, o)] for o in order}
        changed[name] = replace(node, operator=operator, inputs={field: moved(edge) for field, edge in inputs.items()})
    return changed


def _read_of_gates(nodes: Mapping[str, Node], sinks: Sequence[str]) -> dict[str, set[str]]:
    """By node, the outputs that are read on the way to the sinks; of gates that are sinks, all."""
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
    """A dataflow graph: exactly what its sinks reach.

    Args:
        name: the algorithm's name.
        nodes: by name, in topological order.
        sinks: the nodes whose outputs are wanted.
        lag: by how far generation may run ahead, on the back-edge from `Sync` to `Generate`.
        bindings: backends by role, as far as they are bound.
        allow: the rules that it may break, each with the reason.
    """

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
        """A graph of those of `nodes` that `sinks` reach, checked. Through its gates pass the columns that are read.

        Raises:
            GraphError: no name, no sink, an edge from nowhere, a cycle (which is named), or a lag without a back-edge.
            PortError: a connection that does not fit.
        """
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w .+-]*", name):
            raise GraphError(
                f"{name!r} is no name of a graph; expected letters, digits, spaces and any of _.+- (it names pictures "
                f"and folders), such as 'grpo'."
            )
        nodes = prune_gates(nodes, sinks)
        data: nx.DiGraph[str] = nx.DiGraph()
        for position, node in enumerate(nodes.values()):
            data.add_node(node.name, position=position)
        for node in nodes.values():
            for port_field, edge in node.inputs.items():
                if edge.node not in nodes or edge.output not in nodes[edge.node].signature.outputs:
                    raise GraphError(
                        f"{node.name}.{port_field} comes from {edge}, which {name} does not have; it has the nodes "
                        f"{', '.join(nodes)}."
                    )
                data.add_edge(edge.node, node.name)
        if not sinks:
            raise GraphError(f"{name} has no sink, so nothing would be computed; return at least one output.")
        if unknown := [sink for sink in sinks if not isinstance(sink, str) or sink not in nodes]:
            raise GraphError(f"{name} has no node {unknown[0]!r} to be a sink; {offer(unknown[0], nodes)}")
        reached = set(sinks).union(*(nx.ancestors(data, sink) for sink in sinks))
        graph = cls(
            name,
            MappingProxyType({n: nodes[n] for n in _in_order(data.subgraph(reached))}),
            tuple(dict.fromkeys(sinks)),
            lag_of(name, lag),
            MappingProxyType(dict(bindings or {})),
            MappingProxyType(dict(allow or {})),
        )
        _ = graph.types  # every connection is checked here
        graph._check_lag()
        return graph

    def refuse_idle(self) -> None:
        """Refuse a step in which none of the sinks runs: its prompts would be drawn for nothing.

        Raises:
            GraphError: naming the step.
        """
        if (idle := first_idle([self.whens(sink) for sink in self.sinks])) is not None:
            raise GraphError(
                f"none of the sinks of {self.name} ({', '.join(self.sinks)}) runs in step {idle + 1}, so its prompts "
                f"would be drawn for nothing; expected one in every step: change when(every=..., start=...) of one."
            )

    def _check_lag(self) -> None:
        """Raise a `GraphError` for a lag that has no back-edge, or that has spans where nothing could swap weights."""
        if self.lag.versions and not self.back_edges:
            raise GraphError(
                f"lag={self.lag} belongs to the back-edge Sync -> Generate, which {self.name} does not have; add a "
                f"Sync, or edit(lag=0)."
            )
        if self.lag.spans and not any(isinstance(node.operator, CanSwap) for node in self.nodes.values()):
            raise GraphError(
                f"{self.lag!r} lets weights change under answers that are under way, and {self.name} has no node that "
                f"could change them so; expected a Sync, or edit(lag={self.lag.versions})."
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
            raise GraphError(f"the graph {self.name} has no node {name!r}; {offer(name, self.nodes)}")
        return self.nodes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.nodes

    @cached_property
    def inputs(self) -> dict[str, type]:
        """Record class of every input."""
        return {n.name: n.operator.record for n in self.nodes.values() if isinstance(n.operator, Input)}

    @cached_property
    def network(self) -> nx.DiGraph[str]:
        """The data edges as a networkx graph: nodes carry ``operator``, edges ``fields`` (`PortField` to `Edge`)."""
        network: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for node in self.nodes.values():
            network.add_node(node.name, operator=node.operator)
            for source in node.sources:
                network.add_edge(source, node.name, fields={f: e for f, e in node.inputs.items() if e.node == source})
        nx.freeze(network)
        return network

    @property
    def back_edges(self) -> list[tuple[str, str]]:
        """The edges across steps: from each node that writes an engine's weights to each that generates with them."""
        engines = [uses for uses in self.roles().values() if any(use.goes_through(Synced) for use in uses)]
        pairs = ((one, other) for uses in engines for one in uses for other in uses)
        return [(one.node, other.node) for one, other in pairs if (one.mode, other.mode) == ("writes", "reads")]

    @property
    def generators(self) -> list[str]:
        """The roles that generate."""
        return [
            role
            for role, uses in self.roles().items()
            if any(use.goes_through(Synced) and use.mode == "reads" for use in uses)
        ]

    @property
    def trained(self) -> list[str]:
        """The roles whose weights are trained."""
        return [
            role
            for role, uses in self.roles().items()
            if any(use.mode == "writes" and not use.goes_through(Synced) for use in uses)
        ]

    def bound(self, bindings: Mapping[str, Any]) -> Self:
        """The same graph with exactly these backends.

        Raises:
            BindError: a role that the graph does not have, or a backend that cannot serve what the graph asks of it.
        """
        roles = self.roles()
        for role, backend in bindings.items():
            if role not in roles:
                raise BindError(f"{self.name} has no role {role!r} to bind; {offer(role, roles)}")
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
        """What says in which steps a node runs: those in which all of these do."""
        found = (self[other].when for other in (name, *sorted(self.ancestors(name))))
        return tuple(dict.fromkeys(when for when in found if when != ALWAYS))

    def roles(self) -> dict[str, list[Use]]:
        """Who uses which role, and how."""
        roles: dict[str, list[Use]] = {}
        for node in self.nodes.values():
            for use in node.uses:
                roles.setdefault(use.role, []).append(use)
        return roles

    def subgraph(self, until: str | Iterable[str]) -> Self:
        """The part that computes `until` (a node, or several), to validate or to look at.

        Bindings of roles that it does not use are left out, and so is the lag if it has no back-edge.

        Raises:
            GraphError: a node that is not there.
        """
        if not isinstance(until, Iterable):
            raise GraphError(f"subgraph(until={until!r}) does not name nodes; {offer(until, self.nodes)}")
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
