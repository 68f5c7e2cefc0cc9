"""`edit(allow=...)`: a graph may violate a rule for a stated reason, which diffs, pictures and files show."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import flowrl
from flowrl.core.operators.roles import Role
from flowrl.draw.svg import svg
from flowrl.errors import GraphError
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.rules import check as rules
from tests.support.command_line import Command
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.kernel import exact
from tests.support.runs import described, train

WHY = "greedy on purpose: the warm-up has one response"


def greedy() -> Graph:
    return ppo(exact, temperature=0.0)


def allowed() -> Graph:
    return greedy().edit(allow={"FR007": WHY})


def test_allowed_rule_gives_an_allowance_and_no_finding() -> None:
    assert [finding.rule for finding in greedy().check()] == ["FR007"]
    assert allowed().check() == []
    [allowance] = allowed().allowances()
    assert (allowance.rule, allowance.reason) == ("FR007", WHY)
    assert [finding.node for finding in allowance.findings] == ["generate"]
    assert str(allowance) == f"FR007 generate: allowed ({WHY})."


def test_allowance_covers_no_other_rule() -> None:
    graph = grpo(exact, n=1, temperature=0.0).edit(allow={"FR007": WHY})
    assert [finding.rule for finding in graph.check()] == ["FR003"]
    with raises("rule.violated", rules=("FR003",)):
        rules.require(graph)


def test_allowance_of_a_node_covers_no_other_node() -> None:
    both = ppo(exact, mini_batch=3)
    assert [(f.rule, f.node) for f in both.check(prompts=4)] == [("FR004", "update_critic"), ("FR004", "update_actor")]
    one = both.edit(allow={"FR004 update_critic": WHY})
    assert [(f.rule, f.node) for f in one.check(prompts=4)] == [("FR004", "update_actor")]
    [allowance] = one.allowances(prompts=4)
    assert str(allowance) == f"FR004 update_critic: allowed ({WHY})."
    assert one.allowances() == []
    assert Graph.from_dict(one.to_dict()).allow == one.allow


def test_allowance_follows_its_node() -> None:
    graph = greedy().edit(allow={"FR007 generate": WHY})
    assert graph.check() == []
    renamed = graph.edit(rename={"generate": "sample"})
    assert dict(renamed.allow) == {"FR007 sample": WHY}
    assert renamed.check() == []
    assert dict(graph.edit(allow={"FR007 generate": None}).allow) == {}
    assert dict(graph.edit(drop=["whiten"]).allow) == {"FR007 generate": WHY}
    other = grpo(exact, mini_batch=3).edit(allow={"FR004 mismatch": WHY, "FR004 ref_log_prob": WHY})
    assert dict(other.edit(drop=["mismatch"], set={"update_actor.kl": None}).allow) == {}
    assert [a.rule for a in graph.subgraph("reward").allowances()] == ["FR007 generate"]


def test_allowance_of_a_node_of_another_graph_is_refused() -> None:
    with raises("rule.invalid-allowance", rule="FR007", node="generat"):
        greedy().edit(allow={"FR007 generat": WHY})
    with raises("rule.invalid-allowance", node="sample"):
        Graph.from_dict({**greedy().to_dict(), "allow": {"FR007 sample": WHY}})


def test_unneeded_allowance_of_a_node_is_named() -> None:
    [allowance] = greedy().edit(allow={"FR007 reward": WHY}).allowances()
    assert "edit(allow={'FR007 reward': None})" in str(allowance)


def test_edits_add_and_remove_allowances() -> None:
    graph = allowed().edit(set={"generate.top_k": 5}, allow={"FR003": "one answer"})
    assert dict(graph.allow) == {"FR007": WHY, "FR003": "one answer"}
    assert dict(graph.edit(allow={"FR007": None, "FR003": "another"}).allow) == {"FR003": "another"}
    assert dict(graph.subgraph("reward").allow) == dict(graph.allow)
    assert dict(greedy().allow) == {}


def test_unused_allowance_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    graph = allowed().edit(set={"generate.temperature": 1.0})
    assert graph.check() == []
    [allowance] = graph.allowances()
    assert str(allowance) == (
        f"FR007 is allowed ({WHY}), but nothing violates it. Remove the allowance: edit(allow={{'FR007': None}})."
    )
    with caplog.at_level(logging.WARNING):
        rules.require(allowed())
        assert caplog.messages == []
        rules.require(graph)
    assert caplog.messages == [f"ppo: {allowance}"]


def test_allowance_of_a_rule_over_prompts_needs_their_number() -> None:
    graph = grpo(exact, n=8, mini_batch=12).edit(allow={"FR004": "the last one is smaller"})
    assert graph.allowances() == []
    assert [len(allowance.findings) for allowance in graph.allowances(prompts=4)] == [1]
    assert [len(allowance.findings) for allowance in graph.allowances(prompts=3)] == [0]


@pytest.mark.parametrize(
    ("allow", "message"),
    [
        ({"fr007": "why"}, r"'fr007'; rules are FR001, .*did you mean 'FR007'\? \[rule.invalid-allowance\]"),
        ({"greedy": "why"}, r"'greedy'; .*\[rule.invalid-allowance\]"),
        ({"FR035": "why"}, r"'FR035'; it is retired, so remove it. \[rule.invalid-allowance\]"),
        ({"FR007": ""}, r"FR007 for the reason ''. .*\[rule.invalid-allowance\]"),
        ({"FR007": " "}, r"for the reason ' '. .*\[rule.invalid-allowance\]"),
        ({"FR007": True}, r"for the reason True. .*\[rule.invalid-allowance\]"),
        (["FR007"], r"edit\(allow=\['FR007'\]\) is not a mapping\. .* allow=\{'FR007': 'greedy"),
        ("FR007", r"edit\(allow='FR007'\) is not a mapping"),
        ({7: "why"}, r"has 7 instead of a name"),
    ],
)
def test_invalid_allowance_is_refused(allow: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        greedy().edit(allow=allow)  # type: ignore[arg-type]


def test_diff_shows_allowances() -> None:
    assert str(greedy().diff(allowed())).splitlines()[1:] == [f"~ allow FR007: refused -> {WHY!r}"]
    changed = allowed().diff(allowed().edit(allow={"FR007": "other"}))
    assert str(changed).splitlines()[1:] == [f"~ allow FR007: {WHY!r} -> 'other'"]
    assert not allowed().diff(allowed())


def test_pictures_show_allowances() -> None:
    for picture in (allowed().mermaid(), svg(allowed()), greedy().diff(allowed()).mermaid()):
        assert "allowed: FR007, greedy on purpose" in picture.replace("\n", " ")
    assert "allowed" not in greedy().mermaid()


@pytest.mark.parametrize("name", ["graph.yaml", "graph.json"])
def test_files_hold_allowances_and_the_fingerprint_ignores_them(tmp_path: Path, name: str) -> None:
    flowrl.save(allowed(), tmp_path / name)
    assert dict(flowrl.load(tmp_path / name).allow) == {"FR007": WHY}
    assert allowed().fingerprint() == greedy().fingerprint()
    assert "allow" not in greedy().to_dict()


@pytest.mark.parametrize(
    ("written", "message"), [({"FR999": "why"}, "FR999"), ({"FR007": 3}, "reason 3"), (["FR007"], "list")]
)
def test_file_with_an_invalid_allowance_is_refused(written: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph.from_dict({**json.loads(json.dumps(greedy().to_dict())), "allow": written})


def test_run_json_holds_allowances(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny).edit(
        set={"ref_log_prob.ref": Role("actor")}, allow={"FR010": "KL to the start of the step"}
    )
    train(job, prompts_file, tmp_path, steps=1)
    assert described(tmp_path)["graph"]["allow"] == {"FR010": "KL to the start of the step"}


def test_command_line_shows_allowances(command: Command, tmp_path: Path) -> None:
    flowrl.save(allowed(), tmp_path / "allowed.yaml")
    shown = command("check", "allowed.yaml")
    assert shown.code == 0
    assert f"FR007 generate: allowed ({WHY})." in shown.out
    flowrl.save(allowed().edit(set={"generate.temperature": 1.0}), tmp_path / "stale.yaml")
    shown = command("check", "stale.yaml")
    assert shown.code == 0 and "nothing violates it" in shown.out.replace("\n", " ")
