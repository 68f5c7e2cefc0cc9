"""Tests of `graph.py`, `flowrl/graph.py` and `flowrl/protocols/backend.py`: graphs are immutable.

They cover the nodes that a graph reaches, and their order.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.graphs.graph import Node, Use
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.draw.svg import svg
from flowrl.errors import BindError
from flowrl.graph import Graph, algorithm
from flowrl.graphs import ppo
from flowrl.operators import GAE, Generate, OldLogProb, Value
from flowrl.protocols.protocols import Synced, Trainer
from flowrl.records import PromptBatch
from tests.support.errors import raises
from tests.support.kernel import (
    BINDINGS,
    FakeCritic,
    FakeRollout,
    FakeTrainer,
    TrainerEngine,
    exact,
    scored,
    two_rewards,
)


class Seed(NamedTuple):
    """One column."""

    values: c.Values


class One(Operator):
    """One in, one out."""

    scale: float = 1.0

    def __call__(self, values: c.Values) -> c.Values:
        return values * self.scale


class Two(Operator):
    """Two in, one out."""

    def __call__(self, left: c.Values, right: c.Values) -> c.Values:
        return left + right


def one(name: str, value: Any) -> Any:
    return One().named(name)(value)


def two(name: str, left: Any, right: Any) -> Any:
    return Two().named(name)(left, right)


def _chain(v: Any) -> Any:
    return one("c", one("b", one("a", v)))


def _diamond(v: Any) -> Any:
    a = one("a", v)
    return two("d", one("b", a), one("c", a))


def _dead(v: Any) -> Any:
    a = one("a", v)
    one("dead", one("dying", a))
    return a


def _two_sinks(v: Any) -> Any:
    a = one("a", v)
    return one("b", a), one("c", a)


def _inner_sink(v: Any) -> Any:
    a = one("a", v)
    return a, one("b", a)


def _same_twice(v: Any) -> Any:
    a = one("a", v)
    return two("b", a, a), None


def _ladder(v: Any) -> Any:
    left, right = one("l0", v), one("r0", v)
    for i in (1, 2):
        left, right = two(f"l{i}", left, right), two(f"r{i}", right, left)
    return left


SHAPES: dict[str, tuple[Callable[[Any], Any], list[str], list[tuple[str, str]], tuple[str, ...]]] = {
    "one node": (lambda v: one("a", v), ["a"], [("seed", "a")], ("a",)),
    "chain": (_chain, ["a", "b", "c"], [("seed", "a"), ("a", "b"), ("b", "c")], ("c",)),
    "diamond": (
        _diamond,
        ["a", "b", "c", "d"],
        [("seed", "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")],
        ("d",),
    ),
    "dead branch": (_dead, ["a"], [("seed", "a")], ("a",)),
    "two sinks": (_two_sinks, ["a", "b", "c"], [("seed", "a"), ("a", "b"), ("a", "c")], ("b", "c")),
    "a sink that is read": (_inner_sink, ["a", "b"], [("seed", "a"), ("a", "b")], ("a", "b")),
    "one output to two ports": (_same_twice, ["a", "b"], [("seed", "a"), ("a", "b")], ("b",)),
    "ladder": (
        _ladder,
        ["l0", "r0", "l1", "r1", "l2"],
        [
            ("seed", "l0"),
            ("seed", "r0"),
            ("l0", "l1"),
            ("r0", "l1"),
            ("r0", "r1"),
            ("l0", "r1"),
            ("l1", "l2"),
            ("r1", "l2"),
        ],
        ("l2",),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_of_various_shapes_have_the_expected_nodes_edges_and_sinks(shape: str) -> None:
    body, nodes, edges, sinks = SHAPES[shape]

    @algorithm
    def traced(seed: Seed) -> Any:
        return body(seed.values)

    graph = traced()
    assert list(graph.nodes) == ["seed", *nodes]
    assert set(graph.network.edges) == set(edges)
    assert graph.sinks == sinks
    order = {name: i for i, name in enumerate(graph.nodes)}
    assert all(order[a] < order[b] for a, b in graph.network.edges)
    for name in nodes:
        expected = nx.ancestors(nx.DiGraph(edges), name)
        assert graph.ancestors(name) == expected
        part = graph.subgraph(until=name)
        assert set(part.nodes) == expected | {name}
        assert part.sinks == (name,)
    assert Graph.from_dict(graph.to_dict()) == graph


def test_ppo_has_these_nodes_and_edges() -> None:
    graph = ppo(exact)
    assert list(graph.nodes) == [
        "batch", "repeat", "generate", "old_log_prob", "mismatch", "ref_log_prob", "value", "reward", "kl_shape", "gae",
        "whiten", "update_critic", "update_actor", "sync",
    ]  # fmt: skip
    assert graph.sinks == ("sync", "update_critic", "mismatch")
    assert graph.back_edges == [("sync", "generate")]
    assert {role: [(u.node, u.mode) for u in uses] for role, uses in graph.roles().items()} == {
        "rollout": [("generate", "reads"), ("sync", "writes")],
        "actor": [("old_log_prob", "reads"), ("update_actor", "writes"), ("sync", "reads")],
        "ref": [("ref_log_prob", "reads")],
        "critic": [("value", "reads"), ("update_critic", "writes")],
    }


def test_a_lookup_of_an_unknown_node_names_the_known_ones() -> None:
    graph = scored()
    assert "reward" in graph
    assert "value" not in graph
    assert graph["reward"].name == "reward"
    with raises("graph.unknown-node", node="rewrad") as error:
        graph["rewrad"]
    assert error.value.message == (
        "The graph scored has no node 'rewrad'; it has batch, repeat, generate, reward; did you mean 'reward'?"
    )
    with raises("graph.unknown-node", node="generat"):
        graph.subgraph(until="generat")
    with raises("graph.unknown-node", node="value"):
        graph.subgraph(until=["reward", "value"])
    with raises("graph.unknown-node", node="value"):
        graph.ancestors("value")


def test_the_uses_of_roles_by_a_node() -> None:
    graph = ppo(exact)
    assert graph["sync"].uses == (
        Use("sync", "actor", "actor", "reads", Trainer),
        Use("sync", "rollout", "rollout", "writes", Synced),
    )
    assert (graph["sync"].reads, graph["sync"].writes, graph["sync"].roles) == (
        ["actor"], ["rollout"], ["rollout", "actor"]
    )  # fmt: skip
    assert (graph["sync"].home, graph["sync"].is_sync) == ("rollout", True)
    assert (graph["gae"].uses, graph["gae"].roles, graph["gae"].home, graph["gae"].is_sync) == ((), [], None, False)
    assert (graph["value"].home, graph["value"].is_sync) == ("critic", False)


OLD = OldLogProb(actor=TrainerEngine())


@algorithm
def with_a_live_engine(batch: PromptBatch) -> Any:
    return OLD(Generate()(batch))


@pytest.mark.parametrize(
    "make",
    [
        with_a_live_engine,  # so there is nothing to check, plan, draw, compare, bind or write
        lambda: ppo(exact).edit(replace={"old_log_prob": OLD}),
        lambda: ppo(exact).edit(set={"old_log_prob.actor": TrainerEngine()}),
        lambda: ppo(exact).edit(
            insert={"old_log_prob_2nd": After("old_log_prob", OLD)},
            wire={"kl_shape.old_log_probs": "old_log_prob_2nd.old_log_probs"},
        ),
        lambda: Graph.build("one", {"old_log_prob": Node("old_log_prob", OLD, {})}, ["old_log_prob"]),
    ],
    ids=["trace", "replace", "set", "insert", "build"],
)
def test_a_live_engine_in_a_graph_is_refused(make: Callable[[], Any]) -> None:
    """It is for calls on tensors, so no graph can be made with one."""
    with raises("graph.live-engine", field="actor") as error:
        make()
    assert "OldLogProb(actor=Role('actor')), and bind the role: graph.bind(actor=...)" in error.value.message


def test_a_subgraph_keeps_only_the_bindings_it_uses() -> None:
    graph = ppo(exact).edit(bind=BINDINGS, lag=1)
    part = graph.subgraph(until="reward")
    assert set(part.bindings) == {"rollout"}
    assert part.lag.versions == 0
    assert part.subgraph(until="reward") == part
    assert Graph.from_dict(part.to_dict()) == part
    assert graph.subgraph(until=["sync", "value"]).lag.versions == 1
    assert graph.subgraph(until=("old_log_prob", "value")).sinks == ("old_log_prob", "value")
    with raises("graph.no-sink"):
        graph.subgraph(until=())


def nodes_of(*wires: tuple[str, str]) -> dict[str, Node]:
    sources = dict.fromkeys((name for wire in wires for name in wire), "seed") | {b: a for a, b in wires}
    return {
        name: Node(name, One().named(name), {PortField("values"): Edge(a, "values")}) for name, a in sources.items()
    }


def test_a_cycle_is_named() -> None:
    with raises("graph.cycle", nodes=("b", "c", "d")):
        Graph.build("loop", nodes_of(("b", "c"), ("c", "d"), ("d", "b")), ["d"])
    with raises("graph.cycle", nodes=("b",)):
        Graph.build("loop", nodes_of(("b", "b")), ["b"])


def test_a_cycle_that_no_sink_reaches_is_pruned() -> None:
    loop = nodes_of(("b", "c"), ("c", "b"))
    assert "b" not in Graph.build("g", {**scored().nodes, **loop}, ["reward"])


@pytest.mark.parametrize(
    ("nodes", "sinks", "code", "facts"),
    [
        ({}, [], "graph.no-sink", {}),
        (
            {"b": Node("b", One(), {PortField("values"): Edge("a", "values")})},
            ["b"],
            "graph.unknown-output",
            {"node": "b", "output": "a.values"},
        ),
        (
            {**scored().nodes, "b": Node("b", One(), {PortField("values"): Edge("reward", "values")})},
            ["b"],
            "graph.unknown-output",
            {"node": "b", "output": "reward.values"},
        ),
        (scored().nodes, ["value"], "graph.unknown-node", {"node": "value"}),
    ],
)
def test_malformed_nodes_and_sinks_are_refused(
    nodes: dict[str, Node], sinks: list[str], code: str, facts: dict[str, str]
) -> None:
    with raises(code, **facts):
        Graph.build("g", nodes, sinks)


@pytest.mark.parametrize("lag", [-1, 1.0, True, "1"])
def test_a_lag_that_is_not_a_count_is_refused(lag: Any) -> None:
    with raises("lag.not-a-count", graph="ppo", given=lag):
        ppo(exact).edit(lag=lag)
    with raises("lag.unsupported", lag="2"):
        scored().edit(lag=2)


def test_graphs_are_immutable() -> None:
    graph = scored().edit(bind={"rollout": FakeRollout()})
    before = graph.fingerprint()
    with pytest.raises(FrozenInstanceError):
        graph.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        graph.nodes["reward"] = graph["generate"]  # type: ignore[index]
    with pytest.raises(TypeError):
        del graph["reward"].inputs[PortField("prompts", "ground_truth")]  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        graph.bindings["rollout"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        graph.types[Edge("reward", "token_level_scores")] = None  # type: ignore[index]
    with pytest.raises(nx.NetworkXError):
        graph.network.remove_node("reward")
    assert graph.fingerprint() == before


def test_the_networkx_view_carries_operators_and_fields() -> None:
    network = two_rewards().network
    assert isinstance(network, nx.DiGraph)
    assert network.name == "two_rewards"
    assert network.nodes["mix"]["operator"].weight == 0.5
    assert network.edges["second", "mix"]["fields"] == {PortField("second"): Edge("second", "token_level_scores")}
    assert nx.is_directed_acyclic_graph(network)
    generations = [sorted(names) for names in nx.topological_generations(network)]
    assert generations == [["batch"], ["repeat"], ["generate"], ["first", "second"], ["mix"]]


def test_the_fingerprint_depends_only_on_what_is_computed() -> None:
    graph = ppo(exact)
    same = {
        "traced again": ppo(exact),
        "another name": graph.edit(name="mine"),
        "sinks the other way": Graph.build("ppo", graph.nodes, graph.sinks[::-1]),
        "nodes in another order": Graph.build("ppo", dict(reversed(graph.nodes.items())), graph.sinks),
        "an int for a float": ppo(exact, gamma=1),
    }
    other = {
        "a parameter": ppo(exact, lam=0.9),
        "a nested parameter": ppo(exact, clip=0.1),
        "a function": ppo(lambda **row: 0.0),
        "another function": ppo(lambda **row: 1.0),
        "a node's name": graph.edit(rename={"gae": "gae_long"}),
        "a lag": graph.edit(lag=1),
        "a binding": graph.edit(bind={"ref": FakeTrainer()}),
        "another binding": graph.edit(bind={"ref": FakeTrainer(lr=1.0)}),
        "a wire": graph.edit(wire={"update_actor.advantages": "gae.advantages"}),
        "a sink less": graph.edit(drop=["update_critic"]),
    }
    prints = {name: g.fingerprint() for name, g in {**same, **other}.items()}
    assert {prints[name] for name in same} == {graph.fingerprint()}
    assert len({graph.fingerprint(), *(prints[name] for name in other)}) == len(other) + 1
    assert len(graph.fingerprint()) == 32
    assert int(graph.fingerprint(), 16)


MODULE = """
from typing import Any, NamedTuple
from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.graph import algorithm


