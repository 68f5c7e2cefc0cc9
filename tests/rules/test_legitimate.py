"""Published methods with several models, engines or stores, which `updates`, `losses` and `weights` accept."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torch import Tensor

from flowrl import columns as c
from flowrl.backends import TorchRollout
from flowrl.columns import Widths
from flowrl.core.operators.loss import Loss, Unit
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.core.operators.session import State
from flowrl.core.operators.when import When
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, grpo_sft
from flowrl.operators import (
    DPO,
    GAE,
    NLL,
    Generate,
    GroupAdvantage,
    KLLoss,
    KLShape,
    OldLogProb,
    RefLogProb,
    Reinforce,
    Repeat,
    Reward,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
)
from flowrl.records import DemoBatch, PreferenceBatch, PromptBatch, RolloutBatch
from tests.rules.findings import fixed, found, the_message
from tests.support.kernel import exact


@algorithm
def critic_and_policy(batch: PromptBatch):  # type: ignore[no-untyped-def]
    """A policy that imitates a frozen teacher, and a critic of the teacher's responses."""
    taught = Generate(rollout=Role("teacher"))(batch)
    values = Value()(taught)
    returns = GAE()(Reward(exact)(taught, batch), values, taught.response_mask).returns
    return UpdateActor(NLL())(taught), UpdateCritic()(taught, values=values, returns=returns)


class Questions(Operator):
    """The prompts of demonstrations."""

    new_axes = ("prompt",)

    def __call__(self, demos: DemoBatch) -> PromptBatch: ...


class Pair(Operator):
    """Each demonstration, followed by the opponent's response to its prompt."""

    new_axes = ("batch", "prompt", "response")

    def __call__(self, demos: DemoBatch, played: Widths[RolloutBatch, "played"]) -> PreferenceBatch: ...


@algorithm
def spin(demos: DemoBatch):  # type: ignore[no-untyped-def]
    """SPIN (arXiv:2401.01335): demonstrations are preferred to responses of the previous iteration's policy."""
    played = Generate(rollout=Role("opponent"))(Questions()(demos))
    pairs = Pair()(demos, played)
    update = UpdateActor(DPO(), aggregation="seq-mean-token-mean")
    return update(pairs, ref_log_prob=RefLogProb()(pairs), token_level_scores=pairs.token_level_scores, uid=pairs.uid)


class Store(Operator):
    """Good responses of this and of earlier steps."""

    new_axes = ("batch", "prompt", "response")
    rows = State(lambda self: [])

    def __call__(self, rollout: RolloutBatch, token_level_scores: c.TokenLevelScores) -> RolloutBatch: ...


@algorithm
def rest(batch: PromptBatch):  # type: ignore[no-untyped-def]
    """ReST (arXiv:2308.08998): responses above a threshold are stored, and imitated."""
    prompts = Repeat(4)(batch)
    rollout = Generate()(prompts)
    return Sync()(UpdateActor(NLL())(Store()(rollout, Reward(exact)(rollout, prompts))))


class Hint(Operator):
    """Prompts that contain the right answer."""

    new_axes = ("prompt",)

    def __call__(self, batch: PromptBatch) -> PromptBatch: ...


class Right(Operator):
    """The own attempt if it is right, else that with the hint; a row without either is masked."""

    new_axes = ("prompt", "response")

    def __call__(
        self,
        rollout: RolloutBatch,
        hinted: Widths[RolloutBatch, "hinted"],
        own: c.TokenLevelScores,
        with_hint: Widths[c.TokenLevelScores, "hinted"],
    ) -> RolloutBatch: ...


class RightOnly(Operator):
    """Masks the rows that are wrong."""

    def __call__(self, rollout: RolloutBatch, token_level_scores: c.TokenLevelScores) -> RolloutBatch: ...


@algorithm
def star(batch: PromptBatch):  # type: ignore[no-untyped-def]
    """STaR (arXiv:2203.14465): right rationales are imitated, also those for which the answer was given."""
    own = Generate()(batch)
    hints = Hint()(batch)
    hinted = Generate().named("rationalize")(hints)
    scores = Reward(exact)(own, batch), Reward(exact).named("reward_hinted")(hinted, hints)
    return Sync()(UpdateActor(NLL())(Right()(own, hinted, *scores)))


@algorithm
def masked_star(batch: PromptBatch):  # type: ignore[no-untyped-def]
    """The same without hints, where the mask selects."""
    own = Generate()(batch)
    return Sync()(UpdateActor(NLL())(RightOnly()(own, Reward(exact)(own, batch))))


