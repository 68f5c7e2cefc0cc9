"""Rules about the inputs of an update: a planted defect of each, its fix, and similar graphs without findings."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.graph import Graph, algorithm
from flowrl.graphs import gpg, grpo, pass_at_k, ppo, reinforce_plus_plus_baseline, remax
from flowrl.operators import (
    GAE,
    Filter,
    Generate,
    KLShape,
    OldLogProb,
    RefLogProb,
    Repeat,
    Reward,
    RLOOAdvantage,
    RolloutCorrection,
    Spread,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
    Whiten,
)
from flowrl.records import PromptBatch
from tests.rules.findings import fixed, found
from tests.support.kernel import exact

CORRECTED = {"correction": After("group_advantage", RolloutCorrection())}


class TestSamples:  # FR007
    @pytest.mark.parametrize(
        "greedy", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_k": 1}, {"min_p": 1}]
    )
    def test_greedy_responses_are_found(self, greedy: dict[str, Any]) -> None:
        graph = gpg(exact, n=4).edit(set={f"generate.{name}": value for name, value in greedy.items()})
        assert found(graph) == [("FR007", "generate")]
        assert found(fixed(graph)) == []


class TestFullDistribution:  # FR012
    @pytest.mark.parametrize(
        "changes",
        [
            {"generate.top_p": 0.9},
            {"generate.top_k": 20},
            {"generate.min_p": 0.05},
            {"generate.repetition_penalty": 1.1},
            {"generate.presence_penalty": -0.5},
            {"generate.frequency_penalty": 0.5, "generate.top_p": 0.9},
        ],
    )
    def test_correction_with_another_distribution_is_found(self, changes: dict[str, Any]) -> None:
        graph = grpo(exact).edit(insert=CORRECTED, set=changes)
        assert found(graph) == [("FR012", "generate")]
        assert "correction compares its log-probs" in graph.check()[0].message
        assert found(fixed(graph)) == []
        assert found(graph.edit(drop=["correction"])) == []

    def test_correction_that_only_rejects_has_no_finding(self) -> None:
        graph = grpo(exact).edit(insert=CORRECTED, set={"generate.top_p": 0.9})
        assert found(graph.edit(set={"correction.mode": "reject"})) == []

    def test_truncated_sampling_of_other_responses_has_no_finding(self) -> None:
        graph = remax(exact).edit(insert={"correction": After("subtract_baseline", RolloutCorrection())})
        assert found(graph.edit(set={"greedy.top_k": 1})) == []
        assert found(graph.edit(set={"generate.top_k": 20})) == [("FR012", "generate")]


class TestScaledOnce:  # FR013
    @pytest.mark.parametrize("graph", [grpo(exact), pass_at_k(exact)])
    def test_whitening_after_the_group_deviation_is_found(self, graph: Graph) -> None:
        name = "group_advantage" if "group_advantage" in graph else "pass_at_k_advantage"
        twice = graph.edit(insert={"whiten": After(name, Whiten())})
        assert found(twice) == [("FR013", "whiten")]
        assert found(fixed(twice)) == []

    def test_whitening_after_a_gate_is_found(self) -> None:
        twice = grpo(exact).edit(insert={"gate": After("group_advantage", Filter(Spread()))})
        assert found(twice.edit(insert={"whiten": After("gate", Whiten())})) == [("FR013", "whiten")]

    def test_whitening_of_unscaled_advantages_has_no_finding(self) -> None:
        assert found(reinforce_plus_plus_baseline(exact)) == []
        assert found(reinforce_plus_plus_baseline(exact).edit(set={"group_advantage.normalize_std": True})) == [
            ("FR013", "whiten")
        ]
        assert found(gpg(exact).edit(insert={"whiten": After("gpg_advantage", Whiten())})) == []
        assert found(ppo(exact)) == []

    def test_whitening_of_combined_advantages_has_no_finding(self) -> None:
        class Both(Operator):
            def __call__(self, first: c.Advantages, second: c.Advantages) -> c.Advantages: ...

        graph = grpo(exact).edit(
            insert={"both": After("group_advantage", Both()), "whiten": After("group_advantage", Whiten())},
            wire={
                "both.first": "group_advantage.advantages",
                "both.second": "group_advantage.advantages",
                "whiten.advantages": "both.advantages",
                "update_actor.advantages": "whiten.advantages",
            },
        )
        assert found(graph) == []


@algorithm
def split(batch: PromptBatch, *, kl_in_policy: bool) -> Any:
    """The critic learns from rewards with KL; the policy does so, too, or learns from scores."""
    prompts = Repeat(4)(batch)
    rollout = Generate()(prompts)
    old, ref, values = OldLogProb()(rollout), RefLogProb()(rollout), Value()(rollout)
    scores = Reward(exact)(rollout, prompts)
    shaped = KLShape()(scores, old, ref, rollout.response_mask)
    critic = UpdateCritic()(rollout, values=values, returns=GAE()(shaped, values, rollout.response_mask).returns)
    advantages = RLOOAdvantage()(shaped if kl_in_policy else scores, rollout.response_mask, prompts.uid)
    return Sync()(UpdateActor()(rollout, old_log_probs=old, advantages=advantages)), critic


class TestKLReachesThePolicy:  # FR014
    def test_kl_that_reaches_only_the_critic_is_found(self) -> None:
        graph = split(kl_in_policy=False)
        assert found(graph) == [("FR014", "kl_shape")]
        assert found(fixed(graph)) == []

    def test_kl_that_reaches_the_policy_has_no_finding(self) -> None:
        assert found(split(kl_in_policy=True)) == []

    def test_critic_trained_without_a_policy_has_no_finding(self) -> None:
        assert found(ppo(exact).subgraph("update_critic")) == []
