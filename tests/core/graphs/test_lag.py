"""`Lag`: the graph that runs if weights change while requests are in flight, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import After, Graph, Lag, Reads, Role, Writes, graphs
from flowrl import columns as c
from flowrl.core.graphs.spans import spanned, swaps
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Session
from flowrl.draw import mermaid
from flowrl.errors import ParameterError
from flowrl.graphs import grpo, ppo
from flowrl.operators import Collect, Interact, RolloutCorrection, Spread, Sync, UpdateActor
from flowrl.protocols.protocols import Synced, Trainer
from flowrl.records import Receipt, Updated
from flowrl.rules.check import check
from tests.operators.engines.test_interact import Echo
from tests.support.errors import raises
from tests.support.kernel import exact, wires
from tests.support.other_policies import league, self_play, twice

ANCHORS = {"grpo": "group_advantage", "ppo": "whiten"}
GRAPHS = {"grpo": grpo(exact), "ppo": ppo(exact)}


def corrected(name: str) -> Any:
    return GRAPHS[name].edit(
        insert={"correction": After(ANCHORS[name], RolloutCorrection("token", "truncate", high=2.0))}
    )


class Ages(Operator):
    """A custom operator that reads the versions of tokens if these have their own."""

    def __call__(
        self, advantages: c.Advantages, policy_version: c.PolicyVersion, token_version: c.TokenVersion | None = None
    ) -> c.Advantages:
        return advantages * (policy_version[:, None] > 0)


@pytest.mark.parametrize("caches", ["recompute", "reuse"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_lag_appears_in_the_diff_and_wires_token_versions_at_run_time(name: str, caches: Any) -> None:
    plain, lag = corrected(name), Lag(2, spans=True, caches=caches)
    graph = plain.edit(lag=lag)
    assert str(plain.diff(graph)).splitlines()[1:] == [f"~ lag of Sync -> Generate: 0 -> {lag!r}"]
    assert check(graph) == [] and spanned(plain) is plain
    assert graph.edit(lag=Lag(1)) == graph.edit(lag=1) == plain.edit(lag=1)
    assert graph.edit(lag=0) == plain and graph.edit().edit(name="other").edit(name=plain.name) == graph
    runs = spanned(graph)
    assert wires(runs, "update_actor") == {
        **wires(graph, "update_actor"),
        "token_version": "generate.token_version",
    }
    assert [name for name, node in runs.nodes.items() if Effect.SPANS in node.effects] == swaps(graph) == ["sync"]
    sync = runs["sync"].operator
    engine = Engine()
    with Session({"actor": engine, "rollout": engine}, seed=0).active():
        for operator in (graph["sync"].operator, sync, Sync().in_place_of(sync)):
            operator.run({PortField("updated"): Updated(1)})
    assert engine.done == ["sync", caches, caches]
    drawn = [mermaid.draw(graph) for graph in (graph, plain.edit(lag=2))]
    assert '"lag 2<br/>spans"' in drawn[0] and '"lag 2"' in drawn[1] and "spans" not in drawn[1]


def test_a_lag_round_trips_through_a_file(tmp_path: Path) -> None:
    graph = corrected("grpo").edit(lag=Lag(2, spans=True, caches="reuse"))
    flowrl.save(graph, tmp_path / "graph.json")
    assert flowrl.load(tmp_path / "graph.json") == graph
    assert graph.to_dict()["lag"] == {"versions": 2, "spans": True, "caches": "reuse"}
    assert graph.edit(lag=2).to_dict()["lag"] == 2 and graph.fingerprint() != graph.edit(lag=2).fingerprint()


@pytest.mark.parametrize(
    ("written", "code"), [({"versions": 0, "spans": True}, "lag.unsupported"), ({"version": 1}, "file.malformed")]
)
def test_a_file_with_an_invalid_lag_is_refused(written: Any, code: str) -> None:
    with raises(code):
        Graph.from_dict({**corrected("grpo").to_dict(), "lag": written})


def test_versions_of_tokens_pass_through_gates() -> None:
    gate = {"collect": After("reward", Collect(Spread(), groups=2, rounds=2))}
    before = corrected("grpo").edit(insert=gate).edit(lag=Lag(1, spans=True))
    after = corrected("grpo").edit(lag=Lag(1, spans=True)).edit(insert=gate)
    for graph in (before, after):
        assert wires(spanned(graph), "update_actor")["token_version"] == "collect.token_version"
        assert check(graph) == check(spanned(graph)) == []
    two = spanned(graphs.raft(exact).edit(insert=gate).edit(lag=Lag(1, spans=True)))
    assert wires(two, "update_actor")["token_version"] == "filter.token_version"
    assert wires(two, "filter")["rows.token_version"] == "collect.token_version"


def test_episodes_have_token_versions() -> None:
    graph = corrected("grpo").edit(replace={"generate": Interact(Echo)}).edit(lag=Lag(1, spans=True))
    assert wires(spanned(graph), "update_actor")["token_version"] == "interact.token_version"


@pytest.mark.parametrize(
    ("given", "fix"),
    [((0, True), "Pass Lag(1, ...)"), ((2, False, "reuse"), "Pass Lag(2, spans=True, caches='reuse')")],
)
def test_spans_need_a_lag_and_caches_need_spans(given: Any, fix: str) -> None:
    with raises("lag.unsupported") as error:
        Lag(*given)
    assert fix in error.value.message


@pytest.mark.parametrize("versions", [-1, 1.0, True, "1"])
def test_an_invalid_number_of_versions_is_refused(versions: Any) -> None:
    with pytest.raises(ParameterError, match="versions"):
        Lag(versions)


def test_a_custom_operator_with_an_optional_port_reads_token_versions() -> None:
    graph = corrected("grpo").edit(insert={"ages": After("correction", Ages())}, lag=Lag(1, spans=True))
    assert "token_version" not in wires(graph, "ages")
    assert wires(spanned(graph), "ages")["token_version"] == "generate.token_version"


class Engine:
    """A trainer and an engine in one, at version 1, which records how weights were sent."""

    version = 1

    def __init__(self) -> None:
        self.receipt = Receipt(1, "", 0, 0.0, "memory")
        self.done: list[str] = []

    def sync(self, actor: Any) -> Receipt:
        self.done.append("sync")
        return self.receipt

    def swap(self, actor: Any, caches: str) -> Receipt:
        self.done.append(caches)
        return self.receipt


class OwnSync(Operator):
    """A sync that cannot update weights while requests are in flight."""

    actor: Reads[Trainer] = Role("actor")
    rollout: Writes[Synced] = Role("rollout")

    def __call__(self, updated: Updated) -> Receipt:
        return self.rollout.sync(self.actor)


def test_a_sync_that_cannot_swap_is_refused() -> None:
    own = corrected("grpo").edit(replace={"sync": OwnSync()})
    assert own.edit(lag=1).lag == Lag(1)
    with raises("lag.unsupported") as error:
        own.edit(lag=Lag(1, spans=True))
    assert "pass edit(lag=1)" in error.value.message


@pytest.mark.parametrize("name", ["max_staleness", "staleness_threshold", "max_head_offpolicyness"])
@pytest.mark.parametrize(
    "call",
    [
        lambda **given: UpdateActor(**given),
        lambda **given: Sync(**given),
        lambda **given: grpo(exact, **given),
        lambda **given: ppo(exact, **given),
        lambda **given: GRAPHS["grpo"].edit(**given),
        lambda **given: GRAPHS["grpo"].edit(set={f"update_actor.{key}": value for key, value in given.items()}),
    ],
    ids=["UpdateActor", "Sync", "grpo", "ppo", "edit", "set"],
)
def test_staleness_parameters_of_other_libraries_are_refused_with_the_lag_to_set(call: Any, name: str) -> None:
    with raises("lag.max-staleness", parameter=name, given=2) as error:
        call(**{name: 2})
    fix = error.value.message.split("`")[1]
    assert fix == "graph.edit(lag=Lag(2))"
    fixed = eval(fix, {"graph": GRAPHS["grpo"], "Lag": Lag})
    assert (fixed.lag, check(fixed.edit(allow={"FR006": "a test"}))) == (Lag(2), [])


def test_a_fractional_staleness_bound_is_refused_with_lag_1_as_the_fix() -> None:
    with raises("lag.max-staleness", given=0.5) as error:
        Sync(staleness_threshold=0.5)  # type: ignore[call-arg]
    assert "graph.edit(lag=Lag(1))" in error.value.message


class Bounded(Operator):
    """A custom operator with such a parameter."""

    max_staleness: int = 0

    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        return advantages


def test_a_custom_operator_may_define_max_staleness() -> None:
    assert Bounded(max_staleness=2).max_staleness == 2
    with raises("lag.max-staleness", parameter="staleness_threshold"):
        Bounded(max_staleness=2, staleness_threshold=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("graph", [self_play(), league(), twice(), graphs.remax(exact)])
def test_graphs_of_several_policies_and_samplers_have_spans(graph: Graph) -> None:
    """Each update reads the versions of the tokens that it trains on."""
    with_spans = graph.edit(lag=Lag(1, spans=True))
    runs = spanned(with_spans)
    syncs = [node for node in runs.nodes.values() if node.is_sync]
    updates = [node for node in runs.nodes.values() if isinstance(node.operator, UpdateActor)]
    assert syncs and updates and all(Effect.SPANS in node.effects for node in syncs)
    for node in updates:
        read = wires(runs, node.name)
        assert read["token_version"] == read["rollout.policy_version"].replace("policy_version", "token_version")
    assert {one.rule for one in check(with_spans)} == {one.rule for one in check(graph.edit(lag=1))}
