"""Rules about losses: a planted defect of each, its fix, and similar graphs without findings."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.graph import Graph, algorithm
from flowrl.graphs import dr_grpo, gmpo, gpg, grpo, gspo, online_dpo, ppo, reinforce_plus_plus_baseline, rloo
from flowrl.operators import (
    DPO,
    DRO,
    GMPO,
    GSPO,
    NLL,
    Collect,
    Filter,
    Generate,
    KLLoss,
    KLShape,
    Length,
    OldLogProb,
    Reinforce,
    Repeat,
    Reward,
    RLOOAdvantage,
    RolloutCorrection,
    Spread,
    Sync,
    UpdateActor,
)
from flowrl.records import PromptBatch
from tests.rules.findings import fixed, found, the_message
from tests.support.kernel import exact


class TestKLHasAGradient:  # FR015
    def test_k1_in_the_loss_is_found(self) -> None:
        graph = grpo(exact).edit(set={"update_actor.kl": KLLoss("k1", 0.01)})
        assert found(graph) == [("FR015", "update_actor")]
        assert found(fixed(graph)) == []

    @pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
    def test_other_estimators_in_the_loss_have_no_finding(self, estimator: Any) -> None:
        assert found(grpo(exact).edit(set={"update_actor.kl": KLLoss(estimator)})) == []

    def test_k1_in_the_reward_has_no_finding(self) -> None:
        assert found(ppo(exact).edit(set={"kl_shape.estimator": "k1"})) == []


class TestAnchoredOnce:  # FR017
    def test_kl_term_with_a_preference_loss_is_found(self) -> None:
        graph = online_dpo(exact).edit(set={"update_actor.kl": KLLoss()})
        assert found(graph) == [("FR017", "update_actor")]
        assert found(fixed(graph)) == []

    def test_kl_in_the_reward_with_an_anchored_loss_is_found(self) -> None:
        graph = rloo(exact).edit(
            set={"update_actor.loss": DRO(), "update_actor.aggregation": "seq-mean-token-mean"},
        )
        assert found(graph) == [("FR017", "update_actor")]
        assert "edit(drop=['kl_shape'])" in the_message(graph, "FR017")
        assert found(fixed(graph)) == []

    def test_custom_loss_that_declares_a_reference_is_checked(self) -> None:
        class Anchored(Loss):
            @property
            def effects(self) -> frozenset[str]:
                return frozenset({"reference regularization"})

            def __call__(self, log_probs: c.LogProbs, ref_log_prob: c.RefLogProbs, old: c.OldLogProbs) -> Tensor: ...

        graph = grpo(exact).edit(set={"update_actor.loss": Anchored()})
        assert found(graph) == [("FR017", "update_actor")]
        assert found(fixed(graph)) == []


class TestRowLossesAreNotSummedOverTokens:  # FR018
    @pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
    @pytest.mark.parametrize("graph", [gspo(exact), gmpo(exact), online_dpo(exact)], ids=lambda graph: graph.name)
    def test_row_loss_summed_over_tokens_is_found(self, graph: Graph, aggregation: str) -> None:
        longer = graph.edit(set={"update_actor.aggregation": aggregation})
        assert found(longer) == [("FR018", "update_actor")]
        assert found(fixed(longer)) == []

    @pytest.mark.parametrize("algorithm", [grpo, dr_grpo])
    def test_row_loss_set_without_its_aggregation_is_found(self, algorithm: Any) -> None:
        graph = algorithm(exact).edit(set={"update_actor.loss": GSPO()})
        assert found(graph) == [("FR018", "update_actor")]
        assert found(fixed(graph)) == []

    def test_token_losses_with_any_aggregation_have_no_finding(self) -> None:
        for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
            assert found(grpo(exact).edit(set={"update_actor.aggregation": aggregation})) == []


class TestOneAdvantagePerRow:  # FR019
    def test_advantages_from_values_with_a_ratio_per_row_are_found(self) -> None:
        set_ = {"update_actor.loss": GMPO(), "update_actor.aggregation": "seq-mean-token-mean"}
        graph = ppo(exact).edit(set=set_)
        assert found(graph) == [("FR019", "update_actor")]
        assert "gae gives each token its own, from values" in the_message(graph, "FR019")
        # GSPO-token accepts an advantage per token.
        assert found(ppo(exact).edit(set={**set_, "update_actor.loss": GSPO()})) == []
        assert found(graph.edit(replace={"gae": RLOOAdvantage()}, drop=["update_critic"], set={"repeat.n": 4})) == []
        assert found(gmpo(exact)) == []

    def test_advantages_weighted_per_token_with_a_ratio_per_row_are_found(self) -> None:
        graph = gmpo(exact).edit(insert={"correction": After("group_advantage", RolloutCorrection())})
        assert found(graph) == [("FR019", "update_actor")]
        assert "correction gives each token its own, from weights" in the_message(graph, "FR019")
        assert found(fixed(graph)) == []
        assert found(graph.edit(set={"correction.mode": "reject"})) == [("FR019", "update_actor")]
        assert found(fixed(gmpo(exact).edit(lag=1))) == []  # the fix of FR006 is a correction per row
        assert found(graph.edit(set={"update_actor.loss": GSPO()})) == []


class TestColdResponses:  # FR042
    @pytest.mark.parametrize("cold", [0.01, 0.09])
    def test_a_ratio_of_cold_responses_is_found(self, cold: float) -> None:
        graph = grpo(exact).edit(set={"generate.temperature": cold})
        assert found(graph) == [("FR042", "generate")]
        assert found(fixed(graph)) == []

    def test_other_temperatures_and_losses_without_a_ratio_have_no_finding(self) -> None:
        assert found(grpo(exact).edit(set={"generate.temperature": 0.1})) == []
        assert found(grpo(exact).edit(set={"generate.temperature": 0.01, "update_actor.loss": Reinforce()})) == []


class TestOneStepWithoutARatio:  # FR020
    PLAIN = grpo(exact, n=2).edit(set={"update_actor.loss": Reinforce()})

    @pytest.mark.parametrize(
        ("several", "part"),
        [
            ({"update_actor.ppo_epochs": 2}, "with ppo_epochs=2 it"),
            ({"update_actor.mini_batch": 4}, "with mini_batch=4 for 8 rows it"),
            ({"update_actor.ppo_epochs": 3, "update_actor.mini_batch": 4}, "ppo_epochs=3 and mini_batch=4 for 8 rows"),
            ({"update_actor.prior_updates": 1}, "with prior_updates=1 it"),
        ],
    )
    def test_several_optimizer_steps_without_a_ratio_are_found(self, several: dict[str, Any], part: str) -> None:
        allowed = {"FR043": "the data is as old"}
        graph = self.PLAIN.edit(set=several, allow=allowed)
        assert found(graph) == [("FR020", "update_actor")]
        assert part in the_message(graph, "FR020")
        assert found(grpo(exact, n=2).edit(set=several, allow=allowed)) == []  # PPOClip has a ratio

    def test_one_optimizer_step_without_a_ratio_has_no_finding(self) -> None:
        assert found(self.PLAIN) == []
        assert found(self.PLAIN.edit(set={"update_actor.mini_batch": 8})) == []
        assert found(self.PLAIN.edit(set={"update_actor.mini_batch": 4}), prompts=None) == []
        assert found(self.PLAIN.edit(set={"update_actor.mini_batch": 4}), prompts=2) == []

    def test_optimizer_steps_are_counted_over_collected_rows(self) -> None:
        collected = self.PLAIN.edit(insert={"collect": After("reward", Collect(Spread(), groups=16))})
        assert found(collected.edit(set={"update_actor.mini_batch": 8})) == [("FR020", "update_actor")]
        assert found(collected.edit(set={"update_actor.mini_batch": 32})) == []

    def test_losses_that_need_no_ratio_have_no_finding(self) -> None:
        no_ratio = {"update_actor.loss": DRO(), "update_actor.aggregation": "seq-mean-token-mean"}
        graph = grpo(exact).edit(set={**no_ratio, "update_actor.kl": None, "update_actor.ppo_epochs": 4})
        assert found(graph) == []  # DRO is off-policy
        assert found(gpg(exact, ppo_epochs=2, mini_batch=4)) == []


class TestGroups:
    def test_preference_loss_with_one_response_per_prompt_is_found(self) -> None:  # FR021
        assert found(online_dpo(exact, n=1)) == [("FR021", "update_actor")]
        assert found(fixed(online_dpo(exact, n=1))) == []
        assert found(online_dpo(exact, n=2)) == []

    @pytest.mark.parametrize(("n", "mini_batch", "fitting"), [(4, 2, 4), (4, 8, None), (2, 1, 2), (8, 16, None)])
    def test_mini_batch_that_splits_groups_is_found(
        self, n: int, mini_batch: int, fitting: int | None
    ) -> None:  # FR022
        graph = online_dpo(exact, n=n, mini_batch=mini_batch)
        assert found(graph) == ([] if fitting is None else [("FR022", "update_actor")])
        if fitting is not None:
            assert f"'update_actor.mini_batch': {fitting}" in the_message(graph, "FR022")
            assert found(fixed(graph)) == []

    def test_groups_of_unknown_size_are_not_checked(self) -> None:  # FR022
        graph = online_dpo(exact, n=4).edit(insert={"filter": After("reward", Filter(Length(most=9)))})
        assert found(graph.edit(set={"update_actor.mini_batch": 1}), prompts=None) == []

    def test_mini_batch_that_splits_groups_of_a_token_loss_has_no_finding(self) -> None:
        assert found(grpo(exact, n=4, mini_batch=2)) == []


class Best(Operator):
    """Whether a row has the best score."""

    def __call__(self, token_level_scores: c.TokenLevelScores) -> c.RowMask: ...


@algorithm
def imitated(batch: PromptBatch, *, teacher: str = "rollout") -> Any:
    """Supervised fine-tuning on an engine's responses."""
    rollout = Generate(rollout=Role(teacher))(batch)
    scored = UpdateActor(NLL())(rollout)
    return Sync()(scored)


