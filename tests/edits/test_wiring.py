"""`Graph.edit`: the edges of replaced and inserted nodes, by type, by record and by explicit wires."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.errors import GraphError
from flowrl.graph import Graph
from flowrl.graphs import dapo, grpo
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
    PPO,
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

# ------------------------------------------------------------------------------------------------------------- replace


def test_replacement_inherits_the_edges_of_each_port() -> None:
    graph = PPO.edit(replace={"gae": GAE(lam=0.5).named("gae_short")})
    assert "gae" not in graph
    assert wires(graph, "gae_short") == wires(PPO, "gae")
    assert wires(graph, "whiten")["advantages"] == "gae_short.advantages"
    assert wires(graph, "update_critic")["returns"] == "gae_short.returns"
    assert PPO.edit(replace={"gae": GAE()}) == PPO


def test_new_port_of_a_replacement_reads_the_only_fitting_ancestor() -> None:
    group = PPO.edit(replace={"gae": GroupAdvantage()}, drop=["update_critic"])
    assert wires(group, "group_advantage") == {
        "token_level_rewards": "kl_shape.token_level_rewards",
        "response_mask": "generate.response_mask",
        "uid": "repeat.uid",
    }, "uid of the rows after Repeat, not of the batch before it"
    assert "value" not in group


def test_replacement_with_several_fitting_ancestors_needs_a_wire() -> None:
    sources = ("first.token_level_scores", "second.token_level_scores")
    with raises("edit.ambiguous-source", node="length_penalty", port="token_level_scores", known=sources) as error:
        two_rewards().edit(replace={"mix": LengthPenalty()})
    assert error.value.message == (
        "length_penalty.token_level_scores expects score[batch response] float32, and several nodes write one: "
        "first.token_level_scores, second.token_level_scores. Wire one: "
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


def test_replacement_without_a_fitting_ancestor_is_refused() -> None:
    with raises("edit.no-source", node="update_actor", port="old_log_probs"):
        scored().edit(replace={"reward": UpdateActor()})


def test_error_about_a_missing_column_suggests_an_insert_that_works() -> None:
    without = grpo(exact, kl_coef=0.0)
    edit: dict[str, object] = {"set": {"update_actor.kl": KLLoss("k3", 0.1)}}
    with raises("edit.no-source", node="update_actor", port="ref_log_prob") as error:
        without.edit(**edit)  # type: ignore[arg-type]
    fix = error.value.message.partition("and wire it: ")[2].removesuffix(".")
    assert fix == error.value.facts["fix"]
    fixed = eval(f"dict({fix})", {"After": After, "RefLogProb": RefLogProb})
    graph = without.edit(**edit, **fixed)  # type: ignore[arg-type]
    assert wires(graph, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob"
    assert graph.check(prompts=8) == []


def test_suggested_insert_comes_after_the_gate_of_its_rows() -> None:
    edit: dict[str, Any] = {"set": {"update_actor.kl": KLLoss("k3", 0.1)}}
    with raises("edit.no-source", node="update_actor", port="ref_log_prob") as error:
        dapo(exact).edit(**edit)
    fix = str(error.value.facts["fix"])
    assert fix.startswith("insert={'ref_log_prob': After('collect', ")
    graph = dapo(exact).edit(**edit, **eval(f"dict({fix})", {"After": After, "RefLogProb": RefLogProb}))
    assert set(wires(graph, "ref_log_prob").values()) <= {f"collect.{name}" for name in RolloutBatch._fields}


def test_insert_that_would_not_type_check_is_not_suggested() -> None:
    """The rollout that `RefLogProb` could read has the rows upstream of `Half`."""

    class Half(Operator):
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores: ...

    class Late(Operator):
        def __call__(
            self, token_level_scores: c.TokenLevelScores, ref_log_prob: c.RefLogProbs
        ) -> c.TokenLevelScores: ...

    halved = scored().edit(insert={"half": After("reward", Half())})
    with raises("edit.no-source", node="late", fix="wire={'late.ref_log_prob': 'node.column'}"):
        halved.edit(insert={"late": After("half", Late())})


def test_optional_port_is_wired_only_if_the_parameters_need_it() -> None:
    with_kl = PPO.edit(replace={"update_actor": UpdateActor(kl=KLLoss("k3", 0.1))})
    assert wires(with_kl, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob"
    without = with_kl.edit(replace={"update_actor": UpdateActor()})
    assert "ref_log_prob" not in wires(without, "update_actor")
    assert without == PPO


def test_ratio_to_the_rollout_removes_the_need_for_old_log_prob() -> None:
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
    with raises("edit.lost-source", node="old_log_prob", port="mismatch.old_log_probs") as error:
        grpo(exact).edit(replace={"update_actor": bypass}, drop=["old_log_prob"])
    assert error.value.message.endswith(": drop=['mismatch'].")
    with_mismatch = grpo(exact).edit(replace={"update_actor": bypass})
    assert readers(with_mismatch, "old_log_prob.old_log_probs") == {"mismatch"}
    in_ppo = PPO.edit(replace={"update_actor": bypass}, drop=["mismatch"])
    assert readers(in_ppo, "old_log_prob.old_log_probs") == {"kl_shape"}


def test_readers_of_a_replaced_node_read_the_fitting_output() -> None:
    graph = PPO.edit(replace={"value": TwoHeads()}, wire={"two_heads.values": "old_value.values"}, insert={
        "old_value": After("generate", Value()),
    })  # fmt: skip
    assert wires(graph, "gae")["values"] == "two_heads.values"
    with raises("edit.lost-source", node="gae", port="update_critic.returns"):
        PPO.edit(replace={"gae": GroupAdvantage()})


def test_replacement_without_a_fitting_output_is_refused() -> None:
    with raises("edit.lost-source", node="value", known=()):
        PPO.edit(replace={"value": OldLogProb().named("old_log_prob_2")})


# -------------------------------------------------------------------------------------------------------------- insert


def test_inserted_node_takes_over_all_readers_of_the_column_it_rewrites() -> None:
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


def test_node_inserted_after_a_sink_becomes_the_sink() -> None:
    graph = scored().edit(insert={"penalty": After("reward", LengthPenalty())})
    assert graph.sinks == ("penalty",)


def test_inserts_at_one_anchor_form_a_chain_in_mapping_order() -> None:
    chain = {"a": After("reward", LengthPenalty()), "b": After("reward", Clip()), "c": After("reward", Clip(2.0))}
    graph = PPO.edit(insert=chain)
    assert wires(graph, "a")["token_level_scores"] == "reward.token_level_scores"
    assert wires(graph, "b")["token_level_scores"] == "a.token_level_scores"
    assert wires(graph, "c")["token_level_scores"] == "b.token_level_scores"
    assert wires(graph, "kl_shape")["token_level_scores"] == "c.token_level_scores"
    other = PPO.edit(insert=dict(reversed(chain.items())))
    assert wires(other, "c")["token_level_scores"] == "reward.token_level_scores"


@pytest.mark.parametrize("order", [1, -1])
def test_inserted_readers_are_rewired_in_either_order(order: int) -> None:
    """`blend` is inserted after kl_shape and reads the score, which `clip` rewrites."""
    insert = {"blend": After("kl_shape", Blend()), "clip": After("reward", Clip())}
    graph = PPO.edit(insert=dict(list(insert.items())[::order]))
    assert wires(graph, "blend") == {
        "token_level_rewards": "kl_shape.token_level_rewards",
        "token_level_scores": "clip.token_level_scores",
    }
    assert wires(graph, "gae")["token_level_rewards"] == "blend.token_level_rewards"


def test_row_axes_of_other_ports_resolve_an_ambiguous_port() -> None:
    class Grouped(Operator):
        def __call__(self, uid: c.Uid, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
            return token_level_scores

    graph = PPO.edit(insert={"grouped": After("reward", Grouped())})
    assert wires(graph, "grouped")["uid"] == "repeat.uid", "batch.uid has other rows"


def test_inserted_node_may_read_nodes_other_than_its_anchor() -> None:
    """old_log_prob is no ancestor of group_advantage, but the only node with the column that a correction reads."""
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
    sources = ("old_log_prob.old_log_probs", "other.old_log_probs")
    with raises("edit.ambiguous-source", node="correction", port="old_log_probs", known=sources):
        two.edit(insert={"correction": After("group_advantage", RolloutCorrection())})


def test_inserted_node_reads_neither_dependents_of_its_anchor_nor_dropped_nodes() -> None:
    with raises("edit.no-source", node="look", port="values"):
        grpo(exact).edit(insert={"look": After("generate", ReadsValues())})
    with raises("edit.no-source", node="look", port="advantages"):
        PPO.edit(insert={"look": After("reward", ReadsAdvantages())})
    with raises("edit.no-source", node="look", port="values"):
        PPO.edit(drop=["value", "update_critic"], insert={"look": After("generate", ReadsValues())})


class ReadsValues(Operator):
    """Reads values."""

    def __call__(self, values: c.Values) -> Updated:
        return Updated(0)


class ReadsAdvantages(Operator):
    """Reads scores and the advantages computed from them."""

    def __call__(self, token_level_scores: c.TokenLevelScores, advantages: c.Advantages) -> c.TokenLevelScores:
        return token_level_scores


def test_replacement_may_read_nodes_that_the_replaced_node_did_not() -> None:
    class Centered(Operator):
        """Scores minus the critic's value of the first token."""

        def __call__(self, token_level_scores: c.TokenLevelScores, values: c.Values) -> c.TokenLevelScores:
            return token_level_scores - values[:, :1]

    graph = PPO.edit(insert={"length_penalty": After("reward", LengthPenalty())})
    assert wires(graph.edit(replace={"length_penalty": Centered()}), "centered") == {
        "token_level_scores": "reward.token_level_scores",
        "values": "value.values",
    }


