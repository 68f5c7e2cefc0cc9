"""`Graph.edit`: no edge is a guess, and only columns that are read are rewritten."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.graph import algorithm
from flowrl.graphs import grpo
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


class ScoredLater(OldLogProb):
    """Not ahead of the reward."""

    def __call__(self, rollout: Sequences) -> LaterBatch:  # type: ignore[override]
        raise AssertionError("never called")


def other(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.0


# ------------------------------------------------------------------------------------------- what is inserted and reads


@pytest.mark.parametrize(
    ("anchor", "operator", "column", "reader"),
    [
        ("reward", Reward(other), "token_level_scores", "kl_shape"),
        ("old_log_prob", OldLogProb(), "old_log_probs", "mismatch"),
        ("value", Value(critic=Role("second")), "values", "gae"),
        ("gae", GAE(lam=0.5), "advantages", "whiten"),
    ],
)
def test_what_does_not_read_a_column_does_not_rewrite_it(
    anchor: str, operator: Operator, column: str, reader: str
) -> None:
    """The error names a port that could read it."""
    with raises("edit.unread-node", node="other", anchor=anchor) as error:
        PPO.edit(insert={"other": After(anchor, operator)})
    assert error.value.message == (
        f"other is inserted after {anchor} and writes {column} without reading {anchor}.{column}, so it does not "
        f"rewrite it, and no node reads other. Wire a reader to it: wire={{'{reader}.{column}': 'other.{column}'}}, "
        f"or replace {anchor}: replace={{'{anchor}': {type(operator).__name__}(...)}}."
    )


def test_a_reader_that_is_wired_to_it_moves_and_no_other() -> None:
    graph = PPO.edit(
        insert={"other": After("old_log_prob", OldLogProb())}, wire={"kl_shape.old_log_probs": "other.old_log_probs"}
    )
    assert readers(graph, "other.old_log_probs") == {"kl_shape"}
    assert readers(graph, "old_log_prob.old_log_probs") == {"mismatch", "update_actor"}


def test_a_second_reward_is_mixed_with_the_first() -> None:
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


def test_a_second_update_does_not_replace_the_first() -> None:
    plain = grpo(exact, kl_coef=0.0)
    graph = plain.edit(insert={"again": After("update_actor", UpdateActor(PPOClip(0.1)))})
    assert wires(graph, "sync")["updated"] == "update_actor.updated"
    assert graph.sinks == (*plain.sinks, "again")
    assert "FR008" in {finding.rule for finding in graph.check()}


def test_a_rewrite_is_of_one_kind_both_ways() -> None:
    """A score may be read as a reward, but neither of the two rewrites the other."""

    class Unshape(Operator):
        def __call__(self, token_level_rewards: c.TokenLevelRewards) -> c.TokenLevelScores:
            return token_level_rewards

    for insert in ({"x": After("reward", KLShape())}, {"x": After("kl_shape", Unshape())}):
        with raises("edit.unread-node", node="x"):
            PPO.edit(insert=insert)


class Replayed(Operator):
    """Reads a part of a rollout and writes all of it."""

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
    """One value in, two out, and one of these is what was read."""

    def __call__(self, values: c.Values) -> Named: ...


class Lower(Operator):
    """Rewrites one of two columns that are of one type."""

    def __call__(self, low: c.Values) -> c.Values: ...


def test_of_a_record_that_is_read_in_part_all_is_rewritten() -> None:
    graph = PPO.edit(insert={"replayed": After("generate", Replayed())})
    assert wires(graph, "replayed")["rollout.input_ids"] == "generate.input_ids"
    assert {edge.partition(".")[0] for edge in wires(graph, "value").values()} == {"replayed"}
    assert wires(graph, "reward")["rollout.response_text"] == "replayed.response_text"


def test_of_two_columns_of_one_type_that_is_rewritten_which_is_read() -> None:
    @algorithm
    def heads(batch: PromptBatch) -> Any:
        low = Low()(Value()(Generate()(Repeat(1)(batch))))
        return TwoHeads().named("a")(low.low), TwoHeads().named("b")(low.high)

    graph = heads().edit(insert={"lower": After("low", Lower())}, wire={"lower.low": "low.low"})
    assert (wires(graph, "a"), wires(graph, "b")) == ({"values": "lower.values"}, {"values": "low.high"})
    with raises("edit.ambiguous-source", node="low", port="value.values", known=("low", "high")):
        PPO.edit(insert={"low": After("value", Low())})


def test_of_two_that_could_be_it_the_one_of_its_name_rewrites_a_column() -> None:
    graph = PPO.edit(insert={"own": After("value", Own())})
    assert readers(graph, "own.values") == {"gae", "update_critic"}
    assert readers(graph, "own.high") == set()


def test_a_chain_that_is_wired_by_hand_is_a_chain() -> None:
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


def test_two_ports_of_one_type_are_not_given_one_output() -> None:
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


def test_what_is_inherited_is_no_guess() -> None:
    same = two_rewards().edit(wire={"mix.second": "first.token_level_scores"})
    assert wires(same.edit(replace={"mix": Mix(0.1)}), "mix") == wires(same, "mix")


def test_one_column_may_be_read_twice_under_its_own_name() -> None:
    class Masked(Operator):
        def __call__(self, rollout: Tokens, response_mask: c.ResponseMask, values: c.Values) -> c.Values:
            return values

    graph = PPO.edit(insert={"masked": After("value", Masked())})
    assert wires(graph, "masked")["rollout.response_mask"] == wires(graph, "masked")["response_mask"]


# ------------------------------------------------------------------------------------------------------------- records


class ModelReward(Operator):
    """Scores a rollout by what a model makes of it: reads more of the rollout than `Reward` does."""

    def __call__(self, rollout: RolloutBatch) -> c.TokenLevelScores: ...


class Answers(Operator):
    """The same, under another name."""

    def __call__(self, answers: RolloutBatch) -> c.TokenLevelScores: ...


@pytest.mark.parametrize(("operator", "port"), [(ModelReward(), "rollout"), (Answers(), "answers")])
def test_a_record_is_read_from_one_node(operator: Operator, port: str) -> None:
    """`repeat` writes `prompts` too, and so column by column it would be a choice."""
    graph = PPO.edit(replace={"reward": operator})
    assert wires(graph, operator.name) == {f"{port}.{name}": f"generate.{name}" for name in RolloutBatch._fields}
    inserted = PPO.edit(insert={"shift": After("value", Shift())})
    assert {edge.partition(".")[0] for end, edge in wires(inserted, "shift").items() if end != "values"} == {"generate"}


class Perhaps(Operator):
    """A record that may be left out."""

    def __call__(self, prompts: PromptBatch, rollout: RolloutBatch | None = None) -> c.TokenLevelScores: ...


def test_of_an_optional_record_all_is_read_or_nothing() -> None:
    """`Reward` reads a part of it from `generate`, and so the rest comes from there too."""
    graph = PPO.edit(replace={"reward": Perhaps()})
    assert wires(graph, "perhaps")["rollout.prompts"] == "generate.prompts"
    assert wires(graph, "perhaps")["prompts.uid"] == "repeat.uid"
    open_ended = PPO.edit(replace={"reward": Perhaps().named("judge")}, drop=["mismatch"])
    assert len(wires(open_ended, "judge")) == len(RolloutBatch._fields) + len(PromptBatch._fields)


class Shift(Operator):
    """Rewrites values with the help of a rollout."""

    def __call__(self, values: c.Values, rollout: RolloutBatch) -> c.Values:
        return values


class Passed(Operator):
    """A rollout as it came."""

    def __call__(self, rollout: RolloutBatch) -> RolloutBatch:
        return rollout


def test_a_record_that_several_nodes_write_is_a_choice() -> None:
    graph = PPO.edit(insert={"passed": After("generate", Passed())})
    with raises("edit.ambiguous-source", node="shift", port="rollout", known=("generate", "passed")) as error:
        graph.edit(insert={"shift": After("value", Shift())})
    assert error.value.message.endswith("Wire one: wire={'shift.rollout': 'generate'}.")
    wired = graph.edit(insert={"shift": After("value", Shift())}, wire={"shift.rollout": "passed"})
    assert wires(wired, "shift")["rollout.prompts"] == "passed.prompts"
    kept = graph.edit(replace={"reward": ModelReward()})
    assert wires(kept, "model_reward")["rollout.prompts"] == "passed.prompts", "as the predecessor's port of that name"


def test_a_record_that_no_node_writes_is_put_together() -> None:
    class Both(Operator):
        def __call__(self, both: Split) -> c.Values: ...

    graph = PPO.edit(insert={"both": After("gae", Both())}, wire={"update_critic.values": "both.values"})
    assert wires(graph, "both") == {"both.values": "value.values", "both.returns": "gae.returns"}


def test_the_exact_kind_goes_before_an_acceptable_one() -> None:
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
    ), "where nothing writes a reward"


# ------------------------------------------------------------------------------------------------------- what may leave


def test_what_writes_weights_leaves_by_name_only() -> None:
    graph = grpo(exact).edit(replace={"sync": Whiten()})
    assert graph.sinks == ("whiten", "mismatch", "update_actor")
    assert [finding.rule for finding in graph.check()] == ["FR002"]
    behind = PPO.edit(insert={"waits": After("update_actor", Waits())})
    assert behind.edit(drop=["sync", "waits"]).sinks == ("update_critic", "mismatch", "update_actor")
    replaced = PPO.edit(replace={"update_actor": UpdateActor(PPOClip(0.1)).named("train")}, drop=["sync"])
    assert replaced.sinks == ("update_critic", "mismatch", "train")
    with raises("edit.unread-node", node="waits", verb="replace"):
        behind.edit(drop=["sync"], replace={"waits": Waits()})
    second = grpo(exact, kl_coef=0.0).edit(
        insert={"second": After("update_actor", UpdateActor())}, wire={"sync.updated": "second.updated"}
    )
    assert "update_actor" in second.sinks
    assert "update_actor" not in grpo(exact).edit(replace={"sync": Whiten()}, drop=["update_actor"])


def test_a_dropped_sink_adds_no_sink_that_is_read_elsewhere() -> None:
    twice = PPO.edit(insert={"sync_2": After("update_actor", Sync(rollout=Role("second")))})
    assert twice.edit(drop=["sync_2"]) == PPO


# ----------------------------------------------------------------------------------------------------------------- set


def test_parameters_that_depend_on_each_other_change_at_once() -> None:
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
    whole = {"update_actor.loss.clip_high": 0.3, "update_actor.loss": PPOClip(0.1)}
    assert PPO.edit(set=whole)["update_actor"].operator == UpdateActor(PPOClip(0.1, 0.3)), "the owner is set first"


# ---------------------------------------------------------------------------------------------------------- by classes


class Better(Updated):
    """An update with more information."""


class Says(Operator):
    def __call__(self, updated: Updated) -> Better:
        return Better(updated.version)


class Wants(Operator):
    def __call__(self, updated: Better) -> Better:
        return updated


def test_a_value_of_a_subclass_may_be_read_and_none_of_a_base() -> None:
    graph = PPO.edit(insert={"says": After("update_actor", Says())}, wire={"sync.updated": "says.better"})
    assert wires(graph, "sync") == {"updated": "says.better"}
    with raises("edit.no-source", node="wants", port="updated"):
        PPO.edit(insert={"wants": After("update_actor", Wants())})


class Scored(Generate):
    """Generates responses and their scores."""

    def __call__(self, prompts: PromptBatch) -> EpisodeBatch:  # type: ignore[override]
        raise AssertionError("never called")


def test_a_replacement_that_writes_what_was_dropped_is_read_in_its_place() -> None:
    graph = grpo(exact).edit(replace={"generate": Scored()}, drop=["reward"])
    assert wires(graph, "group_advantage")["token_level_rewards"] == "scored.token_level_scores"
    kept = grpo(exact).edit(replace={"generate": Scored()})
    assert wires(kept, "group_advantage")["token_level_rewards"] == "reward.token_level_scores"
    assert graph.check() == kept.check() == []


def test_a_replacement_that_is_not_upstream_of_a_dropped_node_is_not_read() -> None:
    with raises("edit.lost-source", node="reward"):
        grpo(exact).edit(replace={"old_log_prob": ScoredLater()}, drop=["reward"])


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
