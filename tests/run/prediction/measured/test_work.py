"""What nodes do: the same from a graph as from the ``run.json`` of a run, and the loads that follow."""

from __future__ import annotations

import pytest

from flowrl.files.graph_io import graph_to_dict
from flowrl.graphs import grpo, ppo
from flowrl.run.prediction.cost import Load
from flowrl.run.prediction.measured.work import Work
from tests.support.kernel import exact

LOAD = Load(rows=8, tokens=80, padded=96)


class TestWork:
    @pytest.mark.parametrize("algorithm", [grpo, ppo])
    def test_a_recorded_graph_has_the_same_work(self, algorithm: type) -> None:
        graph = algorithm(exact, n=2, max_new_tokens=7, mini_batch=4, ppo_epochs=3)
        recorded = graph_to_dict(graph, portable=False)["nodes"]
        nodes = {name: node for name, node in graph.nodes.items() if not node.is_input}
        assert {name: Work.recorded(recorded[name]["operator"]) for name in nodes} == {
            name: Work.of(node) for name, node in nodes.items()
        }

    def test_nodes_of_ppo_do_what_their_names_say(self) -> None:
        graph = ppo(exact, max_new_tokens=7, mini_batch=4, ppo_epochs=3)
        assert Work.of(graph["generate"]) == Work("generate", ("rollout",), tokens=7)
        assert Work.of(graph["old_log_prob"]) == Work("score", ("actor",))
        assert Work.of(graph["value"]) == Work("score", ("critic",))
        assert Work.of(graph["update_actor"]) == Work("update", ("actor",), 3, 4)
        assert Work.of(graph["sync"]).kind == "sync"
        assert Work.of(graph["gae"]) == Work("other")

    def test_epochs_and_mini_batches_count_rows_and_optimizer_steps(self) -> None:
        assert Work("update", epochs=3, mini_batch=4).load(LOAD, 16) == Load(24, 240, 288, 0, updates=12)
        assert Work("update", epochs=3).load(LOAD, 16).updates == 3
        assert Work("update", mini_batch=32).load(LOAD, 16).updates == 1
        assert Work("score").load(LOAD, 16) == LOAD

    def test_a_recorded_schedule_is_not_a_number(self) -> None:
        assert Work.recorded({"$type": "x:UpdateActor", "ppo_epochs": {"$type": "y:Linear"}}) == Work("update")