class TestImitatesSelected:  # FR030
    IMITATED = grpo(exact).edit(set={"update_actor.loss": NLL(), "update_actor.kl": None}, name="best_of_n")

    def test_imitating_all_own_responses_is_found(self) -> None:
        assert found(self.IMITATED) == [("FR030", "update_actor")]
        assert "a Filter after the reward" in the_message(self.IMITATED, "FR030")
        assert found(imitated()) == [("FR030", "update_actor")]

    def test_imitating_selected_responses_has_no_finding(self) -> None:
        scored = grpo(exact).edit(insert={"best": After("reward", Filter(Best()))})
        chosen = scored.edit(set={"update_actor.loss": NLL(), "update_actor.kl": None})
        assert found(chosen) == []
        assert found(chosen.edit(set={"update_actor.ppo_epochs": 3})) == []  # imitation needs no on-policy rows

    def test_scored_responses_get_a_filter(self) -> None:
        @algorithm
        def unfiltered(batch: PromptBatch):  # type: ignore[no-untyped-def]
            prompts = Repeat(4)(batch)
            rollout = Generate()(prompts)
            return Sync()(UpdateActor(NLL())(rollout)), Reward(exact)(rollout, prompts)

        assert found(unfiltered()) == [("FR030", "update_actor")]
        assert found(fixed(unfiltered())) == []

    def test_imitating_another_policy_is_not_FR030(self) -> None:
        assert found(imitated(teacher="teacher")) == []


class TestBuiltInAlgorithms:
    """Built-in algorithms with more than one optimizer step per batch."""

    @pytest.mark.parametrize("make", [grpo, gspo, gmpo, gpg, rloo, reinforce_plus_plus_baseline, ppo])
    def test_several_optimizer_steps_and_kl_have_no_finding(self, make: Any) -> None:
        kl = {} if make is ppo else {"kl_coef": 0.1}
        assert found(make(exact, n=4, ppo_epochs=2, mini_batch=4, **kl)) == []

    def test_losses_anchored_to_the_reference_declare_it(self) -> None:
        assert DPO().effects == {"reference regularization"}
        assert DRO().effects == {"reference regularization", "nonlinear in advantages"}
        assert OldLogProb().effects == KLShape(0.0).effects == frozenset()
