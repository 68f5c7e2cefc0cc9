"""`Graph.edit`: edges are never guessed, and only columns that a node reads are rewritten."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.graph import algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    GAE,
    Generate,
    GroupAdvantage,
    KLShape,
    OldLogProb,
    PPOClip,
    Repeat,
    Reward,
    Sync,
    UpdateActor,
    Value,
    Whiten,
)
from flowrl.records import EpisodeBatch, PromptBatch, RolloutBatch, Sequences, Tokens, Updated
from tests.support.errors import raises
from tests.support.kernel import PPO, LengthPenalty, Mix, Split, TwoHeads, Waits, exact, readers, two_rewards, wires


class LaterBatch(NamedTuple):
    """Log-probs, with scores."""

    old_log_probs: c.OldLogProbs
    token_level_scores: c.TokenLevelScores


class WritesScores(OldLogProb):
    """Writes log-probs and scores, and is not upstream of the reward."""

    def __call__(self, rollout: Sequences) -> LaterBatch:  # type: ignore[override]
        raise AssertionError("never called")


def other(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.0


# ------------------------------------------------------------------------------------------- what is inserted and reads


@pytest.mark.parametrize(
    ("anchor", "operator", "column", "reader"),
    [
        ("reward", Reward(other), "token_level_scores", "kl_shape.token_level_scores"),
        ("old_log_prob", OldLogProb(), "old_log_probs", "mismatch.old_log_probs"),
        ("value", Value(critic=Role("second")), "values", "node.port"),
        ("gae", GAE(lam=0.5), "advantages", "whiten.advantages"),
    ],
)
def test_inserted_node_rewrites_only_columns_that_it_reads(
    anchor: str, operator: Operator, column: str, reader: str
) -> None:
    """The error names a port that reads the new output in a valid graph; values of a second critic are in none."""
    with raises("edit.unread-node", node="other", anchor=anchor) as error:
        PPO.edit(insert={"other": After(anchor, operator)})
    assert error.value.message == (
        f"other is inserted after {anchor} and writes {column} without reading {anchor}.{column}, so it does not "
        f"rewrite it, and no node reads other. Replace {anchor}, "
        f"replace={{'{anchor}': {type(operator).__name__}(...)}}, or wire a reader to other: "
        f"wire={{'{reader}': 'other.{column}'}}."
    )


def test_only_readers_wired_to_an_inserted_node_read_it() -> None:
    graph = PPO.edit(
        insert={"other": After("old_log_prob", OldLogProb())}, wire={"kl_shape.old_log_probs": "other.old_log_probs"}
    )
    assert readers(graph, "other.old_log_probs") == {"kl_shape"}
    assert readers(graph, "old_log_prob.old_log_probs") == {"mismatch", "update_actor"}


def test_second_reward_and_mix_are_inserted_together() -> None:
    graph = PPO.edit(
        insert={"second": After("reward", Reward(other)), "mix": After("reward", Mix())},
        wire={"mix.second": "second.token_level_scores"},
    )
    assert wires(graph, "mix") == {
        "first": "reward.token_level_scores",
        "second": "second.token_level_scores",
    }
    assert wires(graph, "kl_shape")["token_level_scores"] == "mix.token_level_scores"
    assert not PPO.diff(graph).removed


def test_inserted_update_does_not_replace_the_existing_one() -> None:
    plain = grpo(exact, kl_coef=0.0)
    graph = plain.edit(insert={"again": After("update_actor", UpdateActor(PPOClip(0.1)))})
    assert wires(graph, "sync")["updated"] == "update_actor.updated"
    assert graph.sinks == (*plain.sinks, "again")
    assert "FR008" in {finding.rule for finding in graph.check()}


def test_rewrite_has_the_exact_type_of_the_column() -> None:
    """A score may be read as a reward, but neither rewrites the other."""

    class Unshape(Operator):
        def __call__(self, token_level_rewards: c.TokenLevelRewards) -> c.TokenLevelScores:
            return token_level_rewards

    for insert in ({"x": After("reward", KLShape())}, {"x": After("kl_shape", Unshape())}):
        with raises("edit.unread-node", node="x"):
            PPO.edit(insert=insert)


class Replayed(Operator):
    """Reads part of a rollout and writes all of it."""

    def __call__(self, rollout: Sequences) -> RolloutBatch: ...


class Heads(NamedTuple):
    low: c.Values
    high: c.Values


class Low(Operator):
    """One value in, two out."""

    def __call__(self, values: c.Values) -> Heads: ...


class Named(NamedTuple):
    high: c.Values
    values: c.Values


class Own(Operator):
    """One value in, two out; one of them has the name of the input."""

    def __call__(self, values: c.Values) -> Named: ...


class Lower(Operator):
    """Rewrites one of two columns of the same type."""

    def __call__(self, low: c.Values) -> c.Values: ...


def test_node_that_reads_part_of_a_record_and_writes_all_of_it_rewrites_all_of_it() -> None:
    graph = PPO.edit(insert={"replayed": After("generate", Replayed())})
    assert wires(graph, "replayed")["rollout.input_ids"] == "generate.input_ids"
    assert {edge.partition(".")[0] for edge in wires(graph, "value").values()} == {"replayed"}
    assert wires(graph, "reward")["rollout.response_text"] == "replayed.response_text"


def test_among_columns_of_one_type_only_the_one_read_is_rewritten() -> None:
    @algorithm
    def heads(batch: PromptBatch) -> Any:
        low = Low()(Value()(Generate()(Repeat(1)(batch))))
        return TwoHeads().named("a")(low.low), TwoHeads().named("b")(low.high)

    graph = heads().edit(insert={"lower": After("low", Lower())}, wire={"lower.low": "low.low"})
    assert (wires(graph, "a"), wires(graph, "b")) == ({"values": "lower.values"}, {"values": "low.high"})
    with raises("edit.ambiguous-source", node="low", port="value.values", known=("low", "high")):
        PPO.edit(insert={"low": After("value", Low())})


def test_among_two_fitting_outputs_the_one_with_the_name_of_the_column_rewrites_it() -> None:
    graph = PPO.edit(insert={"own": After("value", Own())})
    assert readers(graph, "own.values") == {"gae", "update_critic"}
    assert readers(graph, "own.high") == set()


def test_explicit_wires_along_a_chain_give_the_same_graph_as_none() -> None:
    chain = {"a": After("reward", LengthPenalty()), "b": After("reward", LengthPenalty(0.1))}
    graph = PPO.edit(insert=chain, wire={"b.token_level_scores": "a.token_level_scores"})
    assert wires(graph, "kl_shape")["token_level_scores"] == "b.token_level_scores"
    assert readers(graph, "a.token_level_scores") == {"b"}
    assert graph == PPO.edit(insert=chain)
    renamed = {"rename": {"reward": "judge"}, "insert": {"a": After("reward", LengthPenalty())}}
    for name in ("reward", "judge"):
        by_hand = PPO.edit(**renamed, wire={"a.token_level_scores": f"{name}.token_level_scores"})  # type: ignore[arg-type]
        assert by_hand == PPO.edit(**renamed)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- ports that are alike


def test_one_output_is_not_wired_to_two_ports_of_its_type() -> None:
    sources = ("reward.token_level_scores",)
    with raises("edit.ambiguous-source", node="mix", port="first", known=sources) as error:
        PPO.edit(insert={"mix": After("reward", Mix())})
    fix = "wire={'mix.first': 'reward.token_level_scores', 'mix.second': 'node.column'}."
    assert error.value.message.endswith(fix)
    with raises("edit.ambiguous-source", node="mix", port="first", known=sources):
        PPO.edit(replace={"kl_shape": Mix()})
    half = {"mix.first": "reward.token_level_scores"}
    with raises("edit.ambiguous-source", node="mix", port="second", known=sources):
        PPO.edit(insert={"mix": After("reward", Mix())}, wire=half)
    both = {**half, "mix.second": "reward.token_level_scores"}
    assert set(wires(PPO.edit(insert={"mix": After("reward", Mix())}, wire=both), "mix").values()) == {
        "reward.token_level_scores"
    }


def test_replacement_inherits_two_ports_wired_to_one_output() -> None:
    same = two_rewards().edit(wire={"mix.second": "first.token_level_scores"})
    assert wires(same.edit(replace={"mix": Mix(0.1)}), "mix") == wires(same, "mix")


def test_column_may_be_read_by_a_record_and_by_a_port_of_its_name() -> None:
    class Masked(Operator):
        def __call__(self, rollout: Tokens, response_mask: c.ResponseMask, values: c.Values) -> c.Values:
            return values

    graph = PPO.edit(insert={"masked": After("value", Masked())})
    assert wires(graph, "masked")["rollout.response_mask"] == wires(graph, "masked")["response_mask"]


# ------------------------------------------------------------------------------------------------------------- records


class ModelReward(Operator):
    """Scores a rollout with a model: reads more of the rollout than `Reward` does."""

    def __call__(self, rollout: RolloutBatch) -> c.TokenLevelScores: ...


class Responses(Operator):
    """The same, with another port name."""

    def __call__(self, responses: RolloutBatch) -> c.TokenLevelScores: ...


@pytest.mark.parametrize(("operator", "port"), [(ModelReward(), "rollout"), (Responses(), "responses")])
def test_all_columns_of_a_record_are_read_from_one_node(operator: Operator, port: str) -> None:
    """`repeat` writes `prompts`, too, so each column alone would be ambiguous."""
    graph = PPO.edit(replace={"reward": operator})
    assert wires(graph, operator.name) == {f"{port}.{name}": f"generate.{name}" for name in RolloutBatch._fields}
    inserted = PPO.edit(insert={"shift": After("value", Shift())})
    assert {edge.partition(".")[0] for end, edge in wires(inserted, "shift").items() if end != "values"} == {"generate"}


class OptionalRecord(Operator):
    """Reads an optional record."""

    def __call__(self, prompts: PromptBatch, rollout: RolloutBatch | None = None) -> c.TokenLevelScores: ...


def test_optional_record_is_wired_in_full() -> None:
    """`Reward` reads part of it from `generate`, so the rest comes from there, too."""
    graph = PPO.edit(replace={"reward": OptionalRecord()})
    assert wires(graph, "optional_record")["rollout.prompts"] == "generate.prompts"
    assert wires(graph, "optional_record")["prompts.uid"] == "repeat.uid"
    open_ended = PPO.edit(replace={"reward": OptionalRecord().named("judge")}, drop=["mismatch"])
    assert len(wires(open_ended, "judge")) == len(RolloutBatch._fields) + len(PromptBatch._fields)


class Shift(Operator):
    """Rewrites values and reads a rollout."""

    def __call__(self, values: c.Values, rollout: RolloutBatch) -> c.Values:
        return values


class PassThrough(Operator):
    """Returns the rollout unchanged."""

    def __call__(self, rollout: RolloutBatch) -> RolloutBatch:
        return rollout


def test_record_that_several_nodes_write_needs_a_wire() -> None:
    graph = PPO.edit(insert={"passed": After("generate", PassThrough())})
    with raises("edit.ambiguous-source", node="shift", port="rollout", known=("generate", "passed")) as error:
        graph.edit(insert={"shift": After("value", Shift())})
    assert error.value.message.endswith("Wire one: wire={'shift.rollout': 'generate'}.")
    wired = graph.edit(insert={"shift": After("value", Shift())}, wire={"shift.rollout": "passed"})
    assert wires(wired, "shift")["rollout.prompts"] == "passed.prompts"
    replaced = graph.edit(replace={"reward": ModelReward()})
    assert wires(replaced, "model_reward")["rollout.prompts"] == "passed.prompts", (
        "inherited from the port of the same name"
    )


def test_record_that_no_node_writes_is_assembled_from_several_nodes() -> None:
    class Both(Operator):
        def __call__(self, both: Split) -> c.Values: ...

    graph = PPO.edit(insert={"both": After("gae", Both())}, wire={"update_critic.values": "both.values"})
    assert wires(graph, "both") == {"both.values": "value.values", "both.returns": "gae.returns"}


def test_exact_column_type_is_preferred_to_a_compatible_one() -> None:
    """A score may be read as a reward, but `kl_shape` writes a reward."""

    class Judged(Operator):
        def __call__(self, values: c.Values, token_level_rewards: c.TokenLevelRewards) -> c.Values:
            return values

    assert wires(PPO.edit(insert={"x": After("value", Judged())}), "x")["token_level_rewards"] == (
        "kl_shape.token_level_rewards"
    )
    assert (
        wires(grpo(exact).edit(replace={"group_advantage": GroupAdvantage().named("x")}), "x")["token_level_rewards"]
        == "reward.token_level_scores"
    ), "no node writes a reward"


# ------------------------------------------------------------------------------------------------------ pruned updates


def test_updates_are_removed_only_by_name() -> None:
    graph = grpo(exact).edit(replace={"sync": Whiten()})
    assert graph.sinks == ("whiten", "mismatch", "update_actor")
    assert [finding.rule for finding in graph.check()] == ["FR002"]
    extended = PPO.edit(insert={"waits": After("update_actor", Waits())})
    assert extended.edit(drop=["sync", "waits"]).sinks == ("update_critic", "mismatch", "update_actor")
    replaced = PPO.edit(replace={"update_actor": UpdateActor(PPOClip(0.1)).named("train")}, drop=["sync"])
    assert replaced.sinks == ("update_critic", "mismatch", "train")
    with raises("edit.unread-node", node="waits", verb="replace"):
        extended.edit(drop=["sync"], replace={"waits": Waits()})
    second = grpo(exact, kl_coef=0.0).edit(
        insert={"second": After("update_actor", UpdateActor())}, wire={"sync.updated": "second.updated"}
    )
    assert "update_actor" in second.sinks
    assert "update_actor" not in grpo(exact).edit(replace={"sync": Whiten()}, drop=["update_actor"])


def test_dropping_a_sink_makes_no_sink_of_a_node_with_other_readers() -> None:
    twice = PPO.edit(insert={"sync_2": After("update_actor", Sync(rollout=Role("second")))})
    assert twice.edit(drop=["sync_2"]) == PPO


# ----------------------------------------------------------------------------------------------------------------- set


def test_set_validates_dependent_parameters_together_in_any_order() -> None:
    changes = {
        "update_actor.aggregation": "seq-mean-token-sum-norm",
        "update_actor.ppo_epochs": 2,
        "update_actor.norm": 64.0,
    }
    for order in (list(changes.items()), list(changes.items())[::-1]):
        assert PPO.edit(set=dict(order))["update_actor"].operator == UpdateActor(
            ppo_epochs=2, aggregation="seq-mean-token-sum-norm", norm=64.0
        )
    with raises("objective.invalid-settings", given=None):
        PPO.edit(set={"update_actor.aggregation": "seq-mean-token-sum-norm"})
    nested = {"update_actor.loss.clip_high": 0.3, "update_actor.loss": PPOClip(0.1)}
    assert PPO.edit(set=nested)["update_actor"].operator == UpdateActor(PPOClip(0.1, 0.3)), "the owner is set first"


# ---------------------------------------------------------------------------------------------------------- by classes


class DetailedUpdate(Updated):
    """An update with more information."""


class AddsDetail(Operator):
    def __call__(self, updated: Updated) -> DetailedUpdate:
        return DetailedUpdate(updated.version)


class NeedsDetail(Operator):
    def __call__(self, updated: DetailedUpdate) -> DetailedUpdate:
        return updated


def test_port_reads_a_subclass_of_its_type_but_no_base_class() -> None:
    graph = PPO.edit(
        insert={"adds_detail": After("update_actor", AddsDetail())},
        wire={"sync.updated": "adds_detail.detailed_update"},
    )
    assert wires(graph, "sync") == {"updated": "adds_detail.detailed_update"}
    with raises("edit.no-source", node="needs_detail", port="updated"):
        PPO.edit(insert={"needs_detail": After("update_actor", NeedsDetail())})


class Scored(Generate):
    """Generates responses and their scores."""

    def __call__(self, prompts: PromptBatch) -> EpisodeBatch:  # type: ignore[override]
        raise AssertionError("never called")


def test_replacement_that_also_writes_a_dropped_column_is_read_instead() -> None:
    graph = grpo(exact).edit(replace={"generate": Scored()}, drop=["reward"])
    assert wires(graph, "group_advantage")["token_level_rewards"] == "scored.token_level_scores"
    with_reward = grpo(exact).edit(replace={"generate": Scored()})
    assert wires(with_reward, "group_advantage")["token_level_rewards"] == "reward.token_level_scores"
    assert graph.check() == with_reward.check() == []


def test_replacement_downstream_of_a_dropped_node_does_not_supply_its_column() -> None:
    with raises("edit.lost-source", node="reward"):
        grpo(exact).edit(replace={"old_log_prob": WritesScores()}, drop=["reward"])


def test_a_second_kl_is_answered_with_the_node_that_counts_the_first() -> None:
    """Wiring it would count KL twice. The offered edits, applied, change the KL that is counted."""
    shaped = ppo(exact)
    with raises("edit.unread-node", node="again", counted_by="kl_shape") as caught:
        shaped.edit(insert={"again": After("kl_shape", KLShape())})
    assert "edit(replace={'kl_shape': KLShape(...)})" in caught.value.message and "wire" not in caught.value.message
    assert not shaped.edit(replace={"kl_shape": KLShape(0.1)}).check()
    in_loss = grpo(exact)
    with raises("edit.unread-node", node="again", counted_by="update_actor") as caught:
        in_loss.edit(insert={"again": After("reward", KLShape())})
    assert "set={'update_actor.kl': None}" in caught.value.message
    wire = {"group_advantage.token_level_rewards": "again.token_level_rewards"}
    edited = in_loss.edit(insert={"again": After("reward", KLShape())}, set={"update_actor.kl": None}, wire=wire)
    assert [finding.rule for finding in edited.check()] == ["FR016"]  # not the rule on KL that counts twice