class Batch(NamedTuple):
    values: c.Values


def double(value): return 2 * value


class Mapped(Operator):
    names: dict[str, int]
    fn: Any = double
    def __call__(self, values: c.Values) -> c.Values: ...


@algorithm
def mapped(batch: Batch): return Mapped(names={"one": 1, "two": 2, "three": 3})(batch.values)
"""


def test_the_fingerprint_is_the_same_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fingerprinted.py").write_text(MODULE)
    code = "import fingerprinted; print(fingerprinted.mapped().fingerprint())"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert out.stdout.strip() == importlib.import_module("fingerprinted").mapped().fingerprint()


def test_repr_lists_nodes_and_jupyter_shows_mermaid() -> None:
    graph = scored()
    lines = repr(graph).splitlines()
    assert lines[0] == "scored: 4 nodes -> reward"
    assert lines[1].split() == ["batch", "Input(PromptBatch)"]
    assert lines[2].split() == ["repeat", "Repeat(n=2)", "<-", "batch"]
    assert graph._repr_mimebundle_() == {"text/plain": repr(graph), "image/svg+xml": svg(graph)}


def test_graphs_are_equal_by_value() -> None:
    assert ppo(exact) == ppo(exact) != ppo(exact, n=2)
    assert scored().edit(bind={"rollout": FakeRollout()}) != scored()


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ({"rolout": FakeRollout()}, r"has no role 'rolout' .*did you mean 'rollout'\? .* \[graph.unknown-role\]"),
        ({"rollout": object()}, r"The role 'rollout' is bound to <object .*>, which is not a backend"),
        (
            {"rollout": FakeTrainer()},
            r"'rollout' is bound to FakeTrainer, but generate needs a Rollout there\. .* lacks generate, receipt",
        ),
        ({"critic": FakeTrainer()}, r"'critic' is bound to FakeTrainer, but value needs a Critic there.*lacks values"),
        (
            {"actor": FakeCritic()},
            r"'actor' is bound to FakeCritic, but old_log_prob needs a Scorer there.* lacks log_probs",
        ),
    ],
)
def test_unsuitable_backends_are_refused_before_anything_loads(bindings: dict[str, Any], message: str) -> None:
    with pytest.raises(BindError, match=message):
        ppo(exact).edit(bind=bindings)
    with pytest.raises(BindError, match=message):
        ppo(exact).bind(**bindings)


def test_bind_adds_backends_and_changes_no_node() -> None:
    graph = ppo(exact).edit(bind={"actor": BINDINGS["actor"]})
    job = graph.bind(**{role: backend for role, backend in BINDINGS.items() if role != "actor"})
    assert job.graph.nodes is graph.nodes and job.graph.bindings == BINDINGS


def test_a_reference_may_be_a_trainer_but_an_actor_no_scorer() -> None:
    assert ppo(exact).edit(bind=BINDINGS).bindings == BINDINGS
    graph = ppo(exact)
    assert graph.edit(replace={"gae": GAE(lam=0.9)})["gae"].operator == GAE(lam=0.9)
    assert graph.edit(replace={"generate": Generate(0.5)})["generate"].operator == Generate(0.5)
    assert graph.edit(replace={"value": Value()}) == graph
