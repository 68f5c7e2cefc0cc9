"""Tests of `check.py` and `weights.py`: each rule finds the graph that violates it, and no other; the finding names the
node and a fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    GAE,
    Generate,
    GroupAdvantage,
    KLLoss,
    KLShape,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    Reward,
    RolloutCorrection,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
)
from flowrl.protocols.protocols import Critic, Rollout, Scorer, Trainer
from flowrl.records import CriticUpdated, PromptBatch, Tokens, Updated
from flowrl.rules import check as rules
from flowrl.rules.rule import RETIRED
from tests.rules.findings import edited_by, fixed
from tests.support.errors import raises


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return float(solution_str == ground_truth)


def found(graph: Graph, prompts: int | None = None) -> list[tuple[str, str]]:
    return [(finding.rule, finding.node) for finding in graph.check(prompts=prompts)]


KL_LOSS = UpdateActor(PPOClip(0.2), kl=KLLoss("k3", 0.001))


class TestValidGraphs:
    @pytest.mark.parametrize("n", [1, 4])
    def test_ppo_has_no_findings(self, n: int) -> None:
        assert found(ppo(score, n=n, mini_batch=4), prompts=8) == []

    @pytest.mark.parametrize("kl_coef", [0.0, 0.01])
    def test_grpo_has_no_findings(self, kl_coef: float) -> None:
        assert found(grpo(score, kl_coef=kl_coef, mini_batch=16), prompts=4) == []

    def test_evaluation_graph_may_sample_greedily(self) -> None:
        greedy = grpo(score, n=1, temperature=0.0)
        assert found(greedy) != []
        assert found(greedy.subgraph(until="reward")) == []


class TestCorrectionOnce:  # FR011
    def test_correction_by_weights_and_by_the_ratio_is_found(self) -> None:
        graph = grpo(score).edit(
            insert={"correction": After("group_advantage", RolloutCorrection())},
            set={"update_actor.loss.ratio_to": "rollout"},
        )
        assert found(graph) == [("FR011", "update_actor")]
        message = graph.check()[0].message
        assert "2 times" in message and "correction, update_actor" in message
        assert "PPOClip(ratio_to='old')" in message
        assert found(edited_by(graph, message)) == []
        assert found(graph.edit(set={"update_actor.loss.ratio_to": "old"})) == []
        assert found(graph.edit(set={"correction.mode": "reject"})) == []

    def test_two_corrections_by_weights_are_found(self) -> None:
        twice = {
            "by_token": After("whiten", RolloutCorrection()),
            "by_row": After("whiten", RolloutCorrection("sequence", "mask")),
        }
        graph = ppo(score).edit(insert=twice)
        assert found(graph) == [("FR011", "update_actor")]
        assert "ratio_to" not in graph.check()[0].message
        assert found(edited_by(graph, graph.check()[0].message)) == []
        assert found(graph.edit(set={"by_row.mode": "reject"})) == []

    def test_ratio_to_the_rollout_is_a_correction_for_lag(self) -> None:  # FR006
        assert found(grpo(score).edit(lag=1)) == [("FR006", "generate")]
        assert found(grpo(score).edit(lag=1, set={"update_actor.loss.ratio_to": "rollout"})) == []


class TestKLOnce:  # FR001
    def test_kl_in_the_reward_and_in_the_loss_is_found(self) -> None:
        graph = ppo(score).edit(replace={"update_actor": KL_LOSS})
        assert found(graph) == [("FR001", "update_actor")]
        message = graph.check()[0].message
        assert "2 times" in message and "kl_shape, update_actor" in message
        assert found(edited_by(graph, message)) == []
        assert "UpdateActor(kl=None)" in message
        assert found(graph.edit(replace={"update_actor": UpdateActor(kl=None)})) == []

    def test_kl_with_coefficient_zero_does_not_count(self) -> None:
        assert found(ppo(score, kl_coef=0.0).edit(replace={"update_actor": KL_LOSS})) == []

    def test_custom_operator_with_the_kl_effect_counts(self) -> None:
        class Anchor(Operator):
            @property
            def effects(self) -> frozenset[str]:
                return frozenset({"kl"})

            def __call__(self, advantages: c.Advantages, ref_log_prob: c.RefLogProbs) -> c.Advantages: ...

        graph = grpo(score).edit(
            insert={"anchor": After("group_advantage", Anchor())},
            wire={"anchor.ref_log_prob": "ref_log_prob.ref_log_prob"},
        )
        assert found(graph) == [("FR001", "update_actor")]
        assert "anchor, update_actor" in graph.check()[0].message
        assert found(edited_by(graph, graph.check()[0].message)) == []

    def test_two_kl_operators_without_kl_in_the_loss_are_found(self) -> None:
        class Anchor(Operator):
            @property
            def effects(self) -> frozenset[str]:
                return frozenset({"kl"})

            def __call__(self, advantages: c.Advantages, ref_log_prob: c.RefLogProbs) -> c.Advantages: ...

        graph = ppo(score).edit(insert={"anchor": After("whiten", Anchor())})
        assert found(graph) == [("FR001", "update_actor")]
        assert "PPOClip" not in graph.check()[0].message  # the loss has no KL to remove
        assert found(edited_by(graph, graph.check()[0].message)) == []

    def test_kl_that_reaches_only_the_critic_does_not_count(self) -> None:
        @algorithm
        def split(batch: PromptBatch):  # type: ignore[no-untyped-def]
            prompts = Repeat(4)(batch)
            rollout = Generate()(prompts)
            old, ref, values = OldLogProb()(rollout), RefLogProb()(rollout), Value()(rollout)
            scores = Reward(score)(rollout, prompts)
            shaped = KLShape()(scores, old, ref, rollout.response_mask)
            critic = UpdateCritic()(rollout, values, GAE()(shaped, values, rollout.response_mask).returns)
            advantages = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
            return Sync()(KL_LOSS(rollout, old, advantages, ref)), critic

        assert found(split()) == []


class TestSynced:  # FR002
    def test_update_without_a_sync_is_found(self) -> None:
        graph = ppo(score).subgraph(until=["update_actor", "update_critic"])
        assert found(graph) == [("FR002", "update_actor")]
        synced = fixed(graph, None)
        assert found(synced) == []
        assert synced.back_edges == [("sync", "generate")]

    def test_fix_of_a_missing_sync_names_the_roles(self) -> None:
        graph = grpo(score).edit(
            replace={
                "generate": Generate(rollout=Role("engine")),
                "old_log_prob": OldLogProb(actor=Role("policy")),
                "update_actor": UpdateActor(KL_LOSS.loss, actor=Role("policy")),
                "sync": Sync(actor=Role("policy"), rollout=Role("engine")),
            }
        )
        assert found(graph) == []
        unsynced = graph.subgraph(until="update_actor")
        assert found(unsynced) == [("FR002", "update_actor")]
        assert found(edited_by(unsynced, unsynced.check()[0].message)) == []

    def test_sync_to_another_engine_is_found(self) -> None:
        graph = grpo(score).edit(replace={"sync": Sync(rollout=Role("spare"))})
        assert found(graph) == [("FR002", "update_actor")]


class TestGroupOfOne:  # FR003
    def test_group_advantage_of_one_response_is_found(self) -> None:
        graph = grpo(score, n=1)
        assert found(graph) == [("FR003", "group_advantage")]
        assert fixed(graph) == graph.edit(set={"repeat.n": 8})
        assert found(fixed(graph)) == []

    def test_group_size_is_the_product_of_repeats(self) -> None:
        graph = grpo(score, n=1).edit(insert={"again": After("repeat", Repeat(2))})
        assert found(graph) == []

    def test_custom_group_baseline_of_one_response_is_found(self) -> None:
        class LeaveOneOut(Operator):
            @property
            def effects(self) -> frozenset[str]:
                return frozenset({"group baseline"})

            def __call__(
                self, token_level_rewards: c.TokenLevelRewards, response_mask: c.ResponseMask, uid: c.Uid
            ) -> c.Advantages: ...

        assert found(grpo(score, n=1).edit(replace={"group_advantage": LeaveOneOut()})) == [("FR003", "leave_one_out")]
        assert found(grpo(score, n=2).edit(replace={"group_advantage": LeaveOneOut()})) == []


class TestMiniBatchesDivide:  # FR004
    @pytest.mark.parametrize(
        ("mini_batch", "prompts", "fitting"), [(12, 4, 8), (64, 4, 32), (24, 5, 20), (7, 1, 4), (5, 4, 4)]
    )
    def test_mini_batch_that_does_not_divide_the_rows_is_found_with_the_nearest_that_does(
        self, mini_batch: int, prompts: int, fitting: int
    ) -> None:
        graph = grpo(score, n=8, mini_batch=mini_batch)
        assert found(graph, prompts) == [("FR004", "update_actor")]
        message = graph.check(prompts=prompts)[0].message
        assert f"mini_batch={mini_batch} does not divide the {prompts * 8} rows" in message
        assert f"mini_batch': {fitting}}})." in message
        assert found(grpo(score, n=8, mini_batch=fitting), prompts) == []

    def test_mini_batches_of_actor_and_critic_are_both_checked(self) -> None:
        assert found(ppo(score, n=2, mini_batch=6), 4) == [("FR004", "update_critic"), ("FR004", "update_actor")]

    def test_mini_batches_are_checked_only_if_the_number_of_prompts_is_known(self) -> None:
        assert found(grpo(score, n=8, mini_batch=12)) == []
        assert found(grpo(score, n=8, mini_batch=12), prompts=3) == []


class Blind(Operator):
    """A critic's update that reads no values."""

    critic: Writes[Critic] = Role("critic")

    def __call__(self, rollout: Tokens, returns: c.Returns) -> CriticUpdated: ...


