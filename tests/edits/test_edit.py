"""`Graph.edit`: each verb, all applied at once to the original graph, and which edits are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from flowrl import Lag
from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.core.operators.symbols import Edge
from flowrl.errors import BindError, GraphError, ParameterError
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    GAE,
    Generate,
    GroupAdvantage,
    KLLoss,
    Mismatch,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    Reward,
    Sync,
    UpdateActor,
    Whiten,
)
from flowrl.records import PromptBatch, Updated
from tests.support.errors import raises
from tests.support.kernel import (
    BINDINGS,
    PPO,
    Clip,
    Clipped,
    FakeRollout,
    FakeTrainer,
    LengthPenalty,
    exact,
    two_rewards,
    wires,
)


@algorithm
def grpo_by_hand(batch: PromptBatch, n: int = 8) -> Any:
    """GRPO written out, not derived from PPO by an edit."""
    prompts = Repeat(n)(batch)
    rollout = Generate()(prompts)
    old = OldLogProb()(rollout)
    mismatch = Mismatch()(rollout.rollout_log_probs, old, rollout.response_mask)
    ref = RefLogProb()(rollout)
    scores = Reward(exact)(rollout, prompts)
    adv = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
    return Sync()(
        UpdateActor(kl=KLLoss("k3", 0.001))(rollout, old_log_probs=old, advantages=adv, ref_log_prob=ref)
    ), mismatch


def test_grpo_derived_from_ppo_equals_grpo_written_out() -> None:
    edited, by_hand = grpo(exact, n=8), grpo_by_hand()
    assert edited.name == "grpo"
    assert edited.fingerprint() == by_hand.fingerprint()
    assert edited.nodes == by_hand.nodes
    assert edited.sinks == by_hand.sinks


def test_edit_without_verbs_changes_nothing() -> None:
    assert PPO.edit() == PPO
    assert PPO.edit(name="mine").name == "mine"


# ---------------------------------------------------------------------------------------------------------------- drop


def test_dropping_a_sink_removes_its_exclusive_ancestors() -> None:
    graph = PPO.edit(drop=["update_critic"])
    assert graph.sinks == ("sync", "mismatch")
    assert set(PPO.nodes) - set(graph.nodes) == {"update_critic"}
    with raises("graph.no-sink", sinks=("sync", "update_critic", "mismatch")):
        PPO.edit(drop=["sync", "update_critic", "update_actor", "mismatch"])


def test_dropping_sync_retains_the_update() -> None:
    graph = PPO.edit(drop="sync")
    assert set(PPO.nodes) - set(graph.nodes) == {"sync"}
    assert set(graph.sinks) == {"update_critic", "update_actor", "mismatch"}
    assert [finding.rule for finding in graph.check()] == ["FR002"]


def test_set_changes_only_the_given_parameters() -> None:
    graph = PPO.edit(set={"generate.max_new_tokens": 7}).edit(
        set={"generate.temperature": 0.5, "generate.top_k": 3, "gae.lam": 0.9}
    )
    generate = graph["generate"].operator
    assert (generate.max_new_tokens, generate.temperature, generate.top_k) == (7, 0.5, 3)  # type: ignore[attr-defined]
    assert set(PPO.diff(graph).changed) == {"generate", "gae"}
    assert graph["generate"].inputs == PPO["generate"].inputs


def test_set_changes_parameters_of_nested_specs() -> None:
    graph = PPO.edit(set={"update_actor.loss.clip_high": 0.28, "update_actor.kl": KLLoss("k2", 0.1)}).edit(
        set={"update_actor.kl.coef": 0.2, "update_actor.mini_batch": 4}
    )
    update = UpdateActor(PPOClip(0.2, 0.28), mini_batch=4, kl=KLLoss("k2", 0.2))
    assert graph["update_actor"].operator == update
    assert wires(graph, "update_actor")["ref_log_prob"] == "ref_log_prob.ref_log_prob", "which the KL term reads"


@pytest.mark.parametrize(
    ("verbs", "code", "facts"),
    [
        ({"set": {"sampler.n": 2}}, "graph.unknown-node", {"node": "sampler"}),
        ({"set": {"generat.top_k": 2}}, "graph.unknown-node", {"node": "generat"}),
        ({"set": {"gae.lamb": 2}}, "parameter.unknown", {"node": "gae", "parameter": "lamb"}),
        ({"set": {"gae": 2}}, "parameter.unknown", {"node": "gae", "parameter": ""}),
        ({"set": {"gae.lam.": 1}}, "parameter.unknown", {"node": "gae", "parameter": "lam."}),
        ({"set": {"repeat.m": 2}}, "parameter.unknown", {"node": "repeat", "parameter": "m"}),
        ({"set": {"update_actor.loss.clip": 2}}, "parameter.unknown", {"node": "update_actor.loss"}),
        ({"set": {"update_actor.kl.coef": 2}}, "parameter.unknown", {"parameter": "kl.coef"}),
        ({"set": [("gae.lam", 2)]}, "edit.bad-argument", {"verb": "set"}),
        ({"set": {"repeat.n": 2}, "replace": {"repeat": Repeat(3)}}, "edit.conflict", {"node": "repeat"}),
    ],
)
def test_set_refuses_unknown_nodes_and_parameters(verbs: dict[str, Any], code: str, facts: dict[str, str]) -> None:
    with raises(code, **facts):
        PPO.edit(**verbs)


@pytest.mark.parametrize(("path", "message"), [("update_actor.loss.clip_low", "clip_low=2"), ("repeat.n", "n=0")])
def test_set_validates_parameters(path: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        PPO.edit(set={path: int(message[-1])})


def test_setting_a_parameter_of_a_missing_spec_suggests_setting_the_spec() -> None:
    with raises("parameter.unknown") as error:
        PPO.edit(set={"update_actor.kl.coef": 2})
    assert error.value.message.endswith("Set kl itself: edit(set={'update_actor.kl': KLLoss(coef=2)}).")
    assert PPO.edit(set={"update_actor.kl": KLLoss(coef=2)})["update_actor"].operator.kl.coef == 2


def test_readers_of_a_dropped_node_read_its_input() -> None:
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
    ("drop", "facts"),
    [
        ("gae", {"node": "gae"}),
        ("generate", {"node": "generate", "known": ()}),
        ("update_actor", {"node": "update_actor", "port": "sync.updated"}),
    ],
)
def test_dropping_a_node_whose_inputs_fit_no_reader_is_refused(drop: str, facts: dict[str, Any]) -> None:
    with raises("edit.lost-source", **facts):
        PPO.edit(drop=[drop])


def test_dropping_a_node_with_two_fitting_inputs_needs_a_wire() -> None:
    graph = two_rewards().edit(insert={"penalty": After("mix", LengthPenalty())})
    inputs = ("first.token_level_scores", "second.token_level_scores")
    with raises("edit.lost-source", node="mix", port="penalty.token_level_scores", known=inputs) as error:
        graph.edit(drop=["mix"])
    assert error.value.message == (
        "mix cannot be dropped: penalty.token_level_scores reads mix.token_level_scores and expects "
        "score[batch response] float32, but not exactly one input of mix fits (found: first.token_level_scores, "
        "second.token_level_scores). Wire the port or drop its reader: "
        "wire={'penalty.token_level_scores': 'first.token_level_scores'}."
    )
    wired = graph.edit(drop=["mix"], wire={"penalty.token_level_scores": "second.token_level_scores"})
    assert "first" not in wired


def test_dropped_node_without_remaining_readers_needs_no_bypass() -> None:
    graph = PPO.edit(drop=["value", "update_critic"], replace={"gae": GroupAdvantage()})
    assert {"value", "update_critic", "gae"}.isdisjoint(graph.nodes)

    class Look(Operator):
        def __call__(self, values: c.Values) -> Updated:
            return Updated(0)

    watched = PPO.edit(insert={"twice": After("value", Clipped()), "look": After("value", Look())})
    assert watched.sinks == ("sync", "update_critic", "mismatch", "look")
    edited = watched.edit(drop=["value", "look", "update_critic"], replace={"gae": GroupAdvantage()})
    assert {"value", "twice", "look"}.isdisjoint(edited.nodes)


# --------------------------------------------------------------------------------------------------------- bind and lag


def test_bindings_are_removed_with_their_role() -> None:
    bound = PPO.edit(bind=BINDINGS)
    edited = bound.edit(replace={"gae": GroupAdvantage()}, drop=["kl_shape", "update_critic"])
    assert set(edited.bindings) == {"rollout", "actor"}
    swapped = bound.edit(bind={"rollout": FakeRollout(model="two")})
    assert swapped.bindings == {**BINDINGS, "rollout": FakeRollout(model="two")}
    assert swapped.nodes == bound.nodes
    with raises("graph.unknown-role", role="critic"):
        bound.edit(drop=["update_critic"], replace={"gae": GroupAdvantage()}, bind={"critic": FakeTrainer()})


def test_binding_that_lacks_what_a_replacement_needs_is_refused() -> None:
    bound = PPO.edit(bind=BINDINGS)
    with pytest.raises(BindError, match=r"'critic' is bound to FakeCritic, but old_log_prob needs a Scorer there"):
        bound.edit(replace={"old_log_prob": OldLogProb(actor=Role("critic"))})


def test_lag_persists_across_edits_and_needs_a_sync() -> None:
    assert PPO.lag == Lag(0)
    lagged = PPO.edit(lag=2)
    assert (lagged.lag, lagged.edit().lag, lagged.edit(lag=0)) == (Lag(2), Lag(2), PPO)
    with raises("lag.unsupported", lag="2"):
        lagged.edit(drop=["sync"])
    assert lagged.edit(drop=["sync"], lag=0).lag == Lag(0)


# --------------------------------------------------------------------------------------------------- atomic, and misuse


def test_all_verbs_resolve_against_the_original_graph() -> None:
    """Names of replaced and dropped nodes are free, whatever the order of the verbs."""
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


def test_edits_leave_the_original_graph_unchanged_even_if_they_fail() -> None:
    before = (PPO.fingerprint(), repr(PPO))
    PPO.edit(replace={"gae": GroupAdvantage()}, drop=["kl_shape", "whiten", "update_critic"])
    with pytest.raises(GraphError):
        PPO.edit(replace={"gae": GroupAdvantage()}, drop=["generate"])
    assert (PPO.fingerprint(), repr(PPO)) == before
    assert ppo(exact) == PPO


@pytest.mark.parametrize(
    ("verbs", "code", "facts"),
    [
        ({"replace": {"gea": GAE()}}, "graph.unknown-node", {"node": "gea"}),
        ({"drop": ["gea"]}, "graph.unknown-node", {"node": "gea"}),
        ({"drop": "gea"}, "graph.unknown-node", {"node": "gea"}),
        ({"rename": {"gea": "x"}}, "graph.unknown-node", {"node": "gea"}),
        ({"insert": {"x": After("gea", GAE())}}, "graph.unknown-node", {"node": "gea"}),
        ({"replace": {"gae": GAE}}, "edit.bad-argument", {"found": "a type"}),
        ({"replace": {"gae": "gae_long"}}, "edit.bad-argument", {"found": "a str"}),
        ({"replace": {"gae": exact}}, "edit.bad-argument", {"found": "a function"}),
        ({"insert": {"x": After("gae", Whiten)}}, "edit.bad-argument", {"found": "a type"}),
        ({"replace": GAE()}, "edit.bad-argument", {"verb": "replace"}),
        ({"bind": FakeTrainer()}, "edit.bad-argument", {"verb": "bind"}),
        ({"rename": "gae"}, "edit.bad-argument", {"verb": "rename"}),
        ({"insert": {"x": GAE()}}, "edit.bad-argument", {"verb": "insert"}),
        ({"replace": {"gae": GAE()}, "drop": ["gae"]}, "edit.conflict", {"node": "gae"}),
        ({"drop": ["gae", "gae"]}, "edit.conflict", {"node": "gae"}),
        ({"replace": {"gae": GAE()}, "rename": {"gae": "adv"}}, "edit.conflict", {"node": "gae"}),
        ({"drop": ["batch"]}, "edit.input-node", {"node": "batch"}),
        ({"rename": {"gae": "value"}}, "graph.duplicate-name", {"node": "value"}),
        ({"replace": {"gae": Whiten()}}, "graph.duplicate-name", {"node": "whiten"}),
        ({"insert": {"gae": After("value", Clipped())}}, "graph.duplicate-name", {"node": "gae"}),
        (
            {"rename": {"value": "v"}, "replace": {"gae": GroupAdvantage()}, "drop": ["update_critic"]},
            "edit.unread-node",
            {"node": "v", "verb": "rename"},
        ),
        (
            {
                "insert": {"v": After("value", Clipped())},
                "replace": {"gae": GroupAdvantage()},
                "drop": ["update_critic"],
            },
            "edit.unread-node",
            {"node": "v", "verb": "insert"},
        ),
        (
            {"replace": {"whiten": Whiten(False)}, "wire": {"update_actor.advantages": "gae.advantages"}},
            "edit.unread-node",
            {"node": "whiten", "verb": "replace"},
        ),
        (
            {"wire": {"whiten.advantages": "gae.advantages", "update_actor.advantages": "gae.advantages"}},
            "edit.unread-node",
            {"node": "whiten", "verb": "wire"},
        ),
    ],
)
def test_invalid_edits_are_refused(verbs: dict[str, Any], code: str, facts: dict[str, str]) -> None:
    with raises(code, **facts):
        PPO.edit(**verbs)


@pytest.mark.parametrize(
    ("verbs", "fix"),
    [
        ({"replace": {"gae": GAE}}, "Make an operator of it: GAE(...)."),
        ({"replace": {"gae": Whiten()}}, 'Rename one: .named("whiten_2nd").'),
        ({"insert": {"gae": After("value", Clipped())}}, "Rename one: rename={'gae': 'gae_2nd'}."),
        ({"rename": {"gae": "value"}}, "Rename one: rename={'value': 'value_2nd'}."),
        ({"insert": {"x": GAE()}}, "insert={'length_penalty': After('reward', LengthPenalty())}."),
        ({"drop": 3}, "Pass, for example, drop=['whiten']."),
    ],
)
def test_error_of_an_invalid_edit_ends_with_the_fix(verbs: dict[str, Any], fix: str) -> None:
    with pytest.raises(GraphError) as error:
        PPO.edit(**verbs)
    assert error.value.message.endswith(fix)


@pytest.mark.parametrize(
    ("call", "code", "facts"),
    [
        (lambda g: g.edit({"gae": GAE()}), "edit.bad-call", {"reason": "too many positional arguments"}),
        (
            lambda g: g.edit(remove=["gae"]),
            "edit.bad-call",
            {"reason": "got an unexpected keyword argument 'remove'"},
        ),
        (lambda g: g.bind(**BINDINGS).edit({"gae": GAE()}), "edit.bad-call", {}),
        (lambda g: g.bind(**BINDINGS).edit(remove=["gae"]), "edit.bad-call", {}),
        (lambda g: g.edit(rename={"gae": 3}), "edit.bad-argument", {"verb": "rename"}),
        (lambda g: g.edit(rename={3: "gae"}), "edit.bad-argument", {"verb": "rename"}),
        (lambda g: g.edit(replace={None: GAE()}), "edit.bad-argument", {"verb": "replace"}),
        (lambda g: g.edit(insert={3: After("gae", Whiten())}), "edit.bad-argument", {"verb": "insert"}),
        (lambda g: g.edit(set={("gae", "lam"): 0.5}), "edit.bad-argument", {"verb": "set"}),
        (lambda g: g.edit(wire={"gae.values": PPO["value"]}), "edit.bad-argument", {"verb": "wire"}),
        (lambda g: g.edit(bind={3: FakeTrainer()}), "edit.bad-argument", {"verb": "bind"}),
        (lambda g: g.edit(insert={"x": After(3, Whiten())}), "edit.bad-argument", {"verb": "insert"}),
        (lambda g: g.edit(drop=3), "edit.bad-argument", {"verb": "drop"}),
        (lambda g: g.edit(drop=[["gae"]]), "edit.bad-argument", {"verb": "drop"}),
        (lambda g: g.edit(drop={"whiten": None}), "edit.bad-argument", {"verb": "drop"}),
        (lambda g: g.edit(name=3), "graph.invalid-name", {"given": 3}),
        (lambda g: g.edit(name=""), "graph.invalid-name", {"given": ""}),
        (lambda g: g.edit(name="../up"), "graph.invalid-name", {"given": "../up"}),
        (lambda g: g.edit(name="a\nb"), "graph.invalid-name", {"given": "a\nb"}),
        (lambda g: g.edit(lag=True), "lag.not-a-count", {"given": True}),
        (lambda g: g.edit(set={"batch.record": Clipped}), "edit.input-node", {"node": "batch"}),
        (lambda g: g.edit(replace={"batch": Clipped()}), "edit.input-node", {"node": "batch"}),
        (lambda g: g.subgraph(until=3), "graph.unknown-node", {"node": 3}),
        (lambda g: g.subgraph(until=[["gae"]]), "graph.unknown-node", {"node": ("gae",)}),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_and_change_nothing(
    call: Callable[[Graph], Any], code: str, facts: dict[str, Any]
) -> None:
    before = (PPO.fingerprint(), repr(PPO))
    with raises(code, **facts):
        call(PPO)
    assert (PPO.fingerprint(), repr(PPO)) == before


@pytest.mark.parametrize("name", ["mine", "ppo-2", "PPO + KL 0.1", "grpo_v1.2"])
def test_valid_graph_names_are_accepted(name: str) -> None:
    assert PPO.edit(name=name).name == name


def test_inserted_node_with_a_new_row_axis_does_not_fit_readers_of_the_old_axis() -> None:
    class NewRows(Operator):
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, values: c.Values) -> c.Values:
            return values

    with raises("graph.axis-mismatch", node="gae", port="values", axis="batch", edge="new_rows.values"):
        PPO.edit(insert={"new_rows": After("value", NewRows())})


def test_edge_parses_from_its_text() -> None:
    assert Edge.parse("gae.advantages") == Edge("gae", "advantages")
    assert str(Edge("gae", "advantages")) == "gae.advantages"
