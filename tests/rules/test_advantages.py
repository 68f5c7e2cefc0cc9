"""Rules about advantages: a planted defect of each, its fix, and similar graphs without findings."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.graph import Graph, algorithm
from flowrl.graphs import gpg, grpo, pass_at_k, ppo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo
from flowrl.operators import (
    GAE,
    Collect,
    Filter,
    Generate,
    GroupAdvantage,
    KLShape,
    Length,
    OldLogProb,
    PassAtKAdvantage,
    RefLogProb,
    Repeat,
    Reward,
    RLOOAdvantage,
    RolloutCorrection,
    Spread,
    SubtractBaseline,
    Sync,
    UpdateActor,
)
from flowrl.records import PromptBatch
from tests.rules.findings import fixed, found, the_message
from tests.support.kernel import exact


@algorithm
def shaped(batch: PromptBatch, advantage: Operator) -> Any:
    """A KL penalty in rewards, then a group advantage."""
    prompts = Repeat(8)(batch)
    rollout = Generate()(prompts)
    old, ref = OldLogProb()(rollout), RefLogProb()(rollout)
    rewards = KLShape()(Reward(exact)(rollout, prompts), old, ref, rollout.response_mask)
    advantages = advantage(rewards, rollout.response_mask, prompts.uid)
    return Sync()(UpdateActor()(rollout, old_log_probs=old, advantages=advantages))


class TestKLIsNotRescaled:  # FR016
    @pytest.mark.parametrize("advantage", [GroupAdvantage(), PassAtKAdvantage(4)])
    def test_kl_in_rewards_divided_by_the_group_deviation_is_found(self, advantage: Operator) -> None:
        graph = shaped(advantage)
        assert found(graph) == [("FR016", advantage.name)]
        assert "UpdateActor(kl=KLLoss())" in the_message(graph, "FR016")
        assert found(fixed(graph)) == []

    def test_advantages_without_division_have_no_finding(self) -> None:
        assert found(shaped(RLOOAdvantage())) == found(shaped(GroupAdvantage(normalize_std=False))) == []
        assert found(rloo(exact)) == found(ppo(exact)) == found(reinforce_plus_plus(exact)) == []

    def test_kl_with_coefficient_zero_has_no_finding(self) -> None:
        assert found(shaped(GroupAdvantage()).edit(set={"kl_shape.coef": 0.0})) == []


class TestBaselineIsIndependent:  # FR027
    OWN = remax(exact).edit(
        wire={
            "row_score.token_level_scores": "reward.token_level_scores",
            "row_score.response_mask": "generate.response_mask",
        }
    )

    def test_baseline_from_the_row_s_own_score_is_found(self) -> None:
        assert found(self.OWN) == [("FR027", "subtract_baseline")]
        assert "baseline comes from row_score.row_scores" in the_message(self.OWN, "FR027")

    def test_own_score_through_another_operator_is_found(self) -> None:
        class Half(Operator):
            granularity = "row"

            def __call__(self, row_scores: c.RowScores) -> c.RowScores: ...

        graph = self.OWN.edit(insert={"half": After("row_score", Half())})
        assert found(graph) == [("FR027", "subtract_baseline")]

    def test_score_of_another_response_is_a_valid_baseline(self) -> None:
        assert found(remax(exact)) == []
        assert found(remax(exact).edit(set={"greedy.temperature": 0.5})) == []

    def test_scores_of_a_group_are_a_valid_baseline(self) -> None:
        class LeaveOneOut(Operator):
            granularity = "group"

            def __call__(self, token_level_scores: c.TokenLevelScores, uid: c.Uid) -> c.RowScores: ...

        graph = reinforce_plus_plus(exact, n=4).edit(
            insert={
                "leave_one_out": After("reward", LeaveOneOut()),
                "subtract_baseline": After("return_to_go", SubtractBaseline()),
            },
            wire={"subtract_baseline.baseline": "leave_one_out.row_scores"},
        )
        assert found(graph) == []

    def test_a_gate_does_not_hide_which_response_the_baseline_scores(self) -> None:
        gated = remax(exact, n=4).edit(insert={"gate": After("reward", Filter(Spread()))})
        assert found(gated) == []
        own = self.OWN.edit(insert={"gate": After("row_score", Filter(Length(most=9)))})
        assert found(own) == [("FR027", "subtract_baseline")]


class TestWeightedAfterScaling:  # FR028
    @pytest.mark.parametrize("graph", [ppo(exact), reinforce_plus_plus(exact)], ids=lambda graph: graph.name)
    def test_whitening_after_importance_weights_is_found(self, graph: Graph) -> None:
        before = "gae" if "gae" in graph else "return_to_go"
        weighted = graph.edit(insert={"correction": After(before, RolloutCorrection())})
        assert found(weighted) == [("FR028", "whiten")]
        assert found(fixed(weighted)) == []

    def test_importance_weights_after_scaling_have_no_finding(self) -> None:
        for graph, last in ((ppo(exact), "whiten"), (grpo(exact), "group_advantage")):
            assert found(graph.edit(insert={"correction": After(last, RolloutCorrection())})) == []

    def test_correction_that_only_rejects_rows_has_no_finding(self) -> None:
        graph = ppo(exact).edit(insert={"correction": After("gae", RolloutCorrection(mode="reject"))})
        assert found(graph) == []


class TestStatisticsOfTrainedRows:  # FR029
    @pytest.mark.parametrize(
        ("graph", "last"),
        [
            (ppo(exact), "whiten"),
            (gpg(exact), "gpg_advantage"),
            (reinforce_plus_plus_baseline(exact), "whiten"),
        ],
        ids=["ppo", "gpg", "reinforce_plus_plus_baseline"],
    )
    @pytest.mark.parametrize("gate", [Filter(Length(most=9)), Filter(Spread()), Collect(Spread(), groups=2)])
    def test_filter_after_batch_statistics_is_found(self, graph: Graph, last: str, gate: Operator) -> None:
        late = graph.edit(insert={"gate": After(last, gate)})
        assert found(late) == [("FR029", "gate")]
        assert f"after {last} computed batch statistics" in the_message(late, "FR029")
        assert found(fixed(late)) == []
        assert found(graph.edit(insert={"gate": After("reward", gate)})) == []

    def test_filter_of_groups_after_group_statistics_has_no_finding(self) -> None:
        for graph, last in ((grpo(exact), "group_advantage"), (pass_at_k(exact), "pass_at_k_advantage")):
            assert found(graph.edit(insert={"gate": After(last, Filter(Spread()))})) == []

    def test_filter_after_row_statistics_has_no_finding(self) -> None:
        assert GAE().granularity == "row"
        assert found(ppo(exact).edit(insert={"gate": After("gae", Filter(Length(most=9)))})) == []
