"""Connections: what does not fit is refused with both ends, both types and the nearest column that would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowrl.core.operators.ports import PortField
from flowrl.errors import ParameterError, PortError
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


WRONG: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "the design's example": (
        lambda p: GAE()(p.rewards, p.rewards, p.mask),
        "gae.values wants value[batch response] float32, but kl_shape.token_level_rewards is "
        "reward[batch response] float32; did you mean value.values?",
    ),
    "rollout log-probs where old ones are due": (
        lambda p: KLShape().named("again")(p.scores, p.rollout.rollout_log_probs, p.ref, p.mask),
        "again.old_log_probs wants log-prob of the old policy[batch response] float32, but generate.rollout_log_probs "
        "is log-prob of the rollout[batch response] float32; did you mean old_log_prob.old_log_probs?",
    ),
    "rollout log-probs in the ratio": (
        lambda p: UpdateActor()(
            p.rollout, p.rollout.rollout_log_probs, GroupAdvantage()(p.scores, p.mask, p.prompts.uid)
        ),
        "update_actor.old_log_probs wants log-prob of the old policy[batch response] float32, but "
        "generate.rollout_log_probs is log-prob of the rollout[batch response] float32; did you mean "
        "old_log_prob.old_log_probs?",
    ),
    "a reward where a score is due": (
        lambda p: LengthPenalty()(p.rewards, p.mask),
        "length_penalty.token_level_scores wants score[batch response] float32, but kl_shape.token_level_rewards is "
        "reward[batch response] float32; did you mean reward.token_level_scores?",
    ),
    "a wrong axis": (
        lambda p: GAE()(p.rewards, p.values, p.rollout.attention_mask),
        "gae.response_mask wants mask[batch response] bool, but generate.attention_mask is mask[batch sequence] bool; "
        "did you mean generate.response_mask?",
    ),
    "a wrong dtype": (
        lambda p: GAE()(p.rewards, p.values, p.rollout.responses),
        "gae.response_mask wants mask[batch response] bool, but generate.responses is tokens[batch response] int64; "
        "did you mean generate.response_mask?",
    ),
    "rows from before Repeat": (
        lambda p: GroupAdvantage()(p.scores, p.mask, p.batch.uid),
        "group_advantage.uid takes the batch axis of batch.uid, which was made by batch, but "
        "group_advantage.token_level_rewards takes that of reward.token_level_scores, made by repeat; expected one "
        "batch axis for all ports; did you mean repeat.uid?",
    ),
    "nothing of the kind": (
        lambda p: Whiten()(p.values, p.mask),
        "whiten.advantages wants advantage[batch response] float32, but value.values is value[batch response] float32; "
        "no node before this one writes such a column: add the operator that does.",
    ),
    "a port that is left open": (
        lambda p: GAE()(p.rewards, None, p.mask),
        "gae.values wants value[batch response] float32, but nothing is wired to it; did you mean value.values?",
    ),
    "a record that is left open": (
        lambda p: UpdateCritic()(None, p.values, None),
        "update_critic.rollout.input_ids wants tokens[batch sequence] int64, but nothing is wired to it; did you mean "
        "generate.input_ids?",
    ),
    "a value where another is due": (
        lambda p: Sync()(UpdateCritic()(p.rollout, p.values, GAE()(p.rewards, p.values, p.mask).returns)),
        "sync.updated wants Updated, but update_critic.critic_updated is CriticUpdated; no node before this one writes "
        "such a value: add the operator that does.",
    ),
    "a column where a value is due": (
        lambda p: Sync()(p.values),
        "sync.updated wants Updated, but value.values is value[batch response] float32; no node before this one writes "
        "such a value: add the operator that does.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_connection_names_both_ends_and_the_mend(case: str) -> None:
    line, said = WRONG[case]
    with pytest.raises(PortError) as error:
        trace(line)
    assert str(error.value) == said


def test_an_optional_port_follows_the_parameters() -> None:
    kl = UpdateActor(kl=KLLoss("k3", 0.1))

    def actor(p: Parts, update: UpdateActor, *more: Any) -> Any:
        return update(p.rollout, p.old, GroupAdvantage()(p.scores, p.mask, p.prompts.uid), *more)

    assert PortField("ref_log_prob") in trace(lambda p: actor(p, kl, p.ref))["update_actor"].inputs
    assert PortField("ref_log_prob") not in trace(lambda p: actor(p, UpdateActor()))["update_actor"].inputs
    with pytest.raises(
        PortError, match=r"ref_log_prob wants .*nothing is wired to it; did you mean ref_log_prob\.ref_log"
    ):
        trace(lambda p: actor(p, kl))
    with pytest.raises(
        PortError, match=r"update_actor\.ref_log_prob is wired, but .* does not use it; leave it out, or"
    ):
        trace(lambda p: actor(p, UpdateActor(), p.ref))


def test_the_loss_says_whose_log_probs_its_ratio_is_taken_to() -> None:
    def actor(p: Parts, loss: PPOClip, old: Any) -> Any:
        return UpdateActor(loss)(p.rollout, old, GroupAdvantage()(p.scores, p.mask, p.prompts.uid))

    to_rollout = PPOClip(ratio_to="rollout")
    graph = trace(lambda p: actor(p, to_rollout, p.rollout.rollout_log_probs))
    assert graph["update_actor"].inputs[PortField("old_log_probs")] == ("generate", "rollout_log_probs")
    with pytest.raises(PortError) as error:
        trace(lambda p: actor(p, to_rollout, p.old))
    assert str(error.value) == (
        "update_actor.old_log_probs wants log-prob of the rollout[batch response] float32, but "
        "old_log_prob.old_log_probs is log-prob of the old policy[batch response] float32; did you mean "
        "generate.rollout_log_probs?"
    )
    with pytest.raises(PortError, match=r"wants log-prob of the old policy.* but generate\.rollout_log_probs is"):
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

    with pytest.raises(PortError) as error:
        trace(mixed)
    assert str(error.value) == (
        "gae.values takes the response axis of second.values, which was made by other, but gae.token_level_rewards "
        "takes that of kl_shape.token_level_rewards, made by generate; expected one response axis for all ports; did "
        "you mean value.values?"
    )
