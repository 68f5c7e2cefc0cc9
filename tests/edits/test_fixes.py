"""Fixes that the errors of an edit offer: each, added to the refused edit, leads to a graph that passes the check."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import operators
from flowrl.core.graphs.after import After
from flowrl.core.operators.roles import Role
from flowrl.edits.fixes import added, spelled
from flowrl.errors import FlowrlError
from flowrl.graph import Graph
from flowrl.graphs import dapo, grpo, ppo, raft, remax
from flowrl.operators import GAE, KLLoss, KLShape, OldLogProb, OPOAdvantage, RefLogProb, Reward, Value, Whiten
from tests.support.errors import raises
from tests.support.kernel import Clipped, exact


def as_verbs(fix: object) -> dict[str, Any]:
    """The verbs of a fix, run as written."""
    return eval(f"dict({fix})", {"After": After, "Role": Role, **vars(operators)})  # type: ignore[no-any-return]


REFUSED: list[tuple[str, Graph, dict[str, Any]]] = [
    ("edit.no-source", grpo(exact, kl_coef=0.0), {"set": {"update_actor.kl": KLLoss("k3", 0.1)}}),
    ("edit.no-source", dapo(exact), {"set": {"update_actor.kl": KLLoss("k3", 0.1)}}),
    ("edit.lost-source", grpo(exact), {"drop": ["old_log_prob"], "set": {"update_actor.loss.ratio_to": "rollout"}}),
    ("edit.unread-node", ppo(exact), {"insert": {"other": After("reward", Reward(exact))}}),
    ("edit.unread-node", ppo(exact), {"insert": {"other": After("gae", GAE(lam=0.5))}}),
    ("edit.unread-node", grpo(exact), {"insert": {"ref_2": After("generate", RefLogProb())}}),
    ("edit.unread-node", grpo(exact), {"insert": {"x": After("group_advantage", OPOAdvantage())}}),
    ("graph.cycle", ppo(exact), {"wire": {"kl_shape.token_level_scores": "gae.advantages"}}),
    ("graph.type-mismatch", ppo(exact), {"wire": {"gae.values": "generate.rollout_log_probs"}}),
    ("graph.axis-mismatch", grpo(exact), {"wire": {"group_advantage.uid": "batch.uid"}}),
    ("graph.duplicate-name", ppo(exact), {"insert": {"gae": After("value", Clipped())}}),
]


@pytest.mark.parametrize(("code", "graph", "edit"), REFUSED, ids=lambda value: str(getattr(value, "name", value))[:40])
def test_offered_fix_leads_to_a_graph_that_passes_the_check(code: str, graph: Graph, edit: dict[str, Any]) -> None:
    with raises(code) as error:
        graph.edit(**edit)
    fix = error.value.facts["fix"]
    assert f"{fix}." in error.value.message
    assert graph.edit(**added(edit, as_verbs(fix))).check() == []


def test_fixes_of_further_refusals_are_offered_together() -> None:
    """The rows of the filter are the right ones, and then a reader is missing."""
    edit: dict[str, Any] = {"insert": {"x": After("update_actor", OldLogProb())}}
    both = "wire={'x.rollout': 'filter', 'mismatch.old_log_probs': 'x.old_log_probs'}"
    with raises("edit.ambiguous-source", port="rollout", fix=both):
        raft(exact).edit(**edit)
    assert raft(exact).edit(**added(edit, as_verbs(both))).check() == []


def test_second_node_of_the_same_name_is_not_offered() -> None:
    """`OldLogProb` after the prompts needs a rollout, which the graph samples later."""
    with raises("edit.no-source", fix="wire={'x.rollout.input_ids': 'node.column'}"):
        grpo(exact).edit(insert={"x": After("repeat", OldLogProb())})


@pytest.mark.parametrize(
    ("graph", "edit"),
    [
        (ppo(exact), {"insert": {"other": After("value", Value(critic=Role("second")))}}),  # nothing trains it
        (grpo(exact), {"insert": {"again": After("reward", KLShape())}}),  # FR016
        (ppo(exact), {"drop": ["generate"]}),  # nothing else samples
    ],
)
def test_fix_that_would_lead_to_a_further_refusal_is_not_offered(graph: Graph, edit: dict[str, Any]) -> None:
    with pytest.raises(FlowrlError) as error:
        graph.edit(**edit)
    assert "node." in str(error.value.facts["fix"]), "a placeholder"


def test_hint_that_does_not_fix_is_not_offered() -> None:
    """The mask has the right type, but the update then has two other mistakes."""
    edit: dict[str, Any] = {"wire": {"generate.prompts.prompts": "repeat.uid"}, "lag": 1}
    with raises("graph.type-mismatch") as error:
        remax(exact).edit(**edit)
    assert isinstance(error.value, TypeError)
    assert "did you mean" not in error.value.message and "'node.column'" in error.value.message


def test_names_to_drop_may_be_an_iterator() -> None:
    with raises("edit.lost-source", fix="drop=['mismatch']"):
        grpo(exact).edit(drop=iter(["old_log_prob"]), set={"update_actor.loss.ratio_to": "rollout"})


def test_fix_is_spelled_as_it_is_written() -> None:
    fix = {"insert": {"v": After("generate", Value(critic=Role("other")))}, "wire": {"gae.values": "v.values"}}
    written = "insert={'v': After('generate', Value(critic=Role('other')))}, wire={'gae.values': 'v.values'}"
    assert spelled(fix) == written
    assert as_verbs(written) == fix


def test_verbs_of_a_fix_are_added_to_those_of_the_edit() -> None:
    edit = {"drop": "whiten", "wire": {"a.x": "b.y"}, "lag": None, "insert": None}
    assert added(edit, {"drop": ["gae"], "wire": {"c.x": "b.y"}, "insert": {"v": After("b", Whiten())}}) == {
        "drop": ["whiten", "gae"],
        "wire": {"a.x": "b.y", "c.x": "b.y"},
        "lag": None,
        "insert": {"v": After("b", Whiten())},
    }
