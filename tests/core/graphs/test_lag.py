"""`Lag`: what `edit(lag=Lag(...))` makes of a graph, and what is refused where weights change under answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import After, Graph, Lag, Reads, Role, Writes, graphs
from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.draw import mermaid
from flowrl.errors import GraphError, ParameterError
from flowrl.graphs import grpo, ppo
from flowrl.operators import Collect, Interact, RolloutCorrection, Spread, UpdateActor
from flowrl.protocols.protocols import Synced, Trainer
from flowrl.records import Receipt, Updated
from flowrl.rules.check import check
from tests.operators.engines.test_interact import Echo
from tests.support.kernel import exact, wires
from tests.support.other_policies import league, self_play, twice

BEHIND = {"grpo": "group_advantage", "ppo": "whiten"}
GRAPHS = {"grpo": grpo(exact), "ppo": ppo(exact)}


def corrected(name: str) -> Any:
    return GRAPHS[name].edit(
        insert={"correction": After(BEHIND[name], RolloutCorrection("token", "truncate", high=2.0))}
    )


class Ages(Operator):
    """An operator of one's own, which wants one version a row."""

    def __call__(self, advantages: c.Advantages, policy_version: c.PolicyVersion) -> c.Advantages:
        return advantages * (policy_version[:, None] > 0)


class TokenAges(Operator):
    """One that looks at the tokens."""

    def __call__(
        self, advantages: c.Advantages, policy_version: c.PolicyVersion, token_version: c.TokenVersion
    ) -> c.Advantages:
        return advantages * (token_version >= policy_version[:, None])


@pytest.mark.parametrize("caches", ["recompute", "reuse"])
@pytest.mark.parametrize("name", GRAPHS)
def test_an_edit_says_it_of_the_sync_and_the_update(name: str, caches: Any) -> None:
    plain = corrected(name)
    spanned = plain.edit(lag=Lag(2, spans=True, caches=caches))
    assert str(plain.diff(spanned)).splitlines()[1:] == [
        "~ update_actor.spans: False -> True",
        "~ update_actor <- token_version: unwired -> generate.token_version",
        f"~ sync.caches: None -> {caches!r}",
        "~ lag of Sync -> Generate: 0 -> 2",
    ]
    assert check(spanned) == []
    assert spanned.edit(lag=Lag(1)) == spanned.edit(lag=1) == plain.edit(lag=1)
    assert spanned.edit(lag=0) == plain and spanned.edit().edit(name="other").edit(name=plain.name) == spanned
    drawn = [mermaid.draw(graph) for graph in (spanned, plain.edit(lag=2))]
    assert '"lag 2<br/>spans"' in drawn[0] and '"lag 2"' in drawn[1] and "spans" not in drawn[1]


def test_a_file_holds_it(tmp_path: Path) -> None:
    spanned = corrected("grpo").edit(lag=Lag(2, spans=True, caches="reuse"))
    flowrl.save(spanned, tmp_path / "graph.json")
    assert flowrl.load(tmp_path / "graph.json") == spanned


def test_versions_of_tokens_pass_through_gates() -> None:
    gate = {"collect": After("reward", Collect(Spread(), groups=2, rounds=2))}
    before = corrected("grpo").edit(insert=gate).edit(lag=Lag(1, spans=True))
    after = corrected("grpo").edit(lag=Lag(1, spans=True)).edit(insert=gate)
    for graph in (before, after):
        assert wires(graph, "update_actor")["token_version"] == "collect.token_version"
        assert check(graph) == []


def test_episodes_have_them_too() -> None:
    graph = corrected("grpo").edit(replace={"generate": Interact(Echo)}).edit(lag=Lag(1, spans=True))
    assert wires(graph, "update_actor")["token_version"] == "interact.token_version"


@pytest.mark.parametrize(
    ("given", "words"), [((0, True), r"Lag\(0, spans=True\) has nothing"), ((2, False, "reuse"), "caches='reuse'")]
)
def test_a_lag_that_says_nothing_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Lag(*given)


@pytest.mark.parametrize("versions", [-1, 1.0, True, "1"])
def test_a_lag_counts_versions(versions: Any) -> None:
    with pytest.raises(ParameterError, match="versions"):
        Lag(versions)


def test_nothing_that_wants_one_version_a_row_is_left_alone() -> None:
    spanned = corrected("grpo").edit(lag=Lag(1, spans=True))
    found = check(spanned.edit(insert={"ages": After("correction", Ages())}))
    assert [(one.rule, one.node) for one in found] == [("FR040", "ages")]
    assert "its policy_version is one version a row, and sync changes weights" in found[0].message
    assert "expected it to read token_version, too, or edit(lag=1)" in found[0].message
    assert check(spanned.edit(insert={"ages": After("correction", TokenAges())})) == []
    assert check(corrected("grpo").edit(lag=1, insert={"ages": After("correction", Ages())})) == []
    by_hand = check(spanned.edit(set={"update_actor.spans": False}))
    assert [(one.rule, one.node) for one in by_hand] == [("FR040", "update_actor")]
    assert "edit(set={'update_actor.spans': True})" in by_hand[0].message


class OwnSync(Operator):
    """One that knows nothing of answers under way."""

    actor: Reads[Trainer] = Role("actor")
    rollout: Writes[Synced] = Role("rollout")

    def __call__(self, updated: Updated) -> Receipt:
        return self.rollout.sync(self.actor)


def test_a_sync_that_cannot_swap_is_refused() -> None:
    own = corrected("grpo").edit(replace={"sync": OwnSync()})
    assert own.edit(lag=1).lag == 1
    with pytest.raises(GraphError, match=r"spans=True.* lets .*, and grpo has no node that could.*edit\(lag=1\)"):
        own.edit(lag=Lag(1, spans=True))


@pytest.mark.parametrize("graph", [self_play(), league(), twice(), graphs.remax(exact)])
def test_graphs_of_several_policies_and_samplers_have_spans(graph: Graph) -> None:
    """Each update reads the versions of the very tokens that it trains on."""
    spanned = graph.edit(lag=Lag(1, spans=True))
    syncs = [node for node in spanned.nodes.values() if node.is_sync]
    updates = [node for node in spanned.nodes.values() if isinstance(node.operator, UpdateActor)]
    assert syncs and updates and all(node.operator.caches == "recompute" for node in syncs)  # type: ignore[attr-defined]
    for node in updates:
        read = wires(spanned, node.name)
        assert read["token_version"] == read["rollout.policy_version"].replace("policy_version", "token_version")
    assert {one.rule for one in check(spanned)} == {one.rule for one in check(graph.edit(lag=1))}
