"""Predictions: step times, idle shares and bounds equal values computed by hand."""

from __future__ import annotations

import pytest

from flowrl.core.operators.roles import Role
from flowrl.distributed.place import Colocate, Split
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.run.placement.place import Place
from flowrl.run.prediction.cost import Cost
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict
from tests.support.errors import raises
from tests.support.kernel import exact
from tests.support.paper import (
    BATCH,
    Generate,
    Nodes,
    OnRows,
    PlacedRollout,
    PlacedTrainer,
    Score,
    SyncWeights,
    Train,
    fixed,
    graph_of,
)


def seconds_of(graph: Graph, place: Place | None, costs: Costs, rows: int = 8) -> float:
    return predict(graph, place, rows, costs).seconds


class TestRows:
    def test_a_step_of_a_billion_prompts_is_refused_before_its_rows_are_made(self) -> None:
        graph = graph_of({"a": (OnRows(), BATCH)})
        with raises("predict.too-many-rows", prompts=10**9, rows=10**9, limit=100_000):
            predict(graph, None, 10**9, fixed(a=2.0))
        assert seconds_of(graph, None, fixed(a=2.0), rows=100_000) == pytest.approx(2.0)

    def test_the_responses_of_a_prompt_count(self) -> None:
        graph = grpo(exact, n=16)
        costs = fixed(**{name: 1.0 for name, node in graph.nodes.items() if not node.is_input})
        with raises("predict.too-many-rows", rows=160_000):
            predict(graph, None, 10_000, costs)


class TestStepTime:
    def test_general_nodes_run_in_parallel_on_ray_and_sequentially_in_one_process(self) -> None:
        graph, costs = graph_of({"a": (OnRows(), BATCH), "b": (OnRows(), BATCH)}), fixed(a=2.0, b=3.0)
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(3.0)
        assert seconds_of(graph, None, costs) == pytest.approx(5.0)

    def test_a_chain_takes_the_sum_of_its_nodes(self) -> None:
        graph = graph_of({"a": (OnRows(), BATCH), "b": (OnRows(), ("a", "batch"))})
        assert seconds_of(graph, Colocate(gpus=1), fixed(a=2.0, b=3.0)) == pytest.approx(5.0)

    def test_roles_on_one_slot_run_sequentially_and_on_two_in_parallel(self) -> None:
        nodes: Nodes = {"a": (Score(), BATCH), "b": (Score(engine=Role("ref")), BATCH)}
        graph = graph_of(nodes, actor=PlacedTrainer(), ref=PlacedTrainer())
        assert seconds_of(graph, Colocate(gpus=1), fixed(a=2.0, b=3.0)) == pytest.approx(5.0)
        assert seconds_of(graph, Colocate(gpus=2), fixed(a=2.0, b=3.0)) == pytest.approx(3.0)

    def test_sleeping_and_waking_add_to_the_step(self) -> None:
        nodes: Nodes = {"a": (Score(), BATCH), "b": (Score(engine=Role("ref")), BATCH)}
        graph = graph_of(nodes, actor=PlacedTrainer(), ref=PlacedTrainer())
        turns = {"sleep": {"a": 0.1, "b": 0.2}, "wake": {"a": 0.3, "b": 0.4}}
        costs = Costs("given", {}, turns=turns).given(a=2.0, b=3.0)
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(5.0 + 0.1 + 0.2 + 0.3 + 0.4)
        assert seconds_of(graph, Colocate(gpus=2), costs) == pytest.approx(3.0)  # all stay awake

    def test_an_awake_role_is_not_woken_again(self) -> None:
        nodes: Nodes = {"a": (Score(), BATCH), "b": (Score(), ("a", "a")), "c": (Score(engine=Role("ref")), ("b", "b"))}
        graph = graph_of(nodes, actor=PlacedTrainer(), ref=PlacedTrainer())
        costs = Costs("given", {}, turns={"sleep": {"a": 1.0}, "wake": {"a": 10.0}}).given(a=0.0, b=0.0, c=0.0)
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(2 * 11.0)

    def test_a_sync_wakes_the_trainer_before_the_engine(self) -> None:
        nodes: Nodes = {
            "generate": (Generate(), BATCH),
            "train": (Train(), ("generate",) * 2),
            "sync": (SyncWeights(), ("train",) * 2),
        }
        graph = graph_of(nodes, actor=PlacedTrainer(), rollout=PlacedRollout())
        costs = Costs("given", {}, turns={"sleep": {"generate": 1.0}, "wake": {"generate": 10.0}})
        costs = costs.given(generate=1.0, train=1.0, sync=1.0)
        # train and sync each put one to sleep and wake the other; generate finds the engine awake
        assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(3.0 + 2 * 11.0)

    def test_an_engine_that_loses_weights_is_synced_before_generation(self) -> None:
        nodes: Nodes = {
            "generate": (Generate(), BATCH),
            "sync": (SyncWeights(), ("generate",) * 2),
            "score": (Score(), ("sync",) * 2),
        }
        for loses_weights, syncs in ((False, 1), (True, 2)):
            graph = graph_of(nodes, actor=PlacedTrainer(), rollout=PlacedRollout(loses_weights_asleep=loses_weights))
            costs = fixed(generate=1.0, sync=10.0, score=1.0)
            assert seconds_of(graph, Colocate(gpus=1), costs) == pytest.approx(2.0 + 10.0 * syncs)

    def test_rows_are_divided_among_ranks(self) -> None:
        graph = graph_of({"a": (Score(), BATCH)}, actor=PlacedTrainer(ranks=2))
        costs = Costs("given", {"a": {1: Cost(fixed=1.0)}}, lengths={})
        assert seconds_of(graph, Colocate(gpus=2), costs, rows=8) == pytest.approx(1.0)

    def test_gaps_between_nodes_and_steps_are_included(self) -> None:
        graph = graph_of({"a": (OnRows(), BATCH), "b": (OnRows(), ("a", "a"))})
        costs = Costs("given", {}, gaps={"a": 0.1, "b": 0.2}, between=0.7).given(a=2.0, b=3.0)
        for place in (None, Colocate(gpus=1)):
            assert seconds_of(graph, place, costs) == pytest.approx(6.0)

    def test_lag_overlaps_generation_and_training_on_separate_slots(self) -> None:
        nodes: Nodes = {
            "generate": (Generate(), BATCH),
            "train": (Train(), ("generate",) * 2),
            "sync": (SyncWeights(), ("train",) * 2),
        }
        costs = fixed(generate=3.0, train=2.0, sync=0.0)
        backends = {"actor": PlacedTrainer(), "rollout": PlacedRollout()}
        for lag, expected in ((0, 5.0), (1, 3.0)):
            found = predict(graph_of(nodes, lag, **backends), Split(), 8, costs)
            assert (found.seconds, found.bound) == (pytest.approx(expected), pytest.approx(expected))
        assert seconds_of(graph_of(nodes, 1, **backends), Colocate(gpus=1), costs) == pytest.approx(5.0)


