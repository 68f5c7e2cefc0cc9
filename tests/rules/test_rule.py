"""Rules of users are in one table with flowrl's own."""

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
def _no_rule_remains() -> Iterator[None]:
    before = list(RULES)
    yield
    RULES[:] = before


def enter(word: str, id: str = "AB001") -> None:
    """Register the same function, as a notebook cell does that runs again."""

    @rule(id, "Groups of eight need a reason.")
    def groups_of_eight(graph: Graph, prompts: int | None) -> Findings:
        if graph["repeat"].rows_factor == 8:
            yield "repeat", word


def test_a_rule_of_a_user_checks_with_the_others() -> None:
    enter("take another size.")
    graph = grpo(exact, n=8).edit(set={"generate.temperature": 0.0})
    first, second = graph.check()[:2]
    assert str(first) == "AB001 repeat: take another size."
    assert second.rule == "FR007"  # they are in the order of their ids
    with raises("rule.violated", rules=("AB001",), nodes=("repeat",)):
        require(grpo(exact, n=8))
    assert not grpo(exact, n=4).check()
    assert not grpo(exact, n=8).edit(allow={"AB001": "eight is fine here"}).check()


def test_a_rule_that_is_defined_again_replaces_itself() -> None:
    enter("first.")
    enter("second.")
    assert [finding.message for finding in grpo(exact, n=8).check()] == ["second."]


def test_a_rule_of_a_user_reads_an_effect_of_the_user() -> None:
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


def test_an_id_that_is_taken_is_refused() -> None:
    with raises("rule.duplicate-id", rule="FR007") as raised:
        enter("never.", id="FR007")
    assert raised.value.facts["location"].endswith("test_rule.py:enter.<locals>.groups_of_eight")
    assert raised.value.facts["taken_by"].endswith("updates.py:_samples")
    assert not grpo(exact, n=8).check()
