"""`Graph.edit`: every verb, that all of them act at once on the graph as it was, and what is refused."""

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
from flowrl.errors import BindError, FlowrlError, GraphError, PortError
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
from tests.support.kernel import (
    BINDINGS,
    Clip,
    Clipped,
    FakeRollout,
    FakeTrainer,
    LengthPenalty,
    exact,
    two_rewards,
    wires,
)

PPO = ppo(exact)


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
    return Sync()(
        UpdateActor(kl=KLLoss("k3", 0.001))(rollout, old_log_probs=old, advantages=adv, ref_log_prob=ref)
    ), mismatch


def test_grpo_is_an_edit_of_ppo() -> None:
    edited, by_hand = grpo(exact, n=8), grpo_by_hand()
    assert edited.name == "grpo"
    assert edited.fingerprint() == by_hand.fingerprint()
    assert edited.nodes == by_hand.nodes
    assert edited.sinks == by_hand.sinks


def test_no_verb_is_no_change() -> None:
    assert PPO.edit() == PPO
    assert PPO.edit(name="mine").name == "mine"


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
    graph = PPO.edit(set={"update_actor.loss.clip_high": 0.28, "update_actor.kl": KLLoss("k2", 0.1)}).edit(
        set={"update_actor.kl.coef": 0.2, "update_actor.mini_batch": 4}
    )
    update = UpdateActor(PPOClip(0.2, 0.28), mini_batch=4, kl=KLLoss("k2", 0.2))
    assert graph["update_actor"].operator == update
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
            {"set": {"update_actor.kl.coef": 2}},
            r"goes into update_actor.kl, which is None and has no parameters; set it as a whole: set={'update",
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
    assert PPO.lag == Lag(0)
    ahead = PPO.edit(lag=2)
    assert (ahead.lag, ahead.edit().lag, ahead.edit(lag=0)) == (Lag(2), Lag(2), PPO)
    with pytest.raises(
        GraphError, match=r"lag=2 belongs to the back-edge .* which ppo does not have; add a Sync, or edit"
    ):
        ahead.edit(drop=["sync"])
    assert ahead.edit(drop=["sync"], lag=0).lag == Lag(0)


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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda g: g.edit({"gae": GAE()}),
            r"edit\(\.\.\.\) cannot be called like this: too many positional .* given by n",
        ),
        (
            lambda g: g.edit(remove=["gae"]),
            r"unexpected keyword argument 'remove'\. Its verbs are replace, drop, insert,",
        ),
        (lambda g: g.bind(**BINDINGS).edit({"gae": GAE()}), r"too many positional arguments\. Its verbs are replace, "),
        (
            lambda g: g.bind(**BINDINGS).edit(remove=["gae"]),
            r"unexpected keyword argument 'remove'\. Its verbs are rep",
        ),
        (
            lambda g: g.edit(rename={"gae": 3}),
            r"edit\(rename=\{'gae': 3\}\) has 3 where a name is due; expected rename=",
        ),
        (lambda g: g.edit(rename={3: "gae"}), r"has 3 where a name is due"),
        (lambda g: g.edit(replace={None: GAE()}), r"has None where a name is due; expected replace=\{'gae': GAE\("),
        (lambda g: g.edit(insert={3: After("gae", Whiten())}), r"has 3 where a name is due; expected insert="),
        (lambda g: g.edit(set={("gae", "lam"): 0.5}), r"has \('gae', 'lam'\) where a name is due; expected set="),
        (
            lambda g: g.edit(wire={"gae.values": PPO["value"]}),
            r"where a name is due; expected wire=\{'gae\.values': 'va",
        ),
        (lambda g: g.edit(bind={3: FakeTrainer()}), r"has 3 where a name is due; expected bind=\{'rollout': "),
        (lambda g: g.edit(insert={"x": After(3, Whiten())}), r"does not say where; expected \{'x': After\('reward', "),
        (lambda g: g.edit(drop=3), r"edit\(drop=3\) does not name nodes; expected names: drop=\['whiten'\]\."),
        (lambda g: g.edit(drop=[["gae"]]), r"edit\(drop=\[\['gae'\]\]\) does not name nodes"),
        (lambda g: g.edit(drop={"whiten": None}), r"edit\(drop=\{'whiten': None\}\) does not name nodes"),
        (lambda g: g.edit(name=3), r"3 is no name of a graph; expected letters, digits, .* such as 'grpo'\."),
        (lambda g: g.edit(name=""), r"'' is no name of a graph"),
        (lambda g: g.edit(name="../up"), r"'\.\./up' is no name of a graph"),
        (lambda g: g.edit(name="a\nb"), r"'a\\nb' is no name of a graph"),
        (lambda g: g.edit(lag=True), r"lag=True"),
        (lambda g: g.edit(set={"gae.lam.": 1}), r"edit\(set=\{'gae\.lam\.': \.\.\.\}\) does not name a parameter"),
        (
            lambda g: g.edit(set={"batch.record": Clipped}),
            r"goes into the input 'batch', whose columns are those of the",
        ),
        (
            lambda g: g.edit(replace={"batch": Clipped()}),
            r"edit replaces the input 'batch', .* insert=\{'mine': After\('b",
        ),
        (lambda g: g.subgraph(until=3), r"subgraph\(until=3\) does not name nodes; it has batch, repeat"),
        (lambda g: g.subgraph(until=[["gae"]]), r"ppo has no node \['gae'\] to be a sink"),
    ],
)
def test_a_call_that_python_or_a_type_would_trip_over_is_refused(call: Callable[[Graph], Any], said: str) -> None:
    before = (PPO.fingerprint(), repr(PPO))
    with pytest.raises(GraphError, match=said):
        call(PPO)
    assert (PPO.fingerprint(), repr(PPO)) == before


@pytest.mark.parametrize("name", ["mine", "ppo-2", "PPO + KL 0.1", "grpo_v1.2"])
def test_names_of_graphs(name: str) -> None:
    assert PPO.edit(name=name).name == name


def test_rows_stay_apart_through_edits() -> None:
    class Keep(Operator):
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, values: c.Values) -> c.Values:
            return values

    with pytest.raises(
        PortError, match=r"gae\.values takes the batch axis of keep\.values, which was made by keep, but"
    ):
        PPO.edit(insert={"keep": After("value", Keep())})


def test_edges_parse() -> None:
    assert Edge.parse("gae.advantages") == Edge("gae", "advantages")
    assert str(Edge("gae", "advantages")) == "gae.advantages"
