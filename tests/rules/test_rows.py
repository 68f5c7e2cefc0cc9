"""Rules about the number of responses per prompt; those about mini-batches are in `test_rules`."""

from __future__ import annotations

import pytest

from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.graph import Graph
from flowrl.graphs import dapo, grpo, grpo_sft, pass_at_k, ppo, reinforce_plus_plus, remax
from flowrl.operators import MajorityAtK, PassAtK, PassAtKAdvantage
from flowrl.rules.check import require
from tests.rules.findings import fixed, found
from tests.support.errors import raises
from tests.support.kernel import exact


def estimated(operator: Operator, graph: Graph) -> Graph:
    """A validation graph, without an update."""
    return graph.subgraph("reward").edit(insert={operator.name: After("reward", operator)})


class TestEstimatesNeedSampling:  # FR031
    @pytest.mark.parametrize("operator", [PassAtK(4), MajorityAtK(4)])
    def test_estimate_over_k_greedy_responses_is_found(self, operator: Operator) -> None:
        graph = estimated(operator, grpo(exact, temperature=0.0))
        assert found(graph) == [("FR031", operator.name)]
        with raises("rule.violated", rules=("FR031",), nodes=(operator.name,)) as raised:
            require(graph)
        assert "generate samples greedily" in raised.value.message
        assert found(graph.edit(set={"generate.temperature": 0.6})) == []

    def test_estimate_over_one_greedy_response_has_no_finding(self) -> None:
        assert found(estimated(PassAtK(1), grpo(exact, temperature=0.0))) == []

    def test_greedy_responses_of_another_node_have_no_finding(self) -> None:
        graph = remax(exact, n=4).subgraph(["greedy_reward", "reward"])
        assert found(graph.edit(insert={"pass_at_k": After("reward", PassAtK(4))})) == []
        assert found(graph.edit(insert={"pass_at_k": After("greedy_reward", PassAtK(4))})) == [("FR031", "pass_at_k")]


class TestWhitensSeveralRows:  # FR044
    @pytest.mark.parametrize("graph", [ppo(exact), reinforce_plus_plus(exact, n=1)])
    def test_whitening_of_one_row_is_found(self, graph: Graph) -> None:
        assert found(graph, prompts=1) == [("FR044", "whiten")]
        assert found(graph, prompts=2) == found(graph, prompts=None) == []

    def test_several_responses_to_one_prompt_have_no_finding(self) -> None:
        assert found(reinforce_plus_plus(exact, n=2), prompts=1) == []


class TestNoOlderRows:  # FR043
    def test_an_update_that_accepts_older_rows_than_there_are_is_found(self) -> None:
        assert found(grpo_sft(exact)) == []
        graph = grpo_sft(exact).edit(set={"imitate.prior_updates": 100})
        assert found(graph) == [("FR043", "imitate")]
        assert found(fixed(graph)) == []
        assert found(grpo(exact).edit(set={"update_actor.prior_updates": 1})) == [("FR043", "update_actor")]


class TestGroupsExceedK:  # FR032
    def test_group_of_k_responses_is_found(self) -> None:
        graph = grpo(exact, n=4).edit(replace={"group_advantage": PassAtKAdvantage(4)})
        assert found(graph) == [("FR032", "pass_at_k_advantage")]
        assert found(fixed(graph)) == []

    @pytest.mark.parametrize("n", [5, 8])
    def test_group_of_more_than_k_responses_has_no_finding(self, n: int) -> None:
        assert found(pass_at_k(exact, k=4, n=n)) == []
        assert found(grpo(exact, n=n).edit(replace={"group_advantage": PassAtKAdvantage(1)})) == []


class TestEnoughRounds:  # FR045
    def test_rounds_that_cannot_have_enough_groups_are_found(self) -> None:
        graph = dapo(exact, groups=32)
        assert found(graph, prompts=3) == [("FR045", "collect")]
        assert fixed(graph, prompts=3) == graph.edit(set={"collect.rounds": 11})
        assert found(fixed(graph, prompts=3), prompts=3) == []
        assert found(graph, prompts=4) == []
        assert found(graph, prompts=None) == []

    @pytest.mark.parametrize("on_underfill", ["train", "repeat"])
    def test_fewer_groups_that_are_allowed_have_no_finding(self, on_underfill: str) -> None:
        graph = dapo(exact, groups=32).edit(set={"collect.on_underfill": on_underfill})
        assert found(graph, prompts=3) == []