def test_inserted_sync_is_a_sink() -> None:
    without = PPO.edit(replace={"sync": Waits()})
    assert without.sinks == ("waits", "update_critic", "mismatch")
    with_sync = without.edit(insert={"sync": After("update_actor", Sync())})
    assert with_sync.sinks == ("waits", "update_critic", "mismatch", "sync")
    assert wires(with_sync, "sync") == {"updated": "update_actor.updated"}


def test_inserted_node_that_returns_a_value_rewrites_it() -> None:
    graph = PPO.edit(insert={"waits": After("update_actor", Waits())})
    assert wires(graph, "sync")["updated"] == "waits.updated"
    assert graph.sinks == PPO.sinks


def test_inserted_node_that_nothing_reads_is_refused() -> None:
    with raises("edit.unread-node", node="ref_2", anchor="generate") as error:
        PPO.edit(insert={"ref_2": After("generate", RefLogProb())})
    assert "wire={'kl_shape.ref_log_prob': 'ref_2.ref_log_prob'}" in error.value.message
    graph = PPO.edit(
        insert={"ref_2": After("generate", RefLogProb())},
        wire={"kl_shape.ref_log_prob": "ref_2.ref_log_prob"},
    )
    assert "ref_log_prob" not in graph
    with raises("edit.conflict", node="whiten"):
        PPO.edit(drop=["whiten"], insert={"w": After("whiten", Whiten())})


