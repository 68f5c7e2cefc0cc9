"""`Graph.edit`: every verb, that all of them act at once on the graph as it was, and what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrl import columns as c
from flowrl.core.edit import After
from flowrl.core.operator import Operator
from flowrl.core.roles import Role
from flowrl.core.symbols import Edge
from flowrl.errors import BindError, FlowrlError, GraphError, ParameterError, PortError
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    GAE,
    Generate,
    GroupAdvantage,
    KLLoss,
    KLShape,
    Mismatch,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    Reward,
    RolloutCorrection,
    Sync,
    UpdateActor,
    Value,
    Whiten,
)
from flowrl.records import PromptBatch, RolloutBatch, Updated
from tests.kernel import (
    BINDINGS,
    Clip,
    FakeRollout,
    FakeTrainer,
    LengthPenalty,
    Mix,
    TwoHeads,
    exact,
    scored,
    two_rewards,
)

PPO = ppo(exact)


def wires(graph: Graph, node: str) -> dict[str, str]:
    """Where the fields of a node's ports come from."""
    return {str(field): str(edge) for field, edge in graph[node].inputs.items()}


def readers(graph: Graph, edge: str) -> set[str]:
    return {n for n in graph.nodes for source in wires(graph, n).values() if source == edge}


@algorithm
def grpo_by_hand(batch: PromptBatch, n: int = 8) -> Any:
    """GRPO, written and not edited."""
    prompts = Repeat(n)(batch)
    rollout = Generate()(prompts)
    old = OldLogProb()(rollout)
    mismatch = Mismatch()(rollout.rollout_log_probs, old, rollout.response_mask)
    ref = RefLogProb()(rollout)
    scores = Reward(exact)(rollout, prompts)
    adv = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
    return Sync()(UpdateActor(PPOClip(0.2, kl=KLLoss("k3", 0.001)))(rollout, old, adv, ref)), mismatch


def test_grpo_is_an_edit_of_ppo() -> None:
    edited, by_hand = grpo(exact, n=8), grpo_by_hand()
    assert edited.name == "grpo"
    assert edited.fingerprint() == by_hand.fingerprint()
    assert edited.nodes == by_hand.nodes
    assert edited.sinks == by_hand.sinks


def test_no_verb_is_no_change() -> None:
    assert PPO.edit() == PPO
    assert PPO.edit(name="mine").name == "mine"


# ------------------------------------------------------------------------------------------------------------- replace


def test_a_replacement_bears_its_own_name_and_inherits_port_by_port() -> None:
    graph = PPO.edit(replace={"gae": GAE(lam=0.5).named("gae_short")})
    assert "gae" not in graph
    assert wires(graph, "gae_short") == wires(PPO, "gae")
    assert wires(graph, "whiten")["advantages"] == "gae_short.advantages"
    assert wires(graph, "update_critic")["returns"] == "gae_short.returns"
    assert PPO.edit(replace={"gae": GAE()}) == PPO


def test_a_replacement_takes_the_one_ancestor_that_writes_what_it_wants() -> None:
    group = PPO.edit(replace={"gae": GroupAdvantage()}, drop=["update_critic"])
    assert wires(group, "group_advantage") == {
        "token_level_rewards": "kl_shape.token_level_rewards",
        "response_mask": "generate.response_mask",
        "uid": "repeat.uid",
    }, "uid is of the rows after Repeat, not of the batch before it"
    assert "value" not in group


def test_several_such_ancestors_need_a_wire() -> None:
    with pytest.raises(GraphError) as error:
        two_rewards().edit(replace={"mix": LengthPenalty()})
    assert str(error.value) == (
        "length_penalty.token_level_scores wants score[batch response] float32, and several nodes write one: "
        "first.token_level_scores, second.token_level_scores; say which: "
        "wire={'length_penalty.token_level_scores': 'first.token_level_scores'}."
    )
    graph = two_rewards().edit(
        replace={"mix": LengthPenalty()},
        wire={"length_penalty.token_level_scores": "second.token_level_scores"},
    )
    assert wires(graph, "length_penalty")["token_level_scores"] == "second.token_level_scores"
    assert "first" not in graph
    dropped = two_rewards().edit(replace={"mix": LengthPenalty()}, drop=["first"])
    assert wires(dropped, "length_penalty")["token_level_scores"] == "second.token_level_scores"


def test_no_such_ancestor_needs_a_wire() -> None:
    with pytest.raises(
        GraphError, match=r"update_actor\.old_log_probs wants .*, and no node that it could read writes one; "
    ):
        scored().edit(replace={"reward": UpdateActor()})


