"""`Graph.edit`: where the edges of what is replaced and inserted lead, by type, by record and by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.errors import GraphError, PortError
from flowrl.graph import Graph
from flowrl.graphs import dapo, grpo, ppo
from flowrl.operators import (
    GAE,
    GroupAdvantage,
    KLLoss,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Reward,
    RolloutCorrection,
    Sync,
    UpdateActor,
    Value,
    Whiten,
)
from flowrl.records import PromptBatch, RolloutBatch, Updated
from tests.support.errors import raises
from tests.support.kernel import (
    Clip,
    Clipped,
    LengthPenalty,
    TwoHeads,
    Waits,
    exact,
    readers,
    scored,
    two_rewards,
    wires,
)

PPO = ppo(exact)


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


def test_the_error_about_a_column_that_is_not_there_has_the_edit_that_brings_it() -> None:
    without = grpo(exact, kl_coef=0.0)
    edit: dict[str, object] = {"set": {"update_actor.kl": KLLoss("k3", 0.1)}}
    with pytest.raises(GraphError) as error:
        without.edit(**edit)  # type: ignore[arg-type]
    fix = str(error.value).partition("and wire it: ")[2].removesuffix(".")
    fixed = eval(f"dict({fix})", {"After": After, "RefLogProb": RefLogProb})
    graph = without.edit(**edit, **fixed)  # type: ignore[arg-type]
    assert wires(graph, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob"
    assert graph.check(prompts=8) == []


def test_an_insertion_is_offered_behind_the_gate_whose_rows_are_read() -> None:
    edit: dict[str, Any] = {"set": {"update_actor.kl": KLLoss("k3", 0.1)}}
    with pytest.raises(GraphError, match=r"insert=\{'ref_log_prob': After\('collect', ") as error:
        dapo(exact).edit(**edit)
    fix = str(error.value).partition("and wire it: ")[2].removesuffix(".")
    graph = dapo(exact).edit(**edit, **eval(f"dict({fix})", {"After": After, "RefLogProb": RefLogProb}))
    assert set(wires(graph, "ref_log_prob").values()) <= {f"collect.{name}" for name in RolloutBatch._fields}


def test_an_insertion_that_would_not_type_check_is_not_offered() -> None:
    """What `RefLogProb` could read has the rows from before `Half`."""

    class Half(Operator):
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores: ...

    class Late(Operator):
        def __call__(
            self, token_level_scores: c.TokenLevelScores, ref_log_prob: c.RefLogProbs
        ) -> c.TokenLevelScores: ...

    halved = scored().edit(insert={"half": After("reward", Half())})
    with pytest.raises(GraphError, match=r"late\.ref_log_prob wants .* and wire it: wire=\{'late\.ref_log_prob': 'no"):
        halved.edit(insert={"late": After("half", Late())})


def test_an_optional_port_is_taken_where_the_parameters_want_it() -> None:
    with_kl = PPO.edit(replace={"update_actor": UpdateActor(kl=KLLoss("k3", 0.1))})
    assert wires(with_kl, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob"
    without = with_kl.edit(replace={"update_actor": UpdateActor()})
    assert "ref_log_prob" not in wires(without, "update_actor")
    assert without == PPO


def test_a_ratio_to_the_rollout_leaves_old_log_prob_to_fall_away() -> None:
    bypass = UpdateActor(PPOClip(0.2, ratio_to="rollout"))
    for graph in (grpo(exact, kl_coef=0.0), grpo(exact)):
        kl = graph["update_actor"].operator.kl  # type: ignore[attr-defined]
        update = UpdateActor(PPOClip(0.2, ratio_to="rollout"), kl=kl)
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


def test_a_value_that_is_passed_on_is_re_written() -> None:
    graph = PPO.edit(insert={"waits": After("update_actor", Waits())})
    assert wires(graph, "sync")["updated"] == "waits.updated"
    assert graph.sinks == PPO.sinks


def test_what_nobody_would_read_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"ref_2 is inserted after generate but rewrites none .*wire=\{'kl_shape\.ref_log_prob': 'r"
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
        ({"gae.values": "value"}, r"'value' does not name an output. Write 'node\.column'"),
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
    with raises("operator.node-name", given="a b"):
        PPO.edit(rename={"gae": "a b"})