class Smaller(Operator):
    """The smaller of two critics' values."""

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class TestCriticIsRead:  # FR005
    def test_critic_that_is_updated_and_never_read_is_found(self) -> None:
        class MonteCarlo(Operator):
            def __call__(self, token_level_rewards: c.TokenLevelRewards) -> c.Returns: ...

        @algorithm
        def unread(batch: PromptBatch, update: Operator):  # type: ignore[no-untyped-def]
            rollout = Generate()(batch)
            return update(rollout, returns=MonteCarlo()(Reward(score)(rollout, batch)))

        assert found(unread(Blind())) == [("FR005", "blind")]
        assert "Value(critic=Role('critic'))" in unread(Blind()).check()[0].message

    def test_critic_updated_with_values_of_another_is_found(self) -> None:
        graph = ppo(score).edit(replace={"value": Value(critic=Role("old_critic"))})
        assert found(graph) == [("FR005", "update_critic")]
        assert found(graph.edit(replace={"value": Value(critic=Role("critic"))})) == []

    def test_critic_updated_with_returns_of_another_is_found(self) -> None:
        @algorithm
        def two(batch: PromptBatch, own_returns: bool):  # type: ignore[no-untyped-def]
            rollout = Generate()(batch)
            mask = rollout.response_mask
            scores = Reward(score)(rollout, batch)
            own_values, other_values = Value()(rollout), Value(critic=Role("b")).named("value_b")(rollout)
            returns_b = GAE().named("gae_b")(scores, other_values, mask).returns
            update_b = UpdateCritic(critic=Role("b")).named("update_b")(rollout, other_values, returns_b)
            returns = GAE()(scores, own_values, mask).returns if own_returns else returns_b
            return UpdateCritic()(rollout, own_values, returns), update_b

        assert found(two(own_returns=True)) == []
        assert found(two(own_returns=False)) == [("FR005", "update_critic")]
        message = two(own_returns=False).check()[0].message
        assert "returns come from gae_b.returns" in message and "values of 'b'" in message

    def test_critic_in_an_ensemble_has_no_finding(self) -> None:
        @algorithm
        def twin(batch: PromptBatch):  # type: ignore[no-untyped-def]
            rollout = Generate()(batch)
            values = Smaller()(Value()(rollout), Value(critic=Role("b")).named("value_b")(rollout))
            returns = GAE()(Reward(score)(rollout, batch), values, rollout.response_mask).returns
            return UpdateCritic()(rollout, values, returns)

        assert found(twin()) == []


