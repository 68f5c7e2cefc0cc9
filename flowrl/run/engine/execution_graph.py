"""`ExecutionGraph`: a run as one DAG, with a copy of the graph for each step; an *instance* is a node in one step.

The dependencies of an instance are a pure function of the plan and the lag:

- Within a step: data and state edges (`Plan.network`).
- Between steps: readers of a role's weights follow the previous step's writers, and writers follow the readers of the
  previous weights; a node with state follows itself; batches are sampled in order.
- Generation of step s follows the sync of step s - 1 - lag and uses exactly its weights: the sync of step s waits for
  generation up to step s + lag, so the version that samples a row does not depend on timing. A live weight update
  (`flowrl.core.graphs.lag`) that may run concurrently does not wait: a token of step s is sampled with the weights
  after step s - 1 - lag, or later ones up to those after step s - 1.
- At most lag + 1 steps are in flight, because the batch of a step is sampled when step s - lag - 1 is done.
- Training follows all nodes of the previous step, so the weights after a step can be saved whatever ran later.
- Where a gate may skip the update of a step, all that write weights follow it, and nodes with state follow it one step
  later, when it is known whether their state of the step before counts.
- Nodes that run in rounds follow all rounds of the previous step; their readers follow all rounds of their own step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import networkx as nx

from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.effects import Effect
from flowrl.errors import GraphError


class Instance(NamedTuple):
    """A node in one step."""

    step: int
    node: str

    def __str__(self) -> str:
        return f"{self.node} in step {self.step + 1}"


@dataclass(frozen=True)
class ExecutionGraph:
    """The dependencies of every instance of a run.

    Args:
        lag: how many versions generation may run ahead; 0 is on-policy.
        concurrent_sync: whether a live weight update may run concurrently with generation.
    """

    plan: Plan
    lag: int = 0
    concurrent_sync: bool = False

    @property
    def flight(self) -> int:
        """The most steps in flight."""
        return self.lag + 1

    @cached_property
    def waits(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """By node, its dependencies: ``(other, k)`` is the other node, k steps before (-1: one step later)."""
        found: dict[str, dict[tuple[str, int], None]] = {name: {} for name in self.plan.graph.nodes}
        rules = (
            self._within(),
            self._inputs(),
            self._in_rounds(),
            self._with_state(),
            self._with_weights(),
            self._with_skips(),
        )
        for node, other, offset in itertools.chain(*rules):
            found[node][other, offset] = None
        if (collector := self.plan.collector) is not None:
            for node, waits in found.items():
                for other, offset in [*waits]:
                    if self._in_rounds_of(collector, other) and (offset or node not in self.plan.region):
                        waits[collector, offset] = None
        return {node: tuple(waits) for node, waits in found.items()}

    @cached_property
    def skipped_by(self) -> Mapping[str, frozenset[str]]:
        """By node, the gates whose skip it is skipped by: those before it in a step."""
        within: nx.DiGraph[str] = nx.DiGraph()
        within.add_edges_from((other, node) for node, waits in self.waits.items() for other, k in waits if not k)
        after = {gate: nx.descendants(within, gate) for gate in self.plan.skipping if gate in within}
        return {node: frozenset(gate for gate in after if node in after[gate]) for node in self.plan.graph.nodes}

    @cached_property
    def frees(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """By node, its dependents: ``(other, k)`` is the other node, k steps later."""
        frees: dict[str, list[tuple[str, int]]] = {name: [] for name in self.plan.graph.nodes}
        for node, waits in self.waits.items():
            for other, offset in waits:
                frees[other].append((node, offset))
        return {node: tuple(found) for node, found in frees.items()}

    def before(self, instance: Instance, steps: range) -> list[Instance]:
        """The dependencies of an instance in a run of these steps."""
        found = [Instance(instance.step - offset, other) for other, offset in self.waits[instance.node]]
        return [one for one in found if one.step in steps]

    def network(self, steps: range) -> nx.DiGraph[Instance]:
        """All instances of a run of these steps, with their dependencies."""
        network: nx.DiGraph[Instance] = nx.DiGraph()
        for step, node in product(steps, self.plan.graph.nodes):
            network.add_node(Instance(step, node))
            network.add_edges_from((other, Instance(step, node)) for other in self.before(Instance(step, node), steps))
        return network

    def refuse_deadlock(self) -> None:
        """Refuse a lag with which instances would wait for each other in a cycle."""
        network = self.network(range(2 * self.flight))  # no cycle is longer: one edge leads back, by lag steps
        if not nx.is_directed_acyclic_graph(network):
            cycle = [str(one) for one, _ in nx.find_cycle(network)]
            raise GraphError(
                f"{self.plan.graph.name} with lag={self.lag} would deadlock: {' -> '.join([*cycle, cycle[0]])}. "
                f"Generate from what does not depend on training in the same step, or use edit(lag=0).",
                code="lag.unsupported",
                graph=self.plan.graph.name,
                lag=self.lag,
                cycle=cycle,
            )

    def _in_rounds_of(self, collector: str, node: str) -> bool:
        """Whether a node runs in rounds other than as the collector, which knows the last round."""
        return node in self.plan.region and node != collector and not self.plan.graph[node].is_input

    # ---- rules: (node, its dependency, how many steps before)

    def _within(self) -> Iterator[tuple[str, str, int]]:
        for before, after in self.plan.network.edges:
            yield after, before, 0

    def _inputs(self) -> Iterator[tuple[str, str, int]]:
        for source, node in product(self.plan.graph.inputs, self.plan.graph.nodes):
            yield source, node, self.flight
        for source in self.plan.graph.inputs:
            yield source, source, 1

    def _in_rounds(self) -> Iterator[tuple[str, str, int]]:
        if self.plan.collector is not None:
            for node in self.plan.region:
                if not self.plan.graph[node].is_input:  # sampled when the step is opened
                    yield node, self.plan.collector, 1

    def _with_state(self) -> Iterator[tuple[str, str, int]]:
        for node in self.plan.order:
            if node.operator.states:
                yield node.name, node.name, 1

    def _with_weights(self) -> Iterator[tuple[str, str, int]]:
        ahead = set(self.plan.graph.generators)
        for role, uses in self.plan.graph.roles().items():
            by_mode = defaultdict(list)
            for use in uses:
                by_mode[use.mode].append(use.node)
            lag = self.lag if role in ahead else 0
            for writer, reader in product(by_mode["writes"], by_mode["reads"]):
                if reader in self.plan.downstream(writer):  # it reads the new weights
                    yield writer, reader, 1
                else:
                    yield reader, writer, 1 + lag
                    if not (self.concurrent_sync and Effect.SPANS in self.plan.graph[writer].effects):
                        yield from ((writer, reader, -ahead) for ahead in range(1, lag + 1))
            for one, other in product(by_mode["writes"], repeat=2):
                yield one, other, 1
            if lag:
                yield from ((reader, reader, 1) for reader in by_mode["reads"])
        trained = set(self.plan.graph.trained)
        for node, other in product(self.plan.order, self.plan.graph.nodes):
            if trained & set(node.writes):
                yield node.name, other, 1

    def _with_skips(self) -> Iterator[tuple[str, str, int]]:
        for gate, node in product(self.plan.skipping, self.plan.order):
            if node.writes and node.name != gate:
                yield node.name, gate, 0
            if node.operator.states:
                yield node.name, gate, 1