def test_insert_after_a_node_that_the_same_edit_replaces() -> None:
    graph = PPO.edit(
        replace={"reward": Reward(exact, timeout=1.0).named("judge")},
        insert={"penalty": After("reward", LengthPenalty())},
        rename={"kl_shape": "shape"},
    )
    assert wires(graph, "penalty")["token_level_scores"] == "judge.token_level_scores"
    assert wires(graph, "shape")["token_level_scores"] == "penalty.token_level_scores"
    assert wires(graph, "gae")["token_level_rewards"] == "shape.token_level_rewards"


# ------------------------------------------------------------------------------------------------------ wire and rename


def test_explicit_wires_override_inferred_edges() -> None:
    graph = PPO.edit(wire={"update_actor.advantages": "gae.advantages"})
    assert "whiten" not in graph
    graph = PPO.edit(
        insert={"penalty": After("reward", LengthPenalty()), "mix": After("kl_shape", Blend())},
        wire={"kl_shape.token_level_scores": "reward.token_level_scores"},
    )
    assert wires(graph, "kl_shape")["token_level_scores"] == "reward.token_level_scores"
    assert wires(graph, "mix")["token_level_scores"] == "penalty.token_level_scores"


class Blend(Operator):
    """Adds scores to rewards."""

    def __call__(
        self, token_level_rewards: c.TokenLevelRewards, token_level_scores: c.TokenLevelScores
    ) -> c.TokenLevelRewards:
        return token_level_rewards + token_level_scores


