"""Graphs: immutable nodes, and what can be asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import networkx as nx
import xxhash

from flowrl.engines import Rollout, refuse_unfit
from flowrl.errors import BindError, GraphError, offer
from flowrl.operator import Operator
from flowrl.ports import Signature, record_columns
from flowrl.roles import RoleRef
from flowrl.symbols import Edge, Typed, infer

if TYPE_CHECKING:
    from flowrl.diff import Diff
    from flowrl.distributed.place import Place
    from flowrl.edit import After
    from flowrl.job import Job
    from flowrl.rules import Finding


class Input(Operator):
    """The node of an algorithm's input: it computes nothing, its outputs are the columns of `record`."""

    record: type

    @property
    def signature(self) -> Signature:
        return Signature({}, {}, record_columns(self.record), self.record)

    def __repr__(self) -> str:
        return f"Input({self.record.__name__})"


@dataclass(frozen=True)
class Node:
    """An operator in its place: where each slot of its ports comes from."""

    name: str
    operator: Operator
    inputs: Mapping[str, Edge]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))

    @property
    def sources(self) -> list[str]:
        """The nodes it reads from, without repetition."""
        return list(dict.fromkeys(edge.node for edge in self.inputs.values()))

    @property
    def is_input(self) -> bool:
        return isinstance(self.operator, Input)


class Use(NamedTuple):
    """One node's use of a role."""

    node: str
    mode: Literal["reads", "writes"]
    protocol: type