def test_an_optional_port_is_taken_where_the_parameters_want_it() -> None:
    with_kl = PPO.edit(replace={"update_actor": UpdateActor(PPOClip(kl=KLLoss("k3", 0.1)))})
    assert wires(with_kl, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob"
    without = with_kl.edit(replace={"update_actor": UpdateActor()})
    assert "ref_log_prob" not in wires(without, "update_actor")
    assert without == PPO


def test_a_ratio_to_the_rollout_leaves_old_log_prob_to_fall_away() -> None:
    bypass = UpdateActor(PPOClip(0.2, ratio_to="rollout"))
    for graph in (grpo(exact, kl_coef=0.0), grpo(exact)):
        loss = graph["update_actor"].operator.loss  # type: ignore[attr-defined]
        update = UpdateActor(PPOClip(0.2, kl=loss.kl, ratio_to="rollout"))
        edited = graph.edit(replace={"update_actor": update}, drop=["old_log_prob", "mismatch"])
        assert wires(edited, "update_actor")["old_log_probs"] == "generate.rollout_log_probs"
        assert set(graph.nodes) - set(edited.nodes) == {"old_log_prob", "mismatch"}
        assert edited.check() == []
        assert edited == graph.edit(set={"update_actor.loss.ratio_to": "rollout"}, drop=["mismatch"])
        assert edited.edit(
            set={"update_actor.loss.ratio_to": "old"}, insert={"old_log_prob": After("generate", OldLogProb())},
            wire={"update_actor.old_log_probs": "old_log_prob.old_log_probs"},
        ) == graph.edit(drop=["mismatch"])  # fmt: skip
        assert Graph.from_dict(edited.to_dict()) == edited
    with pytest.raises(GraphError, match=r"since mismatch\.old_log_probs reads .*, or drop mismatch too\."):
        grpo(exact).edit(replace={"update_actor": bypass}, drop=["old_log_prob"])
    watched = grpo(exact).edit(replace={"update_actor": bypass})
    assert readers(watched, "old_log_prob.old_log_probs") == {"mismatch"}
    in_ppo = PPO.edit(replace={"update_actor": bypass}, drop=["mismatch"])
    assert readers(in_ppo, "old_log_prob.old_log_probs") == {"kl_shape"}


def test_readers_of_a_replacement_take_the_output_that_fits() -> None:
    graph = PPO.edit(replace={"value": TwoHeads()}, wire={"two_heads.values": "old_value.values"}, insert={
        "old_value": After("generate", Value()),
    })  # fmt: skip
    assert wires(graph, "gae")["values"] == "two_heads.values"
    with pytest.raises(
        GraphError, match=r"update_critic\.returns reads gae\.returns and wants .*, and the replacement .*"
    ):
        PPO.edit(replace={"gae": GroupAdvantage()})


def test_a_replacement_that_fits_nobody_is_refused() -> None:
    with pytest.raises(GraphError, match=r"\.values reads value\.values and wants .*replacement old_log_prob_2 writes"):
        PPO.edit(replace={"value": OldLogProb().named("old_log_prob_2")})


# ---------------------------------------------------------------------------------------------------------------- drop


def test_a_dropped_sink_is_gone_with_what_only_it_reached() -> None:
    graph = PPO.edit(drop=["update_critic"])
    assert graph.sinks == ("sync", "mismatch")
    assert set(PPO.nodes) - set(graph.nodes) == {"update_critic"}
    with pytest.raises(
        GraphError, match=r"edit drops every sink \(sync, update_critic, mismatch\), so nothing would be computed"
    ):
        PPO.edit(drop=["sync", "update_critic", "update_actor", "mismatch"])


def test_a_dropped_sync_does_not_take_the_update_with_it() -> None:
    graph = PPO.edit(drop="sync")
    assert set(PPO.nodes) - set(graph.nodes) == {"sync"}
    assert set(graph.sinks) == {"update_critic", "update_actor", "mismatch"}
    assert [finding.rule for finding in graph.check()] == ["FR002"]


def test_set_changes_one_parameter_and_leaves_the_others() -> None:
    graph = PPO.edit(set={"generate.max_new_tokens": 7}).edit(
        set={"generate.temperature": 0.5, "generate.top_k": 3, "gae.lam": 0.9}
    )
    generate = graph["generate"].operator
    assert (generate.max_new_tokens, generate.temperature, generate.top_k) == (7, 0.5, 3)  # type: ignore[attr-defined]
    assert set(PPO.diff(graph).changed) == {"generate", "gae"}
    assert graph["generate"].inputs == PPO["generate"].inputs


def test_set_reaches_into_specs() -> None:
    graph = PPO.edit(set={"update_actor.loss.clip_high": 0.28, "update_actor.loss.kl": KLLoss("k2", 0.1)}).edit(
        set={"update_actor.loss.kl.coef": 0.2, "update_actor.mini_batch": 4}
    )
    loss = PPOClip(0.2, 0.28, kl=KLLoss("k2", 0.2))
    assert graph["update_actor"].operator == UpdateActor(loss, mini_batch=4)
    assert wires(graph, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob", "which the KL term wants"


@pytest.mark.parametrize(
    ("verbs", "message"),
    [
        (
            {"set": {"sampler.n": 2}},
            r"edit\(set={'sampler.n': ...}\) names 'sampler', which ppo does not have; it has b",
        ),
        (
            {"set": {"gae.lamb": 2}},
            r"edit\(set={'gae.lamb': ...}\) does not name a parameter; gae has gamma, lam; did you mean 'lam'",
        ),
        ({"set": {"gae": 2}}, r"edit\(set={'gae': ...}\) does not name a parameter; gae has gamma, lam\."),
        ({"set": {"generat.top_k": 2}}, r"which ppo does not have; it has .*, sync; did you mean 'generate'\?"),
        (
            {"set": {"update_actor.loss.clip": 2}},
            r"does not name a parameter; update_actor.loss has clip_low, .*; did you mean 'clip_",
        ),
        (
            {"set": {"update_actor.loss.kl.coef": 2}},
            r"goes into update_actor.loss.kl, which is None and has no parameters; set it as a whole: set={'update",
        ),
        ({"set": {"update_actor.loss.clip_low": 2}}, r"clip_low=2"),
        ({"set": [("gae.lam", 2)]}, r"edit\(set=\[.*\]\) does not say where; expected set=\{'gae.lam': 0.9\}\."),
        ({"set": {"repeat.m": 2}}, r"edit\(set={'repeat.m': ...}\) does not name a parameter; repeat has n\."),
        ({"set": {"repeat.n": 2}, "replace": {"repeat": Repeat(3)}}, r"edit replaces 'repeat' and sets 'repeat.n'"),
        ({"set": {"repeat.n": 0}}, r"n=0"),
    ],
)
def test_set_names_what_is_there(verbs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowrlError, match=message):
        PPO.edit(**verbs)


def test_a_dropped_inner_node_is_bypassed() -> None:
    graph = PPO.edit(drop=["whiten"])
    assert wires(graph, "update_actor")["advantages"] == "gae.advantages"
    without_kl = PPO.edit(drop=["kl_shape"])
    assert wires(without_kl, "gae")["token_level_rewards"] == "reward.token_level_scores"
    assert "ref_log_prob" not in without_kl
    without_repeat = PPO.edit(drop=["repeat"])
    assert wires(without_repeat, "generate")["prompts.prompts"] == "batch.prompts"
    both = PPO.edit(insert={"clip": After("reward", Clip())}).edit(drop=["clip", "kl_shape"])
    assert wires(both, "gae")["token_level_rewards"] == "reward.token_level_scores"


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (
            "gae",
            r"gae cannot be dropped, since .* reads gae\..*: of the inputs of gae exactly one would have to fit, and",
        ),
        (
            "generate",
            r"generate cannot be dropped, since .* and these do: none; say what it should read: wire=\{'.*': 'nod",
        ),
        ("update_actor", r"update_actor cannot be dropped, since sync\.updated reads update_actor\.updated"),
    ],
)
def test_a_node_that_cannot_be_bypassed_is_refused(drop: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        PPO.edit(drop=[drop])


def test_two_inputs_that_fit_are_one_too_many() -> None:
    graph = two_rewards().edit(insert={"penalty": After("mix", LengthPenalty())})
    with pytest.raises(GraphError) as error:
        graph.edit(drop=["mix"])
    assert str(error.value) == (
        "mix cannot be dropped, since penalty.token_level_scores reads mix.token_level_scores and wants "
        "score[batch response] float32: of the inputs of mix exactly one would have to fit, and these do: "
        "first.token_level_scores, second.token_level_scores; say what it should read: "
        "wire={'penalty.token_level_scores': 'node.column'}, or drop penalty too."
    )
    wired = graph.edit(drop=["mix"], wire={"penalty.token_level_scores": "second.token_level_scores"})
    assert "first" not in wired


def test_what_nobody_reads_any_more_need_not_be_bypassed() -> None:
    graph = PPO.edit(drop=["value", "update_critic"], replace={"gae": GroupAdvantage()})
    assert {"value", "update_critic", "gae"}.isdisjoint(graph.nodes)

    class Look(Operator):
        def __call__(self, values: c.Values) -> Updated:
            return Updated(0)

    watched = PPO.edit(insert={"twice": After("value", Clipped()), "look": After("value", Look())})
    assert watched.sinks == ("sync", "update_critic", "mismatch", "look")
    gone = watched.edit(drop=["value", "look", "update_critic"], replace={"gae": GroupAdvantage()})
    assert {"value", "twice", "look"}.isdisjoint(gone.nodes)


class Clipped(Operator):
    """Re-writes values."""

    def __call__(self, values: c.Values) -> c.Values:
        return values.clamp(-1, 1)


# -------------------------------------------------------------------------------------------------------------- insert


def test_every_reader_moves_to_what_is_inserted() -> None:
    graph = PPO.edit(insert={"length_penalty": After("reward", LengthPenalty(0.1))})
    assert wires(graph, "length_penalty") == {
        "token_level_scores": "reward.token_level_scores",
        "response_mask": "generate.response_mask",
    }
    assert wires(graph, "kl_shape")["token_level_scores"] == "length_penalty.token_level_scores"
    assert readers(graph, "reward.token_level_scores") == {"length_penalty"}
    assert graph.edit(drop=["length_penalty"]) == PPO
    values = PPO.edit(insert={"clipped": After("value", Clipped())})
    assert readers(values, "clipped.values") == {"gae", "update_critic"}


def test_inserted_behind_a_sink_is_the_sink() -> None:
    graph = scored().edit(insert={"penalty": After("reward", LengthPenalty())})
    assert graph.sinks == ("penalty",)


def test_several_at_one_anchor_form_a_chain_in_their_order() -> None:
    chain = {"a": After("reward", LengthPenalty()), "b": After("reward", Clip()), "c": After("reward", Clip(2.0))}
    graph = PPO.edit(insert=chain)
    assert wires(graph, "a")["token_level_scores"] == "reward.token_level_scores"
    assert wires(graph, "b")["token_level_scores"] == "a.token_level_scores"
    assert wires(graph, "c")["token_level_scores"] == "b.token_level_scores"
    assert wires(graph, "kl_shape")["token_level_scores"] == "c.token_level_scores"
    other = PPO.edit(insert=dict(reversed(chain.items())))
    assert wires(other, "c")["token_level_scores"] == "reward.token_level_scores"


@pytest.mark.parametrize("order", [1, -1])
def test_an_inserted_reader_moves_too_whatever_the_order(order: int) -> None:
    """`mixed` stands behind kl_shape and reads the score, which `clip` re-writes."""
    insert = {"blend": After("kl_shape", Blend()), "clip": After("reward", Clip())}
    graph = PPO.edit(insert=dict(list(insert.items())[::order]))
    assert wires(graph, "blend") == {
        "token_level_rewards": "kl_shape.token_level_rewards",
        "token_level_scores": "clip.token_level_scores",
    }
    assert wires(graph, "gae")["token_level_rewards"] == "blend.token_level_rewards"


def test_ports_that_others_settle_are_settled_whatever_their_order() -> None:
    class Grouped(Operator):
        def __call__(self, uid: c.Uid, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
            return token_level_scores

    graph = PPO.edit(insert={"grouped": After("reward", Grouped())})
    assert wires(graph, "grouped")["uid"] == "repeat.uid", "batch.uid has other rows"


def test_what_is_inserted_may_read_beside_its_anchor() -> None:
    """old_log_prob is no ancestor of group_advantage, and the one node that writes what a correction wants."""
    for graph, anchor in ((PPO, "whiten"), (PPO, "gae"), (grpo(exact), "group_advantage")):
        corrected = graph.edit(insert={"correction": After(anchor, RolloutCorrection())})
        assert wires(corrected, "correction") == {
            "advantages": f"{anchor}.advantages",
            "old_log_probs": "old_log_prob.old_log_probs",
            "rollout_log_probs": "generate.rollout_log_probs",
            "response_mask": "generate.response_mask",
        }
    two = grpo(exact).edit(
        insert={"other": After("generate", OldLogProb(actor=Role("other")))},
        wire={"mismatch.old_log_probs": "other.old_log_probs"},
    )
    with pytest.raises(
        GraphError,
        match=r"correction\.old_log_probs wants .* several nodes write one: old_log_prob\.old_log_probs, "
        r"other\.old_log_probs; say which: wire=\{'correction\.old_log_probs': ",
    ):
        two.edit(insert={"correction": After("group_advantage", RolloutCorrection())})


def test_what_depends_on_the_anchor_is_not_read_and_neither_is_what_is_dropped() -> None:
    with pytest.raises(GraphError, match=r"look\.values wants value.*, and no node that it could read writes one"):
        grpo(exact).edit(insert={"look": After("generate", Looks())})
    with pytest.raises(GraphError, match=r"look\.advantages wants advantage.* no node that it could read writes one"):
        PPO.edit(insert={"look": After("reward", LooksAhead())})
    with pytest.raises(GraphError, match=r"look\.values wants value.* no node that it could read writes one"):
        PPO.edit(drop=["value", "update_critic"], insert={"look": After("generate", Looks())})


class Looks(Operator):
    """Reads values."""

    def __call__(self, values: c.Values) -> Updated:
        return Updated(0)


class LooksAhead(Operator):
    """Reads scores, and what comes of them."""

    def __call__(self, token_level_scores: c.TokenLevelScores, advantages: c.Advantages) -> c.TokenLevelScores:
        return token_level_scores


def test_a_replacement_may_read_beside_what_it_replaces() -> None:
    class Centred(Operator):
        """Scores less what the critic expected at the first token."""

        def __call__(self, token_level_scores: c.TokenLevelScores, values: c.Values) -> c.TokenLevelScores:
            return token_level_scores - values[:, :1]

    graph = PPO.edit(insert={"length_penalty": After("reward", LengthPenalty())})
    assert wires(graph.edit(replace={"length_penalty": Centred()}), "centred") == {
        "token_level_scores": "reward.token_level_scores",
        "values": "value.values",
    }


def test_a_sync_that_is_inserted_is_a_sink() -> None:
    without = PPO.edit(replace={"sync": Waits()})
    assert without.sinks == ("waits", "update_critic", "mismatch")
    with_sync = without.edit(insert={"sync": After("update_actor", Sync())})
    assert with_sync.sinks == ("waits", "update_critic", "mismatch", "sync")
    assert wires(with_sync, "sync") == {"updated": "update_actor.updated"}


class Waits(Operator):
    """Passes on that the policy was updated."""

    def __call__(self, updated: Updated) -> Updated:
        return updated


def test_a_value_that_is_passed_on_is_re_written() -> None:
    graph = PPO.edit(insert={"waits": After("update_actor", Waits())})
    assert wires(graph, "sync")["updated"] == "waits.updated"
    assert graph.sinks == PPO.sinks


def test_what_nobody_would_read_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"ref_2 is inserted after generate but rewrites none .*wire=\{'node\.port': 'r"
    ):
        PPO.edit(insert={"ref_2": After("generate", RefLogProb())})
    graph = PPO.edit(
        insert={"ref_2": After("generate", RefLogProb())},
        wire={"kl_shape.ref_log_prob": "ref_2.ref_log_prob"},
    )
    assert "ref_log_prob" not in graph
    with pytest.raises(GraphError, match=r"edit inserts after 'whiten' and drops it; use replace="):
        PPO.edit(drop=["whiten"], insert={"w": After("whiten", Whiten())})


def test_insert_and_replace_meet_at_one_node() -> None:
    graph = PPO.edit(
        replace={"reward": Reward(exact, timeout=1.0).named("judge")},
        insert={"penalty": After("reward", LengthPenalty())},
        rename={"kl_shape": "shape"},
    )
    assert wires(graph, "penalty")["token_level_scores"] == "judge.token_level_scores"
    assert wires(graph, "shape")["token_level_scores"] == "penalty.token_level_scores"
    assert wires(graph, "gae")["token_level_rewards"] == "shape.token_level_rewards"


# ------------------------------------------------------------------------------------------------------ wire and rename


def test_wire_overrides_everything() -> None:
    graph = PPO.edit(wire={"update_actor.advantages": "gae.advantages"})
    assert "whiten" not in graph
    graph = PPO.edit(
        insert={"penalty": After("reward", LengthPenalty()), "mix": After("kl_shape", Blend())},
        wire={"kl_shape.token_level_scores": "reward.token_level_scores"},
    )
    assert wires(graph, "kl_shape")["token_level_scores"] == "reward.token_level_scores"
    assert wires(graph, "mix")["token_level_scores"] == "penalty.token_level_scores"


class Blend(Operator):
    """Re-writes rewards with the help of scores."""

    def __call__(
        self, token_level_rewards: c.TokenLevelRewards, token_level_scores: c.TokenLevelScores
    ) -> c.TokenLevelRewards:
        return token_level_rewards + token_level_scores


def test_wire_may_use_old_and_new_names() -> None:
    for node in ("gae", "gae_long"):
        for source in ("value", "critic_says"):
            graph = PPO.edit(
                rename={"gae": "gae_long", "value": "critic_says"}, wire={f"{node}.values": f"{source}.values"}
            )
            assert wires(graph, "gae_long")["values"] == "critic_says.values"


def test_wire_takes_a_whole_record() -> None:
    graph = PPO.edit(insert={"passed": After("generate", Passed())}, wire={"value.rollout": "generate"})
    assert {e.partition(".")[0] for e in wires(graph, "value").values()} == {"generate"}
    assert {e.partition(".")[0] for e in wires(graph, "old_log_prob").values()} == {"passed"}
    with pytest.raises(
        GraphError,
        match=r"names 'reward\.input_ids', which is not an output; expected 'node\.column', with one of: tok",
    ):
        PPO.edit(wire={"value.rollout": "reward"})


class Passed(Operator):
    """A rollout as it came."""

    def __call__(self, rollout: RolloutBatch) -> RolloutBatch:
        return rollout


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (
            {"gea.values": "value.values"},
            r"wire=\{'gea\.values': \.\.\.\} does not name a node; expected 'node\.port' of one of: ",
        ),
        (
            {"gae.value": "value.values"},
            r"wire=\{'gae\.value': \.\.\.\} does not name a port; gae has: token_level_rewards, values",
        ),
        ({"gae": "value.values"}, r"wire=\{'gae': \.\.\.\} does not name a port"),
        (
            {"gae.values": "value.vals"},
            r"names 'value\.vals', which is not an output; expected 'node\.column', with one of: values",
        ),
        ({"gae.values": "vlaue.values"}, r"names 'vlaue\.values', which is not an output; .* one of: batch, repeat"),
        ({"gae.values": "value"}, r"'value' does not name an output; expected 'node\.column'"),
    ],
)
def test_wire_refuses_what_is_not_there(wire: dict[str, str], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        PPO.edit(wire=wire)


def test_wire_is_held_to_types_and_cycles() -> None:
    with pytest.raises(PortError, match=r"gae\.values wants value.*, but gae\.returns|gae\.values wants|form a cycle"):
        PPO.edit(wire={"gae.values": "reward.token_level_scores"})
    graph = PPO.edit(insert={"a": After("value", Clipped()), "b": After("value", Clipped())})
    with pytest.raises(GraphError, match=r"the nodes a -> b -> a form a cycle"):
        graph.edit(wire={"a.values": "b.values"})


def test_rename() -> None:
    graph = PPO.edit(rename={"gae": "a", "sync": "b", "batch": "data"})
    assert graph.sinks == ("b", "update_critic", "mismatch")
    assert graph.inputs == {"data": PromptBatch}
    assert graph["a"].operator.name == "a"
    assert graph.edit(rename={"a": "gae", "b": "sync", "data": "batch"}) == PPO
    swapped = PPO.edit(rename={"gae": "value", "value": "gae"})
    assert wires(swapped, "value")["values"] == "gae.values"
    with pytest.raises(ParameterError, match="'a b' is not a node name"):
        PPO.edit(rename={"gae": "a b"})


# --------------------------------------------------------------------------------------------------------- bind and lag


def test_bindings_fall_away_with_their_role() -> None:
    bound = PPO.edit(bind=BINDINGS)
    edited = bound.edit(replace={"gae": GroupAdvantage()}, drop=["kl_shape", "update_critic"])
    assert set(edited.bindings) == {"rollout", "actor"}
    swapped = bound.edit(bind={"rollout": FakeRollout(model="two")})
    assert swapped.bindings == {**BINDINGS, "rollout": FakeRollout(model="two")}
    assert swapped.nodes == bound.nodes
    with pytest.raises(BindError, match="has no role 'critic' to bind; it has rollout, actor, ref"):
        bound.edit(drop=["update_critic"], replace={"gae": GroupAdvantage()}, bind={"critic": FakeTrainer()})


def test_a_binding_that_a_replacement_outgrows_is_refused() -> None:
    bound = PPO.edit(bind=BINDINGS)
    with pytest.raises(BindError, match=r"'critic' is bound to FakeCritic, but old_log_prob needs a Scorer there"):
        bound.edit(replace={"old_log_prob": OldLogProb(actor=Role("critic"))})


def test_lag() -> None:
    assert PPO.lag == 0
    ahead = PPO.edit(lag=2)
    assert (ahead.lag, ahead.edit().lag, ahead.edit(lag=0)) == (2, 2, PPO)
    with pytest.raises(
        GraphError, match=r"lag=2 belongs to the back-edge .* which ppo does not have; add a Sync, or edit"
    ):
        ahead.edit(drop=["sync"])
    assert ahead.edit(drop=["sync"], lag=0).lag == 0


# --------------------------------------------------------------------------------------------------- atomic, and misuse


def test_everything_resolves_against_the_graph_as_it_was() -> None:
    """The names of what is replaced and dropped are free, and the order of the verbs does not matter."""
    graph = PPO.edit(
        replace={"gae": GAE(lam=0.5).named("whiten")},
        drop=["whiten", "update_critic"],
        insert={"gae": After("gae", Whiten())},
        rename={"reward": "value_of_answer"},
    )
    assert wires(graph, "gae")["advantages"] == "whiten.advantages"
    assert wires(graph, "update_actor")["advantages"] == "gae.advantages"
    assert wires(graph, "kl_shape")["token_level_scores"] == "value_of_answer.token_level_scores"
    assert graph["whiten"].operator == GAE(lam=0.5)


def test_the_original_is_untouched_also_by_an_edit_that_fails() -> None:
    before = (PPO.fingerprint(), repr(PPO))
    PPO.edit(replace={"gae": GroupAdvantage()}, drop=["kl_shape", "whiten", "update_critic"])
    with pytest.raises(GraphError):
        PPO.edit(replace={"gae": GroupAdvantage()}, drop=["generate"])
    assert (PPO.fingerprint(), repr(PPO)) == before
    assert ppo(exact) == PPO


@pytest.mark.parametrize(
    ("verbs", "said"),
    [
        (
            {"replace": {"gea": GAE()}},
            r"edit\(replace=\.\.\.\) names 'gea', which ppo does not have; it has batch, repeat",
        ),
        ({"drop": ["gea"]}, r"edit\(drop=\.\.\.\) names 'gea'"),
        ({"drop": "gea"}, r"edit\(drop=\.\.\.\) names 'gea'"),
        ({"rename": {"gea": "x"}}, r"edit\(rename=\.\.\.\) names 'gea'"),
        ({"insert": {"x": After("gea", GAE())}}, r"edit\(insert=\.\.\.\) names 'gea'"),
        (
            {"replace": {"gae": GAE}},
            r"edit\(replace=\{'gae': \.\.\.\}\) gives the class GAE; expected an operator, which has parameters: GAE\(",
        ),
        (
            {"replace": {"gae": "gae_long"}},
            r"edit\(replace=\{'gae': \.\.\.\}\) gives 'gae_long', which is not an operator; "
            r"expected one, such as GAE\(",
        ),
        (
            {"replace": GAE()},
            r"edit\(replace=GAE\(.*\)\) does not say where; expected replace=\{'gae': GAE\(lam=0\.9\)\}\.",
        ),
        ({"bind": FakeTrainer()}, r"does not say where; expected bind=\{'rollout': TorchRollout\(\)\}\."),
        ({"rename": "gae"}, r"edit\(rename='gae'\) does not say where; expected rename=\{'gae': 'advantage'\}\."),
        (
            {"insert": {"x": After("gae", Whiten)}},
            r"edit\(insert=\{'x': After\('gae', \.\.\.\)\}\) gives the class Whiten; expected an operator, ",
        ),
        (
            {"insert": {"x": GAE()}},
            r"edit\(insert=\{'x': GAE\(.*\)\}\) does not say where; expected \{'x': After\('rewa",
        ),
        (
            {"replace": {"gae": GAE()}, "drop": ["gae"]},
            r"edit names 'gae' more than once in replace=, set=, drop= and rename=",
        ),
        ({"drop": ["gae", "gae"]}, r"edit names 'gae' more than once"),
        ({"drop": ["batch"]}, r"edit drops the input 'batch'; an input falls away by itself once nothing reads it"),
        (
            {"rename": {"gae": "value"}},
            r"edit leaves two nodes named 'value'; give one another name: rename=\{\.\.\.: 'v",
        ),
        ({"replace": {"gae": Whiten()}}, r"edit leaves two nodes named 'whiten'; .* \.named\(\"whiten_2nd\"\)\."),
        ({"insert": {"gae": After("value", Clipped())}}, r"two nodes named 'gae'; .*: insert=\{'gae_2nd': \.\.\.\}\."),
        (
            {"replace": {"gae": GAE()}, "rename": {"gae": "adv"}},
            r"name it once, and edit the result for the rest\.",
        ),
        (
            {"rename": {"value": "v"}, "replace": {"gae": GroupAdvantage()}, "drop": ["update_critic"]},
            r"edit\(rename=\.\.\.\) names 'v', which nothing reads in the graph that is left, so it would fall",
        ),
        (
            {
                "insert": {"v": After("value", Clipped())},
                "replace": {"gae": GroupAdvantage()},
                "drop": ["update_critic"],
            },
            r"edit\(insert=\.\.\.\) names 'v', which nothing reads",
        ),
        (
            {"replace": {"whiten": Whiten(False)}, "wire": {"update_actor.advantages": "gae.advantages"}},
            r"edit\(replace=\.\.\.\) names 'whiten', which nothing reads",
        ),
        (
            {"wire": {"whiten.advantages": "gae.advantages", "update_actor.advantages": "gae.advantages"}},
            r"edit\(wire=\.\.\.\) names 'whiten', which nothing reads",
        ),
    ],
)
def test_misuse_is_refused(verbs: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        PPO.edit(**verbs)


def test_rows_stay_apart_through_edits() -> None:
    class Keep(Operator):
        changes_rows: ClassVar[bool] = True

        def __call__(self, values: c.Values) -> c.Values:
            return values

    with pytest.raises(
        PortError, match=r"gae\.values takes the batch axis of keep\.values, which was made by keep, but"
    ):
        PPO.edit(insert={"keep": After("value", Keep())})


# ---------------------------------------------------------------------------------------------------- random sequences

REPLACEMENTS: list[tuple[str, Operator]] = [
    ("gae", GAE(lam=0.5)),
    ("gae", GroupAdvantage()),
    ("gae", GAE().named("gae_2")),
    ("repeat", Repeat(4)),
    ("generate", Generate(0.7)),
    ("kl_shape", KLShape(0.1)),
    ("reward", Reward(exact, timeout=2.0)),
    ("update_actor", UpdateActor(PPOClip(kl=KLLoss("k2", 0.1)))),
    ("whiten", Whiten(False)),
    ("mix", LengthPenalty()),
    ("mix", Mix(0.1)),
]


@st.composite
def verbs(draw: st.DrawFn, graph: Graph) -> dict[str, Any]:
    """Verbs that name nodes which the graph has; whether they make sense is for `edit` to say."""
    names = st.sampled_from(sorted(graph.nodes))
    chosen: dict[str, Any] = {}
    fitting = [(n, op) for n, op in REPLACEMENTS if n in graph]
    if fitting and draw(st.booleans()):
        chosen["replace"] = dict([draw(st.sampled_from(fitting))])
    if draw(st.booleans()):
        chosen["drop"] = draw(st.lists(names, max_size=2, unique=True))
    if draw(st.booleans()):
        fresh = draw(st.sampled_from(["x", "y", "z"]))
        inserted = draw(st.sampled_from([Clip(), LengthPenalty(), Clipped(), Waits(), Whiten()]))
        chosen["insert"] = {fresh: After(draw(names), inserted)}
    if draw(st.booleans()):
        chosen["rename"] = {draw(names): draw(st.sampled_from(["r", "s", "t"]))}
    if draw(st.booleans()):
        ports = sorted(f"{n}.{field}" for n in graph.nodes for field in graph[n].inputs)
        chosen["wire"] = {draw(st.sampled_from(ports)): str(draw(st.sampled_from(sorted(graph.types))))}
    if draw(st.booleans()):
        chosen["lag"] = draw(st.integers(0, 2))
    return chosen


def invariants(graph: Graph) -> None:
    """What holds of every graph."""
    seen: set[str] = set()
    for name, node in graph.nodes.items():
        assert node.name == name == node.operator.name
        assert set(node.sources) <= seen, "nodes stand in topological order"
        seen.add(name)
        for field, edge in node.inputs.items():
            assert field in node.operator.signature.fields
            assert edge in graph.types
    reached = set(graph.sinks).union(*(graph.ancestors(sink) for sink in graph.sinks))
    assert reached == set(graph.nodes), "a graph is exactly what its sinks reach"
    assert graph.lag == 0 or graph.back_edges
    again = Graph.from_dict(graph.to_dict())
    assert again == graph
    assert again.fingerprint() == graph.fingerprint()
    assert graph.edit() == graph


@settings(max_examples=40)
@given(st.data())
def test_random_edits_keep_a_graph_a_graph(data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from([PPO, grpo(exact), two_rewards(), scored()]))
    worked = 0
    for _ in range(4):
        chosen = data.draw(verbs(graph))
        before = graph.fingerprint()
        try:
            edited = graph.edit(**chosen)
        except FlowrlError as error:
            assert str(error).endswith((".", "?")), f"{error} is no sentence"
            assert "\n" not in str(error)
            assert graph.fingerprint() == before
            continue
        worked += 1
        invariants(edited)
        assert graph.fingerprint() == before
        assert bool(graph.diff(edited)) == (edited.fingerprint() != before)
        graph = edited
    assume(worked)


def test_edges_parse() -> None:
    assert Edge.parse("gae.advantages") == Edge("gae", "advantages")
    assert str(Edge("gae", "advantages")) == "gae.advantages"
