"""Rules about critics: a planted defect of each, its fix, and similar graphs without findings."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.core.operators.when import When
from flowrl.graph import algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    GAE,
    DecoupledGAE,
    Generate,
    KLShape,
    OldLogProb,
    RefLogProb,
    Reward,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
    Whiten,
)
from flowrl.records import PromptBatch
from tests.rules.findings import fixed, found, the_message
from tests.support.kernel import exact


class TestCriticIsTrained:  # FR023
    def test_values_of_an_untrained_critic_are_found(self) -> None:
        graph = ppo(exact).edit(drop=["update_critic"])
        assert found(graph) == [("FR023", "value")]
        assert "UpdateCritic(critic=Role('critic'))" in the_message(graph, "FR023")

    def test_finding_names_the_role_of_the_untrained_critic(self) -> None:
        graph = ppo(exact).edit(drop=["update_critic"], set={"value.critic": Role("judge")})
        assert "from 'judge', which nothing trains" in the_message(graph, "FR023")

    def test_critic_trained_on_values_of_another_is_found_by_FR005_only(self) -> None:  # FR005
        graph = ppo(exact).edit(set={"value.critic": Role("other")})
        assert found(graph) == [("FR005", "update_critic")]

    def test_values_that_no_policy_reads_have_no_finding(self) -> None:
        assert found(ppo(exact)) == found(grpo(exact)) == []
        assert found(ppo(exact).subgraph("update_critic")) == []
        assert found(ppo(exact).subgraph("value")) == []


class TestCriticGoesFirst:  # FR024
    def test_critic_that_starts_after_the_policy_is_found(self) -> None:
        graph = ppo(exact).edit(when={"update_critic": When(start=20)})
        assert found(graph) == [("FR024", "update_critic")]
        assert "from step 20 on" in the_message(graph, "FR024") and "from step 0 on" in the_message(graph, "FR024")
        assert found(fixed(graph)) == []

    @pytest.mark.parametrize("actor", [When(start=20), When(start=21), When(every=2, start=30)])
    def test_critic_that_starts_before_or_with_the_policy_has_no_finding(self, actor: When) -> None:
        assert found(ppo(exact).edit(when={"update_actor": actor})) == []
        assert found(ppo(exact).edit(when={"update_actor": actor, "update_critic": When(start=20)})) == []

    def test_late_inputs_of_the_update_shift_the_step_in_the_message(self) -> None:
        graph = ppo(exact).edit(when={"gae": When(start=9), "update_critic": When(start=20)})
        assert found(graph) == [("FR024", "update_critic")]
        assert "from step 20 on" in the_message(graph, "FR024") and "from step 9 on" in the_message(graph, "FR024")

    def test_critic_trained_every_second_step_has_no_finding(self) -> None:
        assert found(ppo(exact).edit(when={"update_critic": When(every=2)})) == []


class ReturnsOf(Operator):
    """Returns as advantages plus values, as in GAE."""

    def __call__(self, advantages: c.Advantages, values: c.Values) -> c.Returns: ...


class TestReturnsAreNotScaled:  # FR025
    def test_returns_from_whitened_advantages_are_found(self) -> None:
        graph = ppo(exact).edit(
            insert={"returns_of": After("whiten", ReturnsOf())}, wire={"update_critic.returns": "returns_of.returns"}
        )
        assert found(graph) == [("FR025", "update_critic")]
        message = the_message(graph, "FR025")
        assert "returns come from returns_of.returns, after whiten" in message

    def test_returns_from_unscaled_advantages_have_no_finding(self) -> None:
        graph = ppo(exact).edit(
            insert={"returns_of": After("gae", ReturnsOf())},
            wire={"returns_of.advantages": "gae.advantages", "update_critic.returns": "returns_of.returns"},
        )
        assert found(graph) == []
        assert found(ppo(exact).edit(replace={"gae": DecoupledGAE()})) == []

    def test_returns_from_scaled_rewards_have_no_finding(self) -> None:
        class Scaled(Operator):
            @property
            def effects(self) -> frozenset[str]:
                return frozenset({"scaled"})

            def __call__(self, token_level_rewards: c.TokenLevelRewards) -> c.TokenLevelRewards: ...

        assert found(ppo(exact).edit(insert={"scaled": After("kl_shape", Scaled())})) == []


@algorithm
def two(batch: PromptBatch, *, shaped: bool) -> Any:
    """A policy with KL in its rewards, and a critic whose returns include it or not."""
    rollout = Generate()(batch)
    old, ref, values = OldLogProb()(rollout), RefLogProb()(rollout), Value()(rollout)
    mask, scores = rollout.response_mask, Reward(exact)(rollout, batch)
    rewards = KLShape()(scores, old, ref, mask)
    returns = GAE(lam=1.0).named("returns")(rewards if shaped else scores, values, mask).returns
    white = Whiten()(GAE()(rewards, values, mask).advantages, mask)
    critic = UpdateCritic()(rollout, values=values, returns=returns)
    return Sync()(UpdateActor()(rollout, old_log_probs=old, advantages=white)), critic


class TestCriticLearnsThePolicysRewards:  # FR026
    def test_critic_with_other_rewards_than_the_policy_is_found(self) -> None:
        graph = two(shaped=False)
        assert found(graph) == [("FR026", "update_critic")]
        message = the_message(graph, "FR026")
        assert "returns of reward.token_level_scores" in message and "gae computes advantages of kl_shape" in message
        assert found(fixed(graph)) == []
        assert not two(shaped=True).diff(fixed(graph).edit(name="two"))

    def test_critic_with_the_rewards_of_the_policy_has_no_finding(self) -> None:
        assert found(two(shaped=True)) == []

    def test_rewards_of_a_critic_count_only_if_a_policy_reads_its_values(self) -> None:
        graph = two(shaped=False).edit(set={"value.critic": Role("critic")}, replace={"gae": GAE()}, name="two")
        assert found(graph) == [("FR026", "update_critic")]
        assert found(graph.subgraph("update_critic")) == []