class Truncate(Operator):
    """An importance correction of advantages."""

    @property
    def effects(self) -> frozenset[str]:
        return frozenset({"importance correction"})

    def __call__(self, advantages: c.Advantages, rollout_log_probs: c.RolloutLogProbs) -> c.Advantages: ...


class TestLagIsCorrected:  # FR006
    def test_lag_without_correction_is_found(self) -> None:
        graph = grpo(score).edit(lag=2)
        assert found(graph) == [("FR006", "generate")]
        message = graph.check()[0].message
        assert "2 version(s) ahead" in message
        assert found(edited_by(graph, message)) == []

    def test_lag_with_correction_has_no_finding(self) -> None:
        graph = grpo(score).edit(lag=2, insert={"truncate": After("group_advantage", Truncate())})
        assert found(graph) == []

    def test_correction_that_does_not_reach_the_update_does_not_count(self) -> None:
        class Log(Operator):
            def __call__(self, advantages: c.Advantages) -> CriticUpdated: ...

        graph = grpo(score).edit(lag=1, insert={"truncate": After("group_advantage", Truncate())})
        branched = graph.edit(
            insert={"log": After("truncate", Log())}, wire={"update_actor.advantages": "group_advantage.advantages"}
        )
        assert "truncate" in branched
        assert found(branched) == [("FR006", "generate")]