def test_wire_accepts_names_from_before_and_after_a_rename() -> None:
    for node in ("gae", "gae_long"):
        for source in ("value", "critic_value"):
            graph = PPO.edit(
                rename={"gae": "gae_long", "value": "critic_value"}, wire={f"{node}.values": f"{source}.values"}
            )
            assert wires(graph, "gae_long")["values"] == "critic_value.values"


def test_wire_of_a_record_connects_all_its_columns() -> None:
    graph = PPO.edit(insert={"passed": After("generate", PassThrough())}, wire={"value.rollout": "generate"})
    assert {e.partition(".")[0] for e in wires(graph, "value").values()} == {"generate"}
    assert {e.partition(".")[0] for e in wires(graph, "old_log_prob").values()} == {"passed"}
    with raises("graph.unknown-output", node="value", output="reward.input_ids"):
        PPO.edit(wire={"value.rollout": "reward"})


class PassThrough(Operator):
    """Returns the rollout unchanged."""

    def __call__(self, rollout: RolloutBatch) -> RolloutBatch:
        return rollout


@pytest.mark.parametrize(
    ("wire", "code", "facts"),
    [
        ({"gea.values": "value.values"}, "graph.unknown-node", {"node": "gea"}),
        ({"gae.value": "value.values"}, "edit.unknown-port", {"node": "gae", "port": "value"}),
        ({"gae": "value.values"}, "edit.unknown-port", {"node": "gae", "port": ""}),
        ({"gae.values": "value.vals"}, "graph.unknown-output", {"node": "gae", "output": "value.vals"}),
        ({"gae.values": "vlaue.values"}, "graph.unknown-output", {"node": "gae", "output": "vlaue.values"}),
        ({"gae.values": "value"}, "reference.output", {}),
    ],
)
def test_wire_refuses_unknown_names(wire: dict[str, str], code: str, facts: dict[str, str]) -> None:
    with raises(code, **facts):
        PPO.edit(wire=wire)


def test_wire_of_a_column_needs_an_output_rather_than_a_node() -> None:
    with pytest.raises(GraphError, match=r"'value' .*'node\.column'"):
        PPO.edit(wire={"gae.values": "value"})


def test_wire_is_checked_for_types_and_cycles() -> None:
    with raises("graph.type-mismatch", node="gae", port="values", edge="reward.token_level_scores"):
        PPO.edit(wire={"gae.values": "reward.token_level_scores"})
    graph = PPO.edit(insert={"a": After("value", Clipped()), "b": After("value", Clipped())})
    with raises("graph.cycle", nodes=("a", "b")):
        graph.edit(wire={"a.values": "b.values"})


def test_rename_changes_names_of_nodes_sinks_and_inputs() -> None:
    graph = PPO.edit(rename={"gae": "a", "sync": "b", "batch": "data"})
    assert graph.sinks == ("b", "update_critic", "mismatch")
    assert graph.inputs == {"data": PromptBatch}
    assert graph["a"].operator.name == "a"
    assert graph.edit(rename={"a": "gae", "b": "sync", "data": "batch"}) == PPO
    swapped = PPO.edit(rename={"gae": "value", "value": "gae"})
    assert wires(swapped, "value")["values"] == "gae.values"
    with raises("operator.node-name", given="a b"):
        PPO.edit(rename={"gae": "a b"})
