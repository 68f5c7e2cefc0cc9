"""`Plan`: a graph in the order in which it runs.

Data edges do not say when weights may change, so the plan adds *state edges*: whoever reads a role's weights as they
are at the start of the step comes before whoever writes them. Executors only walk a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from flowrl.engines import Rollout
from flowrl.errors import GraphError
from flowrl.graph import Graph, Node


@dataclass(frozen=True)
class StateEdge:
    """`before` reads the weights of `role` and must do so before `after` writes them."""

    before: str
    after: str
    role: str


def state_edges(graph: Graph) -> list[StateEdge]:
    """The state edges of a graph: from every reader of a role's weights to every writer that it does not depend on."""
    edges = []
    for role, uses in graph.roles().items():
        for writer in (use.node for use in uses if use.mode == "writes"):
            downstream = nx.descendants(graph.network, writer)
            for reader in (use.node for use in uses if use.mode == "reads"):
                if reader != writer and reader not in downstream:
                    edges.append(StateEdge(reader, writer, role))
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
    def last_reader(self) -> dict[str, str]:
        """For each node whose outputs are read: the node after which nobody needs them any more."""
        last: dict[str, str] = {}
        for node in self.order:
            for source in node.sources:
                last[source] = node.name
        return last

    @cached_property
    def syncs(self) -> list[Node]:
        """The nodes that carry weights to an engine that generates."""
        return [
            n
            for n in self.order
            if any(u.protocol is Rollout and u.mode == "writes" for u in n.operator.role_uses.values())
        ]
