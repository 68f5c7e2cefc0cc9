"""Rules that users register are in one table with the built-in rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowrl import After, Operator
from flowrl import columns as c
from flowrl.core.graphs.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.rules.check import require
from flowrl.rules.rule import RULES, Findings, rule
from tests.support.errors import raises
from tests.support.kernel import exact


@pytest.fixture(autouse=True)
def _restore_rules() -> Iterator[None]:
    before = list(RULES)
    yield
    RULES[:] = before


def register(message: str, id: str = "AB001") -> None:
    """Register the same function, as a notebook cell does that runs again."""

    @rule(id, "Groups of eight need a reason.")
    def groups_of_eight(graph: Graph, prompts: int | None) -> Findings:
        if graph["repeat"].rows_factor == 8:
            yield "repeat", message


def test_user_rule_is_checked_with_the_built_in_rules() -> None:
    register("take another size.")
    graph = grpo(exact, n=8).edit(set={"generate.temperature": 0.0})
    first, second = graph.check()[:2]
    assert str(first) == "AB001 repeat: take another size."
    assert second.rule == "FR007"  # findings are in the order of rule ids
    with raises("rule.violated", rules=("AB001",), nodes=("repeat",)):
        require(grpo(exact, n=8))
    assert not grpo(exact, n=4).check()
    assert not grpo(exact, n=8).edit(allow={"AB001": "eight is fine here"}).check()


def test_rule_registered_again_replaces_itself() -> None:
    register("first.")
    register("second.")
    assert [finding.message for finding in grpo(exact, n=8).check()] == ["second."]


def test_user_rule_may_read_a_user_effect() -> None:
    class Sparse(Operator):
        @property
        def effects(self) -> frozenset[str]:
            return frozenset({"lab.sparse"})

        def __call__(self, advantages: c.Advantages) -> c.Advantages: ...

    @rule("AB001", "Sparse advantages come last.")
    def sparse_last(graph: Graph, prompts: int | None) -> Findings:
        for node in graph.nodes.values():
            if node.name == "whiten" and any("lab.sparse" in graph[read].effects for read in node.sources):
                yield node.name, "it comes after sparse advantages."

    graph = ppo(exact).edit(insert={"sparse": After("gae", Sparse())})
    assert [str(finding) for finding in graph.check()] == ["AB001 whiten: it comes after sparse advantages."]
    assert not ppo(exact).edit(insert={"sparse": After("whiten", Sparse())}).check()


def test_rule_with_a_built_in_id_is_refused() -> None:
    with raises("rule.duplicate-id", rule="FR007") as raised:
        register("never.", id="FR007")
    assert raised.value.facts["location"].endswith("test_rule.py:register.<locals>.groups_of_eight")
    assert raised.value.facts["taken_by"].endswith("updates.py:_samples")
    assert not grpo(exact, n=8).check()