class TestPrediction:
    def test_idle_shares_bounds_and_critical_path_equal_a_worked_example(self) -> None:
        nodes: Nodes = {
            "generate": (Generate(), BATCH),
            "train": (Train(), ("generate",) * 2),
            "sync": (SyncWeights(), ("train",) * 2),
        }
        graph = graph_of(nodes, actor=PlacedTrainer(), rollout=PlacedRollout())
        found = predict(graph, Split(train=2), 8, fixed(generate=3.0, train=1.0, sync=0.5))
        assert found.idle == pytest.approx({"slot 0": 1 - 1.5 / 4.5, "slot 1": 1.0, "slot 2": 1 - 3.5 / 4.5})
        assert (found.path, found.path_seconds) == (("generate", "train", "sync"), pytest.approx(4.5))
        assert (found.busiest, found.bound) == (pytest.approx(3.5), pytest.approx(4.5))
        assert str(found) == (
            "Split(train=2): a step takes 4.500 s\n"
            "  at least 4.500 s: the critical path generate → train → sync\n"
            "  with lag at least 3.500 s: the work of the busiest slot\n"
            "  idle: slot 0 67%, slot 1 100%, slot 2 22%\n"
            "  given ran in one process, so it has no costs of syncs and turns between processes"
        )

    def test_prediction_text_for_one_process(self) -> None:
        found = predict(graph_of({"a": (OnRows(), BATCH)}), None, 8, fixed(a=2.0))
        assert str(found) == (
            "in one process: a step takes 2.000 s\n  at least 2.000 s: the work of the busiest slot\n  idle: slot 0 0%"
        )

    def test_an_unmeasured_node_is_refused(self) -> None:
        with raises("predict.unmeasured-node", graph="toy", nodes=("b",), path="given"):
            predict(graph_of({"a": (OnRows(), BATCH), "b": (OnRows(), BATCH)}), None, 8, fixed(a=1.0))

    def test_an_unbound_role_is_refused(self) -> None:
        with raises("job.unbound-role", graph="toy", role="actor"):
            predict(graph_of({"a": (Score(), BATCH)}), Colocate(), 8, fixed(a=1.0))