@dataclass(frozen=True)
class Graph:
    """A dataflow graph: exactly what its sinks reach.

    Args:
        name: the algorithm's name.
        nodes: by name, in topological order.
        sinks: the nodes that the graph is run for.
        lag: how many versions generation may run ahead, on the back-edge from `Sync` to `Generate`; 0 is on-policy.
        bindings: backends by role, as far as they are bound.
    """

    name: str
    nodes: Mapping[str, Node]
    sinks: tuple[str, ...]
    lag: int = 0
    bindings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def build(
        name: str,
        nodes: Mapping[str, Node],
        sinks: Sequence[str],
        lag: int = 0,
        bindings: Mapping[str, Any] | None = None,
    ) -> Graph:
        """A graph of those of `nodes` that `sinks` reach, checked.

        Raises:
            GraphError: no sink, an edge from nowhere, a cycle (which is named), or a lag without a back-edge.
            PortError: a connection that does not fit.
        """
        data: nx.DiGraph[str] = nx.DiGraph()
        for position, node in enumerate(nodes.values()):
            data.add_node(node.name, position=position)
        for node in nodes.values():
            for slot, edge in node.inputs.items():
                if edge.node not in nodes or edge.output not in nodes[edge.node].operator.signature.outputs:
                    raise GraphError(
                        f"{node.name}.{slot} comes from {edge}, which {name} does not have; it has the nodes "
                        f"{', '.join(nodes)}."
                    )
                data.add_edge(edge.node, node.name)
        if not sinks:
            raise GraphError(f"{name} has no sink, so nothing would be computed; name the nodes that it is run for.")
        if unknown := [sink for sink in sinks if sink not in nodes]:
            raise GraphError(f"{name} has no node {unknown[0]!r} to be a sink; {offer(unknown[0], nodes)}")
        reached = set(sinks).union(*(nx.ancestors(data, sink) for sink in sinks))
        data = data.subgraph(reached)
        try:
            order = list(nx.lexicographical_topological_sort(data, key=lambda n: data.nodes[n]["position"]))
        except nx.NetworkXUnfeasible:
            cycle = [edge[0] for edge in nx.find_cycle(data)]
            raise GraphError(
                f"the nodes {' -> '.join([*cycle, cycle[0]])} form a cycle; within a step a graph is acyclic, and the "
                f"one edge across steps is Sync -> Generate, which is implied."
            ) from None
        graph = Graph(
            name,
            MappingProxyType({n: nodes[n] for n in order}),
            tuple(dict.fromkeys(sinks)),
            lag,
            MappingProxyType(dict(bindings or {})),
        )
        _ = graph.types  # every connection is checked here
        if isinstance(lag, bool) or not isinstance(lag, int) or lag < 0:
            raise GraphError(
                f"{name} has lag={lag!r}; expected how many versions generation may run ahead: 0, 1, 2, ..."
            )
        if lag and not graph.back_edges:
            raise GraphError(
                f"lag={lag} belongs to the back-edge Sync -> Generate, which {name} does not have; add a Sync, or "
                "edit(lag=0)."
            )
        return graph

    @cached_property
    def types(self) -> Mapping[Edge, Typed]:
        """The type of every output."""
        types: dict[Edge, Typed] = {}
        for node in self.nodes.values():
            inputs = {slot: (edge, types[edge]) for slot, edge in node.inputs.items()}
            for output, typed in infer(node.name, node.operator, inputs, types).items():
                types[Edge(node.name, output)] = typed
        return MappingProxyType(types)

    def __getitem__(self, name: str) -> Node:
        if name not in self.nodes:
            raise GraphError(f"the graph {self.name} has no node {name!r}; {offer(name, self.nodes)}")
        return self.nodes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.nodes

    @property
    def inputs(self) -> dict[str, type]:
        """Record class of every input."""
        return {n.name: n.operator.record for n in self.nodes.values() if isinstance(n.operator, Input)}

    @cached_property
    def network(self) -> nx.DiGraph[str]:
        """The data edges as a networkx graph: nodes bear ``operator``, edges ``slots`` (slot to `Edge`)."""
        network: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for node in self.nodes.values():
            network.add_node(node.name, operator=node.operator)
            for source in node.sources:
                network.add_edge(source, node.name, slots={s: e for s, e in node.inputs.items() if e.node == source})
        nx.freeze(network)
        return network

    @property
    def back_edges(self) -> list[tuple[str, str]]:
        """The edges across steps: from each node that writes an engine's weights to each that generates with them."""
        engines = [(role, uses) for role, uses in self.roles().items() if any(u.protocol is Rollout for u in uses)]
        return [
            (writer.node, reader.node)
            for _, uses in engines
            for writer in uses if writer.mode == "writes"
            for reader in uses if reader.mode == "reads"
        ]  # fmt: skip

    @property
    def generators(self) -> list[str]:
        """The roles that generate."""
        return [r for r, uses in self.roles().items() if any(u.protocol is Rollout and u.mode == "reads" for u in uses)]

    @property
    def trained(self) -> list[str]:
        """The roles whose weights are trained."""
        return [
            r for r, uses in self.roles().items() if any(u.protocol is not Rollout and u.mode == "writes" for u in uses)
        ]

    def bound(self, bindings: Mapping[str, Any]) -> Graph:
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

    def roles(self) -> dict[str, list[Use]]:
        """Who uses which role, and how."""
        roles: dict[str, list[Use]] = {}
        for node in self.nodes.values():
            for field_name, use in node.operator.role_uses.items():
                ref = getattr(node.operator, field_name)
                if isinstance(ref, RoleRef):
                    roles.setdefault(ref.name, []).append(Use(node.name, use.mode, use.protocol))
        return roles

    def subgraph(self, until: str | Iterable[str]) -> Graph:
        """The part that computes `until` (a node, or several), for validation or for looking at.

        Bindings of roles that it does not use, and the lag of a back-edge that it does not have, fall away.
        """
        part = Graph.build(self.name, self.nodes, (until,) if isinstance(until, str) else tuple(until))
        bindings = {role: backend for role, backend in self.bindings.items() if role in part.roles()}
        return replace(part, lag=self.lag if part.back_edges else 0, bindings=MappingProxyType(bindings))

    def edit(
        self,
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
    ) -> Graph:
        """A changed copy, in one atomic call; see `flowrl.edit`."""
        from flowrl.edit import edit, with_parameters

        drop = (drop,) if isinstance(drop, str) else tuple(drop)
        operators = with_parameters(self, replace or {}, set or {})
        return edit(self, operators, drop, insert or {}, wire or {}, rename or {}, bind or {}, lag, name)

    def bind(self, *, place: Place | None = None, **backends: Any) -> Job:
        """Give roles their backends: ``graph.bind(actor=TorchTrainer(model), rollout=TorchRollout())``.

        Args:
            place: where they run, such as ``Colocate(gpus=2)``, on Ray; None is this process.
            backends: by role.
        """
        from flowrl.job import Job

        return Job(self.edit(bind=backends), place)

    def diff(self, other: Graph) -> Diff:
        """What changes from this graph to `other`."""
        from flowrl.diff import diff

        return diff(self, other)

    def check(self, *, prompts: int | None = None) -> list[Finding]:
        """Everything that the rules find wrong, at once; `prompts` is the number of prompts a step, where known."""
        from flowrl.rules import check

        return check(self, prompts)

    def mermaid(self) -> str:
        """The graph as Mermaid text."""
        from flowrl.mermaid import draw

        return draw(self)

    def to_dict(self) -> dict[str, Any]:
        """The graph as JSON-able data; `from_dict` reads it back.

        Raises:
            GraphError: a parameter cannot be written, such as a lambda.
        """
        from flowrl.serial import graph_to_dict

        return graph_to_dict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Graph:
        """The graph that `to_dict` wrote."""
        from flowrl.serial import graph_from_dict

        return graph_from_dict(data)

    def fingerprint(self) -> str:
        """xxh3-128 (hex) of the canonical form: equal for graphs that compute the same, whatever their name."""
        from flowrl.serial import graph_to_dict

        canonical = graph_to_dict(self, portable=False)
        canonical |= {"name": "", "sinks": sorted(self.sinks)}
        return xxhash.xxh3_128_hexdigest(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())

    def __repr__(self) -> str:
        lines = [f"{self.name}: {len(self.nodes)} nodes -> {', '.join(self.sinks)}"]
        for node in self.nodes.values():
            lines.append(
                f"  {node.name:<16} {node.operator!r}" + (f"  <- {', '.join(node.sources)}" if node.sources else "")
            )
        return "\n".join(lines)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Jupyter draws the Mermaid block of Markdown by itself."""
        return {"text/plain": repr(self), "text/markdown": f"```mermaid\n{self.mermaid()}\n```"}