class TestOtherRules:
    def test_greedy_training_responses_are_found(self) -> None:  # FR007
        graph = ppo(score, temperature=0.0)
        assert found(graph) == [("FR007", "generate")]
        assert found(fixed(graph, None)) == []

    def test_two_updates_of_one_role_are_found(self) -> None:  # FR008
        @algorithm
        def twice(batch: PromptBatch):  # type: ignore[no-untyped-def]
            prompts = Repeat(2)(batch)
            rollout = Generate()(prompts)
            old, scores = OldLogProb()(rollout), Reward(score)(rollout, prompts)
            advantages = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
            first = UpdateActor()(rollout, old, advantages)
            return Sync()(first), UpdateActor().named("again")(rollout, old, advantages)

        graph = twice()
        assert found(graph) == [("FR002", "again"), ("FR008", "again")]
        message = next(f.message for f in graph.check() if f.rule == "FR008")
        assert "'actor' after update_actor" in message
        assert found(edited_by(graph, message)) == []

    def test_old_log_probs_of_another_role_are_found(self) -> None:  # FR009
        graph = ppo(score).edit(replace={"old_log_prob": OldLogProb(actor=Role("teacher"))})
        assert found(graph) == [("FR009", "old_log_prob")]
        assert found(fixed(graph, None)) == []

    def test_custom_operator_with_old_log_probs_of_another_role_is_found(self) -> None:  # FR009
        class Rescore(Operator):
            policy: Reads[Scorer] = Role("teacher")

            def __call__(self, rollout: Tokens) -> c.OldLogProbs: ...

        graph = ppo(score).edit(replace={"old_log_prob": Rescore()})
        assert found(graph) == [("FR009", "rescore")]
        assert found(fixed(graph, None)) == []

    @pytest.mark.parametrize("make", [ppo, grpo])
    def test_reference_that_is_trained_is_found(self, make: Callable[..., Graph]) -> None:  # FR010
        graph = make(score).edit(replace={"ref_log_prob": RefLogProb(ref=Role("actor"))})
        assert found(graph) == [("FR010", "ref_log_prob")]
        assert found(fixed(graph, None)) == []


class TestTypesRefuseFirst:
    """Defects that need no rule: type inference refuses such graphs."""

    def test_rollout_log_probs_do_not_fit_the_old_log_probs_port(self) -> None:
        suggestion = "old_log_prob.old_log_probs"
        with raises("graph.type-mismatch", node="update_actor", port="old_log_probs", suggestion=suggestion):
            ppo(score).edit(wire={"update_actor.old_log_probs": "generate.rollout_log_probs"})

    def test_critic_update_without_values_is_refused(self) -> None:
        @algorithm
        def blind(batch: PromptBatch):  # type: ignore[no-untyped-def]
            rollout = Generate()(batch)
            adv = GAE()(Reward(score)(rollout, batch), Value()(rollout), rollout.response_mask)
            return UpdateCritic()(rollout, returns=adv.returns)  # type: ignore[call-arg]

        with raises("graph.unwired-port", node="update_critic", port="values", suggestion="value.values"):
            blind()


class TestReport:
    def test_require_raises_with_all_findings_in_order(self) -> None:
        graph = (
            ppo(score, temperature=0.0, mini_batch=3)
            .edit(replace={"update_actor": UpdateActor(mini_batch=3, kl=KL_LOSS.kl)})
            .subgraph(until=["update_actor", "update_critic"])
        )
        expected = [
            ("FR001", "update_actor"),
            ("FR002", "update_actor"),
            ("FR004", "update_critic"),
            ("FR004", "update_actor"),
            ("FR007", "generate"),
        ]
        assert found(graph, prompts=4) == expected
        ids, nodes = (tuple(values) for values in zip(*expected, strict=True))
        with raises("rule.violated", rules=ids, nodes=nodes) as raised:
            rules.require(graph, prompts=4)
        lines = raised.value.message.splitlines()
        assert lines[0].startswith("ppo violates rules") and "5 findings" in lines[0]
        assert [tuple(line.split(":")[0].split()) for line in lines[1:]] == expected

    def test_require_accepts_a_graph_without_findings(self) -> None:
        rules.require(grpo(score), prompts=4)

    def test_rule_ids_are_sorted_and_each_rule_has_a_reason_and_a_source(self) -> None:
        ids = [rule.id for rule in rules.RULES]
        assert ids == sorted(set(ids)) and all(re.fullmatch(r"FR\d{3}", id) for id in ids)
        for rule in rules.RULES:
            assert rule.reason.endswith(".") and re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", rule.source)

    def test_retired_ids_are_not_reused(self) -> None:
        assert RETIRED.keys() == {"FR035", "FR036", "FR040"}
        assert not RETIRED.keys() & {rule.id for rule in rules.RULES}

    def test_second_trainer_without_a_sync_is_found(self) -> None:
        class Distill(Operator):
            """A second policy that is trained on the first one's rows and sampled by no engine of its own."""

            student: Writes[Trainer] = Role("student")
            engine: Writes[Rollout] = Role("spare")

            def __call__(self, rollout: Tokens, advantages: c.Advantages) -> Updated: ...

        graph = grpo(score).edit(insert={"distill": After("update_actor", Distill())})
        assert found(graph) == [("FR002", "distill")]
