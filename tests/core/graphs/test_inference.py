"""Connections: an error names both ends, both types and the nearest column that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowrl.core.operators.ports import PortField
from flowrl.errors import ParameterError
from flowrl.graph import algorithm
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
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
    Whiten,
)
from flowrl.records import PromptBatch
from tests.support.errors import raises
from tests.support.kernel import LengthPenalty, exact


class Parts:
    """The outputs that a wrong line may connect, made in the usual order."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.prompts = Repeat(2)(batch)
        self.rollout = Generate()(self.prompts)
        self.old = OldLogProb()(self.rollout)
        self.ref = RefLogProb()(self.rollout)
        self.values = Value()(self.rollout)
        self.scores = Reward(exact)(self.rollout, self.prompts)
        self.rewards = KLShape()(self.scores, self.old, self.ref, self.rollout.response_mask)
        self.mask = self.rollout.response_mask


def trace(line: Callable[[Parts], Any]) -> Any:
    @algorithm
    def wrong(batch: PromptBatch) -> Any:
        return line(Parts(batch))

    return wrong()


WRONG: dict[str, tuple[Callable[[Parts], Any], str, str, str | None]] = {
    "the design's example": (
        lambda p: GAE()(p.rewards, p.rewards, p.mask),
        "gae.values",
        "kl_shape.token_level_rewards",
        "value.values",
    ),
    "rollout log-probs instead of old ones": (
        lambda p: KLShape().named("again")(p.scores, p.rollout.rollout_log_probs, p.ref, p.mask),
        "again.old_log_probs",
        "generate.rollout_log_probs",
        "old_log_prob.old_log_probs",
    ),
    "rollout log-probs in the ratio": (
        lambda p: UpdateActor()(
            p.rollout, p.rollout.rollout_log_probs, GroupAdvantage()(p.scores, p.mask, p.prompts.uid)
        ),
        "update_actor.old_log_probs",
        "generate.rollout_log_probs",
        "old_log_prob.old_log_probs",
    ),
    "a reward instead of a score": (
        lambda p: LengthPenalty()(p.rewards, p.mask),
        "length_penalty.token_level_scores",
        "kl_shape.token_level_rewards",
        "reward.token_level_scores",
    ),
    "a wrong axis": (
        lambda p: GAE()(p.rewards, p.values, p.rollout.attention_mask),
        "gae.response_mask",
        "generate.attention_mask",
        "generate.response_mask",
    ),
    "a wrong dtype": (
        lambda p: GAE()(p.rewards, p.values, p.rollout.responses),
        "gae.response_mask",
        "generate.responses",
        "generate.response_mask",
    ),
    "no such column": (lambda p: Whiten()(p.values, p.mask), "whiten.advantages", "value.values", None),
    "another value": (
        lambda p: Sync()(UpdateCritic()(p.rollout, p.values, GAE()(p.rewards, p.values, p.mask).returns)),
        "sync.updated",
        "update_critic.critic_updated",
        None,
    ),
    "a column instead of a value": (lambda p: Sync()(p.values), "sync.updated", "value.values", None),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_type_mismatch_names_both_ends_and_the_fix(case: str) -> None:
    line, end, edge, suggestion = WRONG[case]
    node, _, port = end.partition(".")
    with raises("graph.type-mismatch", node=node, port=port, edge=edge, suggestion=suggestion) as error:
        trace(line)
    assert end in error.value.message and edge in error.value.message


def test_the_message_has_both_types() -> None:
    with raises("graph.type-mismatch") as error:
        trace(lambda p: GAE()(p.rewards, p.rewards, p.mask))
    assert error.value.message == (
        "gae.values expects value[batch response] float32, but kl_shape.token_level_rewards is "
        "reward[batch response] float32; did you mean value.values?"
    )


def test_rows_from_before_repeat_do_not_fit() -> None:
    with raises("graph.axis-mismatch", node="group_advantage", port="uid", axis="batch", suggestion="repeat.uid"):
        trace(lambda p: GroupAdvantage()(p.scores, p.mask, p.batch.uid))


@pytest.mark.parametrize(
    ("line", "end", "suggestion"),
    [
        (lambda p: GAE()(p.rewards, None, p.mask), "gae.values", "value.values"),
        (lambda p: UpdateCritic()(None, p.values, None), "update_critic.rollout.input_ids", "generate.input_ids"),
    ],
)
def test_an_unwired_port_has_a_suggestion(line: Callable[[Parts], Any], end: str, suggestion: str) -> None:
    node, _, port = end.partition(".")
    with raises("graph.unwired-port", node=node, port=port, suggestion=suggestion):
        trace(line)


def test_an_optional_port_is_required_only_by_some_parameters() -> None:
    kl = UpdateActor(kl=KLLoss("k3", 0.1))

    def actor(p: Parts, update: UpdateActor, *more: Any) -> Any:
        return update(p.rollout, p.old, GroupAdvantage()(p.scores, p.mask, p.prompts.uid), *more)

    assert PortField("ref_log_prob") in trace(lambda p: actor(p, kl, p.ref))["update_actor"].inputs
    assert PortField("ref_log_prob") not in trace(lambda p: actor(p, UpdateActor()))["update_actor"].inputs
    suggestion = "ref_log_prob.ref_log_prob"
    with raises("graph.unwired-port", node="update_actor", port="ref_log_prob", suggestion=suggestion):
        trace(lambda p: actor(p, kl))
    with raises("graph.unused-input", node="update_actor", port="ref_log_prob"):
        trace(lambda p: actor(p, UpdateActor(), p.ref))


def test_the_loss_defines_the_denominator_of_its_ratio() -> None:
    def actor(p: Parts, loss: PPOClip, old: Any) -> Any:
        return UpdateActor(loss)(p.rollout, old, GroupAdvantage()(p.scores, p.mask, p.prompts.uid))

    to_rollout = PPOClip(ratio_to="rollout")
    graph = trace(lambda p: actor(p, to_rollout, p.rollout.rollout_log_probs))
    assert graph["update_actor"].inputs[PortField("old_log_probs")] == ("generate", "rollout_log_probs")
    mismatch = {"node": "update_actor", "port": "old_log_probs"}
    with raises("graph.type-mismatch", **mismatch, suggestion="generate.rollout_log_probs"):
        trace(lambda p: actor(p, to_rollout, p.old))
    with raises("graph.type-mismatch", **mismatch, edge="generate.rollout_log_probs"):
        trace(lambda p: actor(p, PPOClip(), p.rollout.rollout_log_probs))
    with pytest.raises(ParameterError, match="ratio_to='engine'"):
        PPOClip(ratio_to="engine")  # type: ignore[arg-type]


def test_a_score_is_a_reward_without_kl() -> None:
    graph = trace(lambda p: GAE()(p.scores, p.values, p.mask))
    assert "kl_shape" not in graph
    assert graph["gae"].inputs[PortField("token_level_rewards")].node == "reward"


def test_columns_of_one_name_from_two_nodes_do_not_collide() -> None:
    graph = trace(lambda p: (p.scores, LengthPenalty()(Reward(exact).named("second")(p.rollout, p.prompts), p.mask)))
    assert graph["length_penalty"].inputs[PortField("token_level_scores")] == ("second", "token_level_scores")


def test_axes_have_the_identity_of_the_node_that_made_them() -> None:
    graph = trace(lambda p: p.rewards)
    axes = {str(edge): typed.axes for edge, typed in graph.types.items()}
    assert axes["batch.uid"] == ("batch@batch",)
    assert axes["repeat.prompts"] == ("batch@repeat", "prompt@batch")
    assert axes["generate.responses"] == ("batch@repeat", "response@generate")
    assert axes["kl_shape.token_level_rewards"] == ("batch@repeat", "response@generate")


def test_response_axes_of_two_generates_cannot_mix() -> None:
    def mixed(p: Parts) -> Any:
        other = Generate(temperature=0.5).named("other")(p.prompts)
        return GAE()(p.rewards, Value().named("second")(other), p.mask)

    with raises("graph.axis-mismatch", node="gae", port="values", axis="response", suggestion="value.values") as error:
        trace(mixed)
    assert error.value.message == (
        "gae.values reads second.values, whose response axis comes from other, but gae.token_level_rewards reads "
        "kl_shape.token_level_rewards, whose response axis comes from generate; expected one response axis for all "
        "ports; did you mean value.values?"
    )
