"""`ExecutionGraph`: dependencies within a step and between steps, on-policy and with a lag."""

from __future__ import annotations

from itertools import product

import networkx as nx
import pytest

from flowrl.core.graphs.lag import Lag
from flowrl.core.graphs.plan import Plan
from flowrl.core.graphs.spans import spanned
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.run.engine.execution_graph import ExecutionGraph, Instance
from tests.support.kernel import exact

STEPS = range(5)
GRAPHS = {"ppo": ppo(exact), "grpo": grpo(exact)}
CASES = [*product(GRAPHS, (0, 1, 2))]


def run_of(graph: Graph, lag: int) -> nx.DiGraph[Instance]:
    """All instances of a run of `STEPS`, with an edge to every later instance."""
    return nx.transitive_closure_dag(ExecutionGraph(Plan(graph), lag).network(STEPS))


@pytest.mark.parametrize(("name", "lag"), CASES)
def test_a_run_has_every_node_of_every_step_and_no_cycle(name: str, lag: int) -> None:
    network = ExecutionGraph(Plan(GRAPHS[name]), lag).network(STEPS)
    assert set(network) == {Instance(step, node) for step, node in product(STEPS, GRAPHS[name].nodes)}
    assert nx.is_directed_acyclic_graph(network)


@pytest.mark.parametrize(("name", "lag"), CASES)
def test_generation_follows_the_sync_of_lag_plus_one_steps_earlier_and_no_later_one(name: str, lag: int) -> None:
    later = run_of(GRAPHS[name], lag)
    for step in STEPS:
        generate = Instance(step, "generate")
        for sync in (Instance(other, "sync") for other in STEPS):
            if sync.step <= step - 1 - lag:
                assert later.has_edge(sync, generate)
            else:
                assert later.has_edge(generate, sync)


@pytest.mark.parametrize(("name", "lag"), [*product(GRAPHS, (1, 2))])
def test_a_live_weight_update_is_concurrent_with_generation_and_precedes_the_next_training(name: str, lag: int) -> None:
    """With spans, tokens are sampled with the weights of lag + 1 steps earlier or later ones, but never newer than
    those that the step trains."""
    plan = Plan(spanned(GRAPHS[name].edit(lag=Lag(lag, spans=True))))
    later = nx.transitive_closure_dag(ExecutionGraph(plan, lag, concurrent_sync=True).network(STEPS))
    for step, other in product(STEPS, STEPS):
        generate, sync = Instance(step, "generate"), Instance(other, "sync")
        assert later.has_edge(sync, generate) == (other <= step - 1 - lag)
        assert later.has_edge(generate, sync) == (other >= step)
    alone = nx.transitive_closure_dag(
        ExecutionGraph(plan, lag).network(STEPS)
    )  # without concurrent syncs, as without spans
    assert set(alone.edges) == set(run_of(GRAPHS[name], lag).edges)


@pytest.mark.parametrize(("name", "lag"), CASES)
def test_batches_are_ordered_and_at_most_lag_plus_one_are_in_flight(name: str, lag: int) -> None:
    later = run_of(GRAPHS[name], lag)
    for step in STEPS[1:]:
        assert later.has_edge(Instance(step - 1, "batch"), Instance(step, "batch"))
        assert later.has_edge(Instance(step - 1, "generate"), Instance(step, "generate"))
    for step in STEPS[lag + 1 :]:
        done = [Instance(step - lag - 1, node) for node in GRAPHS[name].nodes]
        assert all(later.has_edge(one, Instance(step, "batch")) for one in done)
    if lag:  # the previous step may be in flight
        assert not later.has_edge(Instance(0, "update_actor"), Instance(1, "batch"))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_weights_are_read_between_the_updates_of_two_steps(lag: int) -> None:
    later = run_of(GRAPHS["ppo"], lag)
    for reader, writer in (("old_log_prob", "update_actor"), ("value", "update_critic")):
        for step in STEPS:
            assert later.has_edge(Instance(step, reader), Instance(step, writer))
        for step in STEPS[1:]:
            assert later.has_edge(Instance(step - 1, writer), Instance(step, reader))


@pytest.mark.parametrize("lag", [0, 2])
def test_stateful_nodes_depend_on_their_previous_step(lag: int) -> None:
    waits = ExecutionGraph(Plan(GRAPHS["ppo"]), lag).waits
    assert ("mismatch", 1) in waits["mismatch"]
    assert ("gae", 1) not in waits["gae"]


@pytest.mark.parametrize("lag", [0, 1])
def test_frees_is_the_inverse_relation_of_waits(lag: int) -> None:
    instances = ExecutionGraph(Plan(GRAPHS["ppo"]), lag)
    waits = {(node, other, k) for node, found in instances.waits.items() for other, k in found}
    assert {(node, other, k) for other, found in instances.frees.items() for node, k in found} == waits


def test_a_resumed_run_does_not_depend_on_earlier_steps() -> None:
    instances = ExecutionGraph(Plan(GRAPHS["grpo"]))
    assert instances.before(Instance(7, "batch"), range(7, 9)) == []
    assert Instance(6, "sync") in instances.before(Instance(7, "generate"), range(5, 9))
    assert Instance(6, "sync") not in instances.before(Instance(7, "generate"), range(7, 9))