class Outcome(Loss):
    """Cross-entropy of the outcome under an implicit reward."""

    unit: ClassVar[Unit] = "row"

    def __call__(
        self, log_probs: c.LogProbs, ref_log_prob: c.RefLogProbs, token_level_scores: c.TokenLevelScores
    ) -> Tensor: ...


class PlainOutcome(Loss):
    """The same without a reference."""

    unit: ClassVar[Unit] = "row"

    def __call__(self, log_probs: c.LogProbs, token_level_scores: c.TokenLevelScores) -> Tensor: ...


class Implicit(Operator):
    """Token rewards: how much likelier the reward model finds a token than its reference."""

    def __call__(self, prm: c.LogProbs, ref: c.RefLogProbs) -> c.TokenLevelScores: ...


@algorithm
def prime(batch: PromptBatch, *, loss: Loss):  # type: ignore[no-untyped-def]
    """PRIME (arXiv:2502.01456): the process reward model learns from the outcomes of the policy's responses."""
    prompts = Repeat(4)(batch)
    rollout = Generate()(prompts)
    outcomes, ref = Reward(exact)(rollout, prompts), RefLogProb()(rollout)
    model = Role("prm")
    read = {"ref_log_prob": ref} if isinstance(loss, Outcome) else {}
    prm = UpdateActor(loss, actor=model, aggregation="seq-mean-token-mean").named("update_prm")
    trained = prm(rollout, token_level_scores=outcomes, **read)
    advantages = GroupAdvantage()(outcomes, rollout.response_mask, prompts.uid)
    return Sync()(UpdateActor()(rollout, old_log_probs=OldLogProb()(rollout), advantages=advantages)), trained


@algorithm
def two_references(batch: PromptBatch):  # type: ignore[no-untyped-def]
    """KL to the initial policy in the reward, and to an expert in the loss."""
    prompts = Repeat(4)(batch)
    rollout = Generate()(prompts)
    old = OldLogProb()(rollout)
    shaped = KLShape()(Reward(exact)(rollout, prompts), old, RefLogProb()(rollout), rollout.response_mask)
    advantages = GroupAdvantage(normalize_std=False)(shaped, rollout.response_mask, prompts.uid)
    expert = RefLogProb(ref=Role("expert")).named("expert")(rollout)
    update = UpdateActor(kl=KLLoss())
    return Sync()(update(rollout, old_log_probs=old, advantages=advantages, ref_log_prob=expert))


@pytest.mark.parametrize(
    "graph",
    [
        critic_and_policy(),
        spin(),
        rest(),
        star(),
        masked_star(),
        prime(loss=Outcome()),
        prime(loss=PlainOutcome()),
        two_references(),
    ],
    ids=lambda graph: str(graph.name),
)
def test_published_method_has_no_finding(graph: Graph) -> None:
    assert found(graph) == []


# ------------------------------------------------------------------------------------------------ similar, but harmful


def test_policy_gradient_on_a_teachers_responses_is_found() -> None:
    graph = grpo(exact).edit(set={"generate.rollout": Role("teacher")})
    assert found(graph) == [("FR002", "update_actor")]
    assert found(fixed(graph)) == []


def test_sync_into_a_frozen_engine_is_not_suggested() -> None:
    frozen = grpo(exact).edit(drop=["sync"]).bound({"rollout": TorchRollout("model", frozen=True)})
    assert found(frozen) == [("FR002", "update_actor")]
    assert "insert=" not in the_message(frozen, "FR002")


def test_engine_that_is_bound_and_not_frozen_needs_a_sync() -> None:
    bound = spin().bound({"opponent": TorchRollout("model")})
    assert found(bound) == [("FR002", "update_actor")]
    assert found(spin().bound({"opponent": TorchRollout("model", frozen=True)})) == []


def test_policy_gradient_on_another_policys_responses_is_found() -> None:
    """Its sync would overwrite the weights of the other policy."""
    wrong = prime(loss=PlainOutcome()).edit(
        set={"update_prm.loss": Reinforce()}, wire={"update_prm.advantages": "group_advantage.advantages"}
    )
    assert ("FR002", "update_prm") in found(wrong)
    assert "insert=" not in the_message(wrong, "FR002")


def test_update_that_a_sync_skips_gets_a_fix_of_the_node_that_skips() -> None:
    graph = grpo_sft(exact).edit(when={"imitate": When(every=3)})
    assert found(graph) == [("FR002", "update_actor")]
    assert found(fixed(graph)) == []


def test_unscored_rows_on_the_way_do_not_count_as_a_selection() -> None:
    @algorithm
    def unselected(batch: PromptBatch):  # type: ignore[no-untyped-def]
        prompts = Repeat(2)(batch)
        return Sync()(UpdateActor(NLL())(Generate()(prompts)))

    assert found(unselected()) == [("FR030", "update_actor")]
