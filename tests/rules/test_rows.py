"""Rules about the number of responses per prompt; those about mini-batches are in `test_rules`."""

from __future__ import annotations

import pytest

from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.graph import Graph
from flowrl.graphs import grpo, pass_at_k, remax
from flowrl.operators import MajorityAtK, PassAtK, PassAtKAdvantage
from flowrl.rules.check import require
from tests.rules.findings import fixed, found
from tests.support.errors import raises
from tests.support.kernel import exact


def estimated(operator: Operator, graph: Graph) -> Graph:
    """What a validation runs: no update."""
    return graph.subgraph("reward").edit(insert={operator.name: After("reward", operator)})


class TestAnswersDiffer:  # FR031
    @pytest.mark.parametrize("operator", [PassAtK(4), MajorityAtK(4)])
    def test_greedy_answers(self, operator: Operator) -> None:
        graph = estimated(operator, grpo(exact, temperature=0.0))
        assert found(graph) == [("FR031", operator.name)]
        with raises("rule.violated", rules=("FR031",), nodes=(operator.name,)) as raised:
            require(graph)
        assert "generate samples greedily" in raised.value.message
        assert found(graph.edit(set={"generate.temperature": 0.6})) == []

    def test_one_answer_may_be_greedy(self) -> None:
        assert found(estimated(PassAtK(1), grpo(exact, temperature=0.0))) == []

    def test_other_responses_may_be_greedy(self) -> None:
        graph = remax(exact, n=4).subgraph(["greedy_reward", "reward"])
        assert found(graph.edit(insert={"pass_at_k": After("reward", PassAtK(4))})) == []
        assert found(graph.edit(insert={"pass_at_k": After("greedy_reward", PassAtK(4))})) == [("FR031", "pass_at_k")]


class TestMoreThanASet:  # FR032
    def test_a_group_that_is_one_set(self) -> None:
        graph = grpo(exact, n=4).edit(replace={"group_advantage": PassAtKAdvantage(4)})
        assert found(graph) == [("FR032", "pass_at_k_advantage")]
        assert found(fixed(graph)) == []

    @pytest.mark.parametrize("n", [5, 8])
    def test_several_sets(self, n: int) -> None:
        assert found(pass_at_k(exact, k=4, n=n)) == []
        assert found(grpo(exact, n=n).edit(replace={"group_advantage": PassAtKAdvantage(1)})) == []
