"""`Plan`: a graph in the order in which it runs.

Data edges do not define when weights may change, so the plan adds *state edges*: a node that reads a role's weights as
of the start of the step runs before each node that writes them. Executors only walk a plan.
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
    """`before` reads or writes the weights of `role`, and must run before `after` writes them."""

    before: str
    after: str
    role: str


def gates_of(graph: Graph) -> list[str]:
    """The gates of a graph, in order."""
    return [name for name, node in graph.nodes.items() if isinstance(node.operator, Gate)]


def _gate(graph: Graph, name: str) -> Gate:
    return cast(Gate, graph[name].initial_operator)


def in_order(graph: Graph, role: str) -> list[str]:
    """The writers of a role in the order in which they run: by `prior_updates`."""
    names = [use.node for use in graph.roles()[role] if use.mode == "writes"]
    return sorted(names, key=lambda name: graph[name].prior_updates)


def later_writers(graph: Graph, name: str, role: str) -> list[str]:
    """The writers of a role with more `prior_updates` than the node `name`, which run after it."""
    prior_updates = graph[name].prior_updates
    return [other for other in in_order(graph, role) if graph[other].prior_updates > prior_updates]


def state_edges(graph: Graph) -> list[StateEdge]:
    """The state edges of a graph: from each reader of a role's weights to each writer that it does not depend on, by
    data or through a later writer; and from each writer to its `later_writers`."""
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
    """A graph with its state edges."""

    graph: Graph

    @cached_property
    def state_edges(self) -> list[StateEdge]:
        """See `state_edges`."""
        return state_edges(self.graph)

    @cached_property
    def network(self) -> nx.DiGraph[str]:
        """Data and state edges together; refuses a cycle."""
        _ = self.region  # refuses a region that cannot run again
        network: nx.DiGraph[str] = nx.DiGraph(self.graph.network)
        network.add_edges_from((edge.before, edge.after) for edge in self.state_edges)
        if not nx.is_directed_acyclic_graph(network):
            cycle = [a for a, _ in nx.find_cycle(network)]
            raise GraphError(
                f"No order of the nodes lets each read the weights that it expects: {' -> '.join([*cycle, cycle[0]])} "
                f"is a cycle of data edges and of reads before writes. Make the reader depend on the output of the "
                f"writer, or give it another role.",
                code="graph.weights-cycle",
                nodes=cycle,
            )
        return network

    @cached_property
    def order(self) -> list[Node]:
        """The nodes without inputs, in one fixed topological order."""
        position = {name: i for i, name in enumerate(self.graph.nodes)}
        names = nx.lexicographical_topological_sort(self.network, key=position.__getitem__)
        return [self.graph[name] for name in names if not self.graph[name].is_input]

    @cached_property
    def collector(self) -> str | None:
        """The gate that runs its upstream nodes in several rounds per step; None without one. There can be only one."""
        found = [name for name in gates_of(self.graph) if _gate(self.graph, name).rounds_at_most > 1]
        if len(found) > 1:
            raise GraphError(
                f"{found[0]} and {found[1]} both run their upstream nodes in several rounds; expected one such gate. "
                f"Replace the other by a Filter: edit(replace={{'{found[1]}': Filter(...)}}).",
                code="gate.several-collectors",
                nodes=found,
            )
        for name in found:
            self._refuse_unrepeatable(name)
        for name in self.skipping:
            self._refuse_late_skip(name, found)
        return next(iter(found), None)

    @cached_property
    def skipping(self) -> list[str]:
        """The gates that may skip the update of a step."""
        return [name for name in gates_of(self.graph) if _gate(self.graph, name).skips]

    @cached_property
    def region(self) -> frozenset[str]:
        """The nodes that run in several rounds: the collector and its upstream nodes, inputs included."""
        gate = self.collector
        return frozenset() if gate is None else frozenset({gate, *self.graph.ancestors(gate)})

    def _refuse_late_skip(self, gate: str, collectors: list[str]) -> None:
        """Refuse a gate that would skip a step after a part of its update, or in one of several rounds."""
        late = [node for node in self.graph.ancestors(gate) if self.graph[node].writes]
        around = [other for other in collectors if gate in self.graph.ancestors(other)]
        if not late and not around:
            return
        node = min(late or around, key=[*self.graph.nodes].index)
        why = (
            f"it depends on {node}, which has written the weights of {self.graph[node].writes[0]!r} by then"
            if late
            else f"{node} runs it in several rounds, each of which may pass nothing"
        )
        fix = f"Insert {gate} before all updates" if late else f"Set on_underfill='skip' on {node} only"
        raise GraphError(
            f"{gate} cannot skip the update of a step: {why}. {fix}, or set {{'{gate}.on_underfill': 'error'}}.",
            code="gate.late-skip",
            gate=gate,
            node=node,
        )

    def _refuse_unrepeatable(self, gate: str) -> None:
        inside = self.graph.ancestors(gate)
        for name in (node for node in self.graph.nodes if node in inside):
            if self.graph[name].writes:
                raise GraphError(
                    f"{gate} would run {name} in several rounds, but {name} writes the weights of "
                    f"{self.graph[name].writes[0]!r}. Insert {gate} before all updates.",
                    code="gate.not-repeatable",
                    gate=gate,
                    node=name,
                )
        for node in self.graph.nodes.values():
            crossing = [edge for edge in node.inputs.values() if edge.node in inside]
            if node.name not in inside and node.name != gate and crossing:
                raise GraphError(
                    f"{node.name} reads {crossing[0]}, which {gate} computes in several rounds, on other rows than "
                    f"those that pass. Compute it from outputs of {gate}, or move {node.name} before {gate}.",
                    code="gate.not-repeatable",
                    gate=gate,
                    node=node.name,
                )
        if inner := [sink for sink in self.graph.sinks if sink in inside]:
            raise GraphError(
                f"{inner[0]} is a sink, but {gate} would run it in several rounds. Return only outputs of {gate} or of "
                f"nodes downstream of it.",
                code="gate.not-repeatable",
                gate=gate,
                node=inner[0],
            )

    @cached_property
    def waves(self) -> list[list[Node]]:
        """The topological generations: the nodes of a wave do not wait for each other."""
        inputs = self.graph.inputs
        generations = nx.topological_generations(self.network)
        found = [{name for name in generation if name not in inputs} for generation in generations]
        return [[node for node in self.order if node.name in wave] for wave in found if wave]

    @cached_property
    def readers(self) -> Mapping[str, int]:
        """For each node, the number of nodes that read its outputs."""
        return Counter(source for node in self.order for source in node.sources)

    def downstream(self, name: str) -> set[str]:
        """The nodes downstream of `name`, by data or by state."""
        return self._downstream[name]

    @cached_property
    def _downstream(self) -> Mapping[str, set[str]]:
        return {name: set(nx.descendants(self.network, name)) for name in self.graph.nodes}

    @cached_property
    def syncs(self) -> list[Node]:
        """The nodes that send weights to an engine that generates."""
        return [node for node in self.order if node.is_sync]

    def __str__(self) -> str:
        """The plan as text: waves, and for each node where it runs, how its rows may be split, and what it reads."""
        lines = [
            f"{self.graph.name}: {len(self.order)} nodes in {len(self.waves)} waves; nodes of a wave run in parallel"
        ]
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
            lines.append(f"{name} updates the weights of {roles} while requests are in flight")
        if self.state_edges:
            lines.append("weights are read before they are written:")
            lines += [f"  {edge.role}: {edge.before} before {edge.after}" for edge in self.state_edges]
        return "\n".join([*lines, *self.twice()])

    def twice(self) -> list[str]:
        """As text: the nodes that compute the same, with the edit that removes one; and those that do not, with why."""
        lines = []
        for twin in twins(self.order):
            if twin.why_not is None:
                lines.append(f"{twin.second} computes the same as {twin.first}; merge them: {fix(self.graph, twin)}")
            else:
                lines.append(f"{twin.second} reads the same as {twin.first}, but differs: {twin.why_not}")
        return lines
