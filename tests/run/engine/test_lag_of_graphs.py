"""Graphs with several critics, policies or anchors and a lag: which weights each node reads."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    GAE,
    Collect,
    Generate,
    GroupAdvantage,
    OldLogProb,
    Repeat,
    Reward,
    RolloutCorrection,
    Spread,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
)
from flowrl.records import PromptBatch
from flowrl.run.engine.execution_graph import ExecutionGraph, Instance
from tests.rules.findings import fixed, found
from tests.run.engine.test_execution_graph import STEPS, run_of
from tests.support.errors import raises
from tests.support.kernel import exact

LAGS = (1, 2, 4)


class Mean(Operator):
    """The mean of two advantages."""

    def __call__(self, first: c.Advantages, second: c.Advantages) -> c.Advantages:
        return (first + second) / 2


@algorithm
def two_critics(batch: PromptBatch) -> Any:
    rollout = Generate()(batch)
    old, rewards, mask = OldLogProb()(rollout), Reward(exact)(rollout, batch), rollout.response_mask
    values = [Value(critic=Role(name)).named(f"value_{name}")(rollout) for name in ("one", "other")]
    estimates = [GAE().named(f"gae_{i}")(rewards, of_one, mask) for i, of_one in enumerate(values)]
    critics = [
        UpdateCritic(critic=Role(name)).named(f"update_{name}")(rollout, values=of_one, returns=gae.returns)
        for name, of_one, gae in zip(("one", "other"), values, estimates, strict=True)
    ]
    advantages = RolloutCorrection()(
        Mean()(estimates[0].advantages, estimates[1].advantages), old, rollout.rollout_log_probs, mask
    )
    return Sync()(UpdateActor()(rollout, old_log_probs=old, advantages=advantages)), *critics


@algorithm
def self_play(batch: PromptBatch, *, corrected: bool) -> Any:
    """Two policies trained on their own responses to the same prompts, each with its own engine."""
    prompts = Repeat(4)(batch)
    receipts = []
    for name in ("white", "black"):
        actor, engine = Role(name), Role(f"{name}_engine")
        rollout = Generate(rollout=engine).named(name)(prompts)
        old = OldLogProb(actor=actor).named(f"old_{name}")(rollout)
        scores = Reward(exact).named(f"reward_{name}")(rollout, prompts)
        advantages = GroupAdvantage().named(f"advantage_{name}")(scores, rollout.response_mask, prompts.uid)
        if corrected or name == "white":
            weights = RolloutCorrection().named(f"correct_{name}")
            advantages = weights(advantages, old, rollout.rollout_log_probs, rollout.response_mask)
        update = UpdateActor(actor=actor).named(f"update_{name}")
        updated = update(rollout, old_log_probs=old, advantages=advantages)
        receipts.append(Sync(actor=actor, rollout=engine).named(f"sync_{name}")(updated))
    return tuple(receipts)


def assert_follows(graph: Graph, lag: int, writer: str, reader: str, offset: int) -> None:
    """Assert that each reader follows the writer of `offset` steps earlier, and precedes the next writer."""
    later = run_of(graph, lag)
    ExecutionGraph(Plan(graph), lag).refuse_deadlock()
    for step in STEPS:
        for other in STEPS:
            pair = Instance(other, writer), Instance(step, reader)
            assert later.has_edge(*(pair if other <= step - offset else pair[::-1])), pair


@pytest.mark.parametrize("lag", LAGS)
def test_each_critic_uses_the_weights_of_the_previous_step(lag: int) -> None:
    graph = two_critics().edit(lag=lag)
    assert found(graph) == []
    for name in ("one", "other"):
        assert_follows(graph, lag, f"update_{name}", f"value_{name}", offset=1)
    assert_follows(graph, lag, "sync", "generate", offset=1 + lag)


@pytest.mark.parametrize("lag", LAGS)
def test_self_play_policies_have_equal_staleness(lag: int) -> None:
    graph = self_play(corrected=True).edit(lag=lag)
    assert found(graph) == []
    for name in ("white", "black"):
        assert_follows(graph, lag, f"sync_{name}", name, offset=1 + lag)
        assert_follows(graph, lag, f"update_{name}", f"old_{name}", offset=1)
    assert found(self_play(corrected=False).edit(lag=lag)) == [("FR006", "black")]


@pytest.mark.parametrize("lag", LAGS)
def test_a_policy_used_as_reference_has_the_weights_of_the_training_step(lag: int) -> None:
    graph = grpo(exact).edit(
        lag=lag,
        insert={"correction": After("group_advantage", RolloutCorrection())},
        set={"ref_log_prob.ref": Role("actor")},
        allow={"FR010": "the anchor is the start of the step"},
    )
    assert found(graph) == []
    assert_follows(graph, lag, "update_actor", "ref_log_prob", offset=1)


def in_rounds(lag: int, after: str, rounds: int = 4) -> Graph:
    """PPO that collects groups after a node."""
    gate = After(after, Collect(Spread(), groups=4, rounds=rounds))
    return ppo(exact, n=4).edit(lag=lag, insert={"correction": After("whiten", RolloutCorrection()), "collect": gate})


def test_rounds_that_wait_for_later_training_are_refused() -> None:  # FR041
    for lag in (2, 4):
        graph = in_rounds(lag, after="kl_shape")
        assert found(graph) == [("FR041", "collect")]
        assert "after old_log_prob, which waits until the previous step has trained 'actor'" in graph.check()[0].message
        assert found(fixed(graph)) == []
        assert found(in_rounds(lag, after="reward")) == found(in_rounds(lag, after="kl_shape", rounds=1)) == []
    assert found(in_rounds(1, after="kl_shape")) == found(in_rounds(0, after="kl_shape")) == []


def test_training_waits_for_all_rounds() -> None:
    for lag in (2, 3):
        with raises("lag.unsupported", lag=lag) as caught:
            ExecutionGraph(Plan(in_rounds(lag, after="kl_shape")), lag).refuse_deadlock()
        assert any("collect in step" in str(one) for one in caught.value.facts["cycle"])
        ExecutionGraph(Plan(in_rounds(lag, after="reward")), lag).refuse_deadlock()
    ExecutionGraph(Plan(in_rounds(1, after="kl_shape")), 1).refuse_deadlock()
