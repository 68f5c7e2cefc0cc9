"""`Graph.edit`: random sequences of edits give valid graphs or are refused."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.errors import FlowrlError
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.operators import (
    GAE,
    Generate,
    GroupAdvantage,
    KLLoss,
    KLShape,
    Repeat,
    Reward,
    UpdateActor,
    Whiten,
)
from tests.nightly import examples
from tests.support.kernel import (
    PPO,
    Clip,
    Clipped,
    LengthPenalty,
    Mix,
    Waits,
    exact,
    scored,
    two_rewards,
)

# ---------------------------------------------------------------------------------------------------- random sequences

REPLACEMENTS: list[tuple[str, Operator]] = [
    ("gae", GAE(lam=0.5)),
    ("gae", GroupAdvantage()),
    ("gae", GAE().named("gae_2")),
    ("repeat", Repeat(4)),
    ("generate", Generate(0.7)),
    ("kl_shape", KLShape(0.1)),
    ("reward", Reward(exact, timeout=2.0)),
    ("update_actor", UpdateActor(kl=KLLoss("k2", 0.1))),
    ("whiten", Whiten(False)),
    ("mix", LengthPenalty()),
    ("mix", Mix(0.1)),
]


@st.composite
def verbs(draw: st.DrawFn, graph: Graph) -> dict[str, Any]:
    """Sample verbs that name nodes of the graph; `edit` decides whether they are valid."""
    names = st.sampled_from(sorted(graph.nodes))
    chosen: dict[str, Any] = {}
    fitting = [(n, op) for n, op in REPLACEMENTS if n in graph]
    if fitting and draw(st.booleans()):
        chosen["replace"] = dict([draw(st.sampled_from(fitting))])
    if draw(st.booleans()):
        chosen["drop"] = draw(st.lists(names, max_size=2, unique=True))
    if draw(st.booleans()):
        new_name = draw(st.sampled_from(["x", "y", "z"]))
        inserted = draw(st.sampled_from([Clip(), LengthPenalty(), Clipped(), Waits(), Whiten()]))
        chosen["insert"] = {new_name: After(draw(names), inserted)}
    if draw(st.booleans()):
        chosen["rename"] = {draw(names): draw(st.sampled_from(["r", "s", "t"]))}
    if draw(st.booleans()):
        ports = sorted(f"{n}.{field}" for n in graph.nodes for field in graph[n].inputs)
        chosen["wire"] = {draw(st.sampled_from(ports)): str(draw(st.sampled_from(sorted(graph.types))))}
    if draw(st.booleans()):
        chosen["lag"] = draw(st.integers(0, 2))
    return chosen


def invariants(graph: Graph) -> None:
    """Assert what is true of every graph."""
    visited: set[str] = set()
    for name, node in graph.nodes.items():
        assert node.name == name == node.operator.name
        assert set(node.sources) <= visited, "nodes are in topological order"
        visited.add(name)
        for field, edge in node.inputs.items():
            assert field in node.operator.signature.fields
            assert edge in graph.types
    reached = set(graph.sinks).union(*(graph.ancestors(sink) for sink in graph.sinks))
    assert reached == set(graph.nodes), "a graph is exactly what its sinks reach"
    assert graph.lag.versions == 0 or graph.back_edges
    restored = Graph.from_dict(graph.to_dict())
    assert restored == graph
    assert restored.fingerprint() == graph.fingerprint()
    assert graph.edit() == graph


@examples(40)
@given(st.data())
def test_random_edits_give_a_valid_graph_or_are_refused(data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from([PPO, grpo(exact), two_rewards(), scored()]))
    accepted = 0
    for _ in range(4):
        chosen = data.draw(verbs(graph))
        before = graph.fingerprint()
        try:
            edited = graph.edit(**chosen)
        except FlowrlError as error:
            assert error.message.endswith((".", "?")), f"{error} is not a sentence"
            assert "\n" not in str(error)
            assert graph.fingerprint() == before
            continue
        accepted += 1
        invariants(edited)
        assert graph.fingerprint() == before
        assert bool(graph.diff(edited)) == (edited.fingerprint() != before)
        graph = edited
    assume(accepted)
