"""`Plan`: a graph in the order in which it runs.

Data edges do not say when weights may change, so the plan adds *state edges*: whoever reads a role's weights as they
are at the start of the step comes before whoever writes them. Executors only walk a plan.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import networkx as nx

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.spans import swaps
from flowrl.core.graphs.twins import fix, twins
from flowrl.errors import GraphError


@dataclass(frozen=True)
class StateEdge:
    """`before` reads the weights of `role`, or writes them, and must do so before `after` writes them."""

    before: str
    after: str
    role: str


def gates_of(graph: Graph) -> list[str]:
    """The gates of a graph, in order."""
    return [name for name, node in graph.nodes.items() if isinstance(node.operator, Gate)]


def _gate(graph: Graph, name: str) -> Gate:
    return cast(Gate, graph[name].initial_operator)


def in_order(graph: Graph, role: str) -> list[str]:
    """The writers of a role in the order in which they run: one whose rows may be further `behind` comes later."""
    names = [use.node for use in graph.roles()[role] if use.mode == "writes"]
    return sorted(names, key=lambda name: graph[name].prior_updates)


def later_writers(graph: Graph, name: str, role: str) -> list[str]:
    """The writers of a role that say that they run after the one called `name`."""
    behind = graph[name].prior_updates
    return [other for other in in_order(graph, role) if graph[other].prior_updates > behind]


def state_edges(graph: Graph) -> list[StateEdge]:
    """The state edges of a graph: from every reader of a role's weights to every writer whose update it does not ask
    for, be it by data or by asking for a later one; and from every writer to the `later_writers`."""
    edges = []
    for role, uses in graph.roles().items():
        for writer in (use.node for use in uses if use.mode == "writes"):
            later = later_writers(graph, writer, role)
            downstream = set().union(*(nx.descendants(graph.network, name) for name in (writer, *later)))
            for reader in (use.node for use in uses if use.mode == "reads"):
                if reader != writer and reader not in downstream:
                    edges.append(StateEdge(reader, writer, role))
            edges += [StateEdge(writer, name, role) for name in later]
    return edges


@dataclass(frozen=True)
class Plan:
    """A graph with its state edges, ready to be walked."""

    graph: Graph

    @cached_property
    def state_edges(self) -> list[StateEdge]:
        """See `state_edges`."""
        return state_edges(self.graph)

    @cached_property
    def network(self) -> nx.DiGraph[str]:
        """Data and state edges together.

        Raises:
            GraphError: together they form a cycle, so no order keeps all weights as their readers expect them.
        """
        _ = self.region  # refused here, if it cannot run twice
        network: nx.DiGraph[str] = nx.DiGraph(self.graph.network)
        network.add_edges_from((edge.before, edge.after) for edge in self.state_edges)
        if not nx.is_directed_acyclic_graph(network):
            cycle = [a for a, _ in nx.find_cycle(network)]
            raise GraphError(
                f"no order keeps weights as their readers expect them: {' -> '.join([*cycle, cycle[0]])} is a cycle of "
                f"data and of reads before writes; let the reader depend on what the writer returns, or give it a role "
                f"of its own."
            )
        return network

    @cached_property
    def order(self) -> list[Node]:
        """The nodes in one fixed order that keeps every edge; inputs are left out."""
        position = {name: i for i, name in enumerate(self.graph.nodes)}
        names = nx.lexicographical_topological_sort(self.network, key=position.__getitem__)
        return [self.graph[name] for name in names if not self.graph[name].is_input]

    @cached_property
    def collector(self) -> str | None:
        """The gate that lets a part of the graph run again within a step; None where nothing runs twice.

        Raises:
            GraphError: that part could not run twice: it writes weights, or something else reads what it makes; or
                there are two such gates.
        """
        found = [name for name in gates_of(self.graph) if _gate(self.graph, name).rounds_at_most > 1]
        if len(found) > 1:
            raise GraphError(
                f"{found[0]} and {found[1]} both run what they depend on again; expected one of them: let the other be "
                f"a Filter, edit(replace={{'{found[1]}': Filter(...)}})."
            )
        for name in found:
            self._refuse_unrepeatable(name)
        return next(iter(found), None)

    @cached_property
    def region(self) -> frozenset[str]:
        """The nodes that run again: the collector, and all that it depends on, inputs among them."""
        gate = self.collector
        return frozenset() if gate is None else frozenset({gate, *self.graph.ancestors(gate)})

    def _refuse_unrepeatable(self, gate: str) -> None:
        inside = self.graph.ancestors(gate)
        for name in (node for node in self.graph.nodes if node in inside):
            if self.graph[name].writes:
                raise GraphError(
                    f"{gate} runs {name} again in a step, which writes the weights of {self.graph[name].writes[0]!r}; "
                    f"expected {gate} before all that trains."
                )
        for node in self.graph.nodes.values():
            crossing = [edge for edge in node.inputs.values() if edge.node in inside]
            if node.name not in inside and node.name != gate and crossing:
                raise GraphError(
                    f"{node.name} reads {crossing[0]}, which {gate} makes in several rounds on other rows than those "
                    f"that it lets through; expected {node.name} to read what passes, or to come before {gate}: make "
                    f"what it reads from rows that pass."
                )
        if alone := [sink for sink in self.graph.sinks if sink in inside]:
            raise GraphError(
                f"{alone[0]} is a sink, and {gate} runs it in several rounds; expected what is returned to come behind "
                f"{gate}."
            )

    @cached_property
    def waves(self) -> list[list[Node]]:
        """The nodes by how many must run before them, one after another; those of a wave do not wait for each other."""
        inputs = self.graph.inputs
        generations = nx.topological_generations(self.network)
        found = [{name for name in generation if name not in inputs} for generation in generations]
        return [[node for node in self.order if node.name in wave] for wave in found if wave]

    @cached_property
    def readers(self) -> Mapping[str, int]:
        """For each node, how many nodes read what it writes."""
        return Counter(source for node in self.order for source in node.sources)

    def downstream(self, name: str) -> set[str]:
        """The nodes that come after `name`, by data or by state."""
        return self._downstream[name]

    @cached_property
    def _downstream(self) -> Mapping[str, set[str]]:
        return {name: set(nx.descendants(self.network, name)) for name in self.graph.nodes}

    @cached_property
    def syncs(self) -> list[Node]:
        """The nodes that carry weights to an engine that generates."""
        return [node for node in self.order if node.is_sync]

    def __str__(self) -> str:
        """The plan for people: waves, where each node runs, what rows it may be split by, and just what it reads."""
        lines = [f"{self.graph.name}: {len(self.order)} nodes in {len(self.waves)} waves; those of one may run at once"]
        numbered = [(str(number), node) for number, wave in enumerate(self.waves, start=1) for node in wave]
        rows = [
            (number, node.name, " with ".join(node.roles) or "general", node.operator.granularity)
            for number, node in numbered
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        indent = " " * (widths[0] + 4)
        for row, (_, node) in zip(rows, numbered, strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            for source in node.sources:
                read = sorted({edge.output for edge in node.inputs.values() if edge.node == source})
                text = f"from {source}: {', '.join(read)}"
                lines += textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=f"{indent}  ")
        if self.collector is not None:
            gate, again = _gate(self.graph, self.collector), [n.name for n in self.order if n.name in self.region]
            times = f"at most {gate.rounds_at_most} times in a step"
            lines.append(f"{times}, on further prompts, until {self.collector} is full:")
            lines += textwrap.wrap(", ".join(again), 120, initial_indent="  ", subsequent_indent="  ")
        for name in swaps(self.graph):
            roles = " and ".join(self.graph[name].writes)
            lines.append(f"{name} changes weights under answers that are under way, of {roles}")
        if self.state_edges:
            lines.append("weights are read before they are written:")
            lines += [f"  {edge.role}: {edge.before} before {edge.after}" for edge in self.state_edges]
        return "\n".join([*lines, *self.twice()])

    def twice(self) -> list[str]:
        """For people: what is computed twice, with the edit that mends it; what only looks so, with the reason."""
        lines = []
        for twin in twins(self.order):
            if twin.apart is None:
                lines.append(f"{twin.second} computes what {twin.first} does; once is enough: {fix(self.graph, twin)}")
            else:
                lines.append(f"{twin.second} reads what {twin.first} does, and is another: {twin.apart}")
        return lines
