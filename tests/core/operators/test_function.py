"""`@operator`: a function works as an operator wherever a class does."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from pydantic import Field

import flowrl
from flowrl import INJECTED, After, Key, Metrics, Reads, Role
from flowrl import columns as c
from flowrl.core.operators.function import function_of, operator
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.session import Session
from flowrl.errors import DefinitionError, GraphError
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import Whiten
from flowrl.protocols.protocols import Scorer
from flowrl.records import Sequences
from flowrl.references import source_hash
from tests import ROOT
from tests.support.errors import raises
from tests.support.kernel import answers, exact


class Masked(NamedTuple):
    """Two columns."""

    advantages: c.Advantages
    response_mask: c.ResponseMask


@operator
def half(advantages: c.Advantages) -> c.Advantages:
    """Half as much."""
    return advantages * 0.5


@operator
def scaled(advantages: c.Advantages, *, factor: float = Field(0.5, gt=0), metrics: Metrics = INJECTED) -> c.Advantages:
    """Times `factor`."""
    metrics.mean("scaled/factor", factor)
    return advantages * factor


@operator
def noisy(advantages: c.Advantages, response_mask: c.ResponseMask | None = None, key: Key = INJECTED) -> c.Advantages:
    """With noise, on the mask if there is one."""
    noise = torch.rand(advantages.shape, generator=key.generator())
    return advantages + (noise if response_mask is None else noise * response_mask)


@operator
def judged(rollout: Sequences, *, judge: Reads[Scorer] = Role("judge")) -> c.RefLogProbs:  # noqa: B008
    """By a role."""
    return judge.log_probs(rollout)


ONES = torch.ones(1, 3)


def test_a_function_operator_computes_like_its_function() -> None:
    assert half(ONES).tolist() == [[0.5] * 3]
    assert half(advantages=ONES).tolist() == [[0.5] * 3]
    assert scaled(ONES).tolist() == [[0.5] * 3]
    assert scaled(factor=2.0)(ONES).tolist() == [[2.0] * 3]
    assert scaled(factor=2.0)(factor=3.0)(ONES).tolist() == [[3.0] * 3]
    session = Session({}, seed=3)
    with session.active():
        scaled(factor=2.0)(ONES)
        first, second = noisy(ONES), noisy(ONES, ONES.bool())
    assert session.all_metrics()["scaled/factor"].compute() == 2.0
    assert torch.equal(first, second) and not torch.equal(first, ONES)


def test_a_function_operator_has_name_repr_equality_and_parameters() -> None:
    assert isinstance(half, Operator) and (half.name, repr(half), half.__doc__) == ("half", "half", "Half as much.")
    assert repr(scaled(factor=2.0)) == "scaled(factor=2.0)" == repr(scaled(factor=2.0).named("other"))
    assert scaled(factor=0.5) == scaled != scaled(factor=2.0)
    assert scaled.named("other")(factor=2.0).name == "other"
    assert list(noisy.signature.ports) == ["advantages", "response_mask"] and noisy.signature.injected == {"key": Key}
    assert judged.role_uses["judge"].protocol is Scorer
    with raises("session.no-job", node="judged", missing="role", role="judge"):
        judged(answers())


def test_a_function_operator_works_in_graphs_edits_diffs_and_pictures() -> None:
    @algorithm
    def both(row: Masked) -> Any:
        white = Whiten()(half(row.advantages), row.response_mask)
        return scaled(factor=2.0).named("twice")(white)

    assert repr(both()["twice"].operator) == "scaled(factor=2.0)"
    row = Masked(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2).bool())
    torch.testing.assert_close(both.step(row), torch.tensor([[-2.0, 2.0]]) / 2**0.5, atol=1e-6, rtol=0)

    graph = ppo(exact)
    edited = graph.edit(replace={"whiten": half}, insert={"scaled": After("gae", scaled(factor=2.0))})
    assert edited["scaled"].sources == ["gae"] and edited["half"].sources == ["scaled"]
    assert (
        "half" in edited["update_actor"].sources and edited["update_critic"].sources == graph["update_critic"].sources
    )
    found = str(graph.diff(edited)).splitlines()
    assert "+ scaled: scaled(factor=2.0)  <- gae" in found and "+ half: half  <- scaled" in found
    assert str(edited.diff(edited.edit(set={"scaled.factor": 3.0}))).splitlines()[1] == "~ scaled.factor: 2.0 -> 3.0"
    assert "factor=2.0" in edited.mermaid() and 'half["' in edited.mermaid()


def test_roles_types_and_effects_are_checked_as_those_of_a_class() -> None:
    """A graph of functions is checked and bound by roles and types as one of classes."""
    graph = grpo(exact).edit(replace={"ref_log_prob": judged})
    assert {"judge", "actor", "rollout"} == set(graph.roles()) and graph.check() == []
    with raises("graph.type-mismatch", node="half", port="advantages"):
        grpo(exact).edit(replace={"group_advantage": half}, wire={"half.advantages": "reward.token_level_scores"})


def test_two_function_operators_of_one_name_are_refused() -> None:
    @algorithm
    def twice(row: Masked) -> Any:
        return half(half(row.advantages))

    with raises("graph.duplicate-name", node="half") as error:
        twice()
    assert error.value.message.endswith('half.named("half_2nd").')


@pytest.mark.parametrize(
    ("call", "code", "facts"),
    [
        (lambda: scaled(ONES, factor=2.0), "operator.mixed-call", {"operator": "scaled", "parameter": "factor"}),
        (
            lambda: scaled(facto=2.0),
            "parameter.unknown",
            {"parameter": "facto", "known": ("advantages", "factor", "metrics")},
        ),
        (lambda: scaled(factor=-1.0), "parameter.invalid", {"spec": "scaled", "parameter": "factor", "given": "-1.0"}),
        (lambda: half(), "call.arguments", {"node": "half", "port": "advantages"}),
        (lambda: half(ONES, ONES), "call.arguments", {"node": "half", "reason": "too many positional arguments"}),
        (lambda: noisy(ONES), "session.no-job", {"node": "noisy", "missing": "key"}),
        (lambda: ppo(exact).edit(replace={"whiten": exact}), "edit.bad-argument", {}),
    ],
)
def test_a_wrong_call_is_refused(call: Callable[[], Any], code: str, facts: dict[str, Any]) -> None:
    with raises(code, **facts):
        call()


def test_a_function_without_the_decorator_is_no_operator() -> None:
    with raises("edit.bad-argument", found="a function") as error:
        ppo(exact).edit(replace={"whiten": exact})
    assert "the function exact. Write @operator above it" in error.value.message


def _no_annotation(advantages) -> c.Advantages: ...
def _no_return(advantages: c.Advantages): ...
def _no_default(advantages: c.Advantages, *, factor: float) -> c.Advantages: ...
def _bare(advantages: c.Advantages, *, factor=0.5) -> c.Advantages: ...
def _among_ports(advantages: c.Advantages, factor: float = 0.5) -> c.Advantages: ...
def _port_after_the_star(*, advantages: c.Advantages) -> c.Advantages: ...
def _starred(*advantages: c.Advantages) -> c.Advantages: ...
def _no_port(*, factor: float = 0.5) -> c.Advantages: ...
def _taken(advantages: c.Advantages, *, effects: float = 0.5) -> c.Advantages: ...
def _shared(advantages: c.Advantages, *, factors: list = []) -> c.Advantages: ...  # noqa: B006
def _unknown(advantages: Nowhere) -> c.Advantages: ...
def _method(self: Any, advantages: c.Advantages) -> c.Advantages: ...
def _wrong_default(advantages: c.Advantages, *, factor: float = "half") -> c.Advantages: ...  # type: ignore[assignment]
async def _later(advantages: c.Advantages) -> c.Advantages: ...
def _many(advantages: c.Advantages) -> c.Advantages:
    yield 1


@pytest.mark.parametrize(
    ("function", "code", "facts"),
    [
        (_no_annotation, "operator.missing-annotation", {"parameter": "advantages"}),
        (_no_return, "operator.missing-annotation", {"parameter": "return"}),
        (_no_default, "operator.misplaced-parameter", {"parameter": "factor"}),
        (_bare, "parameter.definition", {"parameter": "factor"}),
        (_among_ports, "operator.misplaced-parameter", {"parameter": "factor"}),
        (_port_after_the_star, "operator.misplaced-parameter", {"parameter": "advantages"}),
        (_starred, "operator.unnamed-port", {"parameter": "*advantages"}),
        (_no_port, "operator.no-port", {}),
        (_taken, "operator.name-taken", {"name": "effects"}),
        (_shared, "parameter.definition", {"member": "factors"}),
        (_unknown, "column.undefined-name", {}),
        (_later, "operator.not-a-function", {"found": "async"}),
        (_many, "operator.not-a-function", {"found": "a generator"}),
        (_method, "operator.not-a-function", {"found": "a method"}),
        (_wrong_default, "parameter.invalid", {"parameter": "factor", "given": "'half'"}),
        (lambda advantages: advantages, "operator.not-a-function", {}),
        (Whiten, "operator.not-a-function", {"found": repr(Whiten)}),
        (exact, "column.untyped", {"annotation": "str"}),
    ],
)
def test_an_ill_formed_function_is_refused_with_its_line(function: Any, code: str, facts: dict[str, Any]) -> None:
    with raises(code, **facts) as error:
        operator(function)
    assert isinstance(error.value, DefinitionError)
    assert re.match(r"\S+\.py:\d+", str(error.value.facts["where"]))


SCRIPT = """
import torch
from flowrl import operator
from flowrl.columns import Advantages, ResponseMask

@operator
def third(advantages: Advantages, *, of: float = 1.0) -> Advantages:
    return advantages * of / 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's with an operator in it."""
    (tmp_path / "my_operators.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_operators", raising=False)
    yield importlib.import_module("my_operators")
    monkeypatch.delitem(sys.modules, "my_operators", raising=False)


def test_files_contain_its_path_and_source_hash(mine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ppo("tests.support.kernel:exact").edit(replace={"whiten": mine.third(of=2.0).named("w")})
    flowrl.save(graph, tmp_path / "graph.yaml")
    before, fingerprint = graph.to_dict(), graph.fingerprint()
    read = flowrl.load(tmp_path / "graph.yaml")
    assert read["w"].operator == mine.third(of=2.0) and read.fingerprint() == graph.fingerprint()
    assert graph.to_dict()["nodes"]["w"]["operator"]["$type"] == "my_operators:third"
    with raises("file.not-imported"):
        flowrl.load(tmp_path / "graph.yaml", imports=False)

    (tmp_path / "my_operators.py").write_text(SCRIPT.replace("/ 3", "/ 4"))
    monkeypatch.delitem(sys.modules, "my_operators")
    importlib.invalidate_caches()
    changed = importlib.import_module("my_operators")
    with pytest.raises(GraphError, match=r"w names my_operators:third, whose source has changed since"):
        flowrl.load(tmp_path / "graph.yaml")
    assert graph.edit(replace={"w": changed.third(of=2.0).named("w")}).fingerprint() != fingerprint
    data = json.loads(json.dumps(before, sort_keys=True))  # where "$source" comes before "$type"
    data["nodes"]["w"]["operator"]["$source"] = source_hash(function_of(changed.third))
    assert Graph.from_dict(data)["w"].operator == changed.third(of=2.0)


def test_a_diff_shows_another_source() -> None:
    def shrunk(by: float) -> Operator:
        @operator
        def shrink(advantages: c.Advantages) -> c.Advantages:
            return advantages * by

        return shrink

    before = ppo(exact).edit(replace={"whiten": shrunk(0.5)})
    assert not before.diff(before.edit(replace={"shrink": shrunk(0.5)}))
    path = "tests.core.operators.test_function:test_a_diff_shows_another_source.<locals>.shrunk.<locals>.shrink"
    assert str(before.diff(before.edit(replace={"shrink": shrunk(0.25)}))).splitlines()[1:] == [
        f"~ shrink.operator: {path} -> {path} (with another source)"
    ]


def test_a_local_function_operator_runs_but_cannot_be_saved() -> None:
    @operator
    def local(advantages: c.Advantages) -> c.Advantages:
        return advantages

    graph = ppo(exact).edit(replace={"whiten": local})
    assert graph.fingerprint() == graph.edit().fingerprint()
    with pytest.raises(GraphError, match="local is local, which has no import path"):
        graph.to_dict()


def test_an_importable_function_operator_is_pickled_by_name(mine: Any) -> None:
    for one in (mine.third, mine.third(of=2.0).named("w")):
        again = pickle.loads(pickle.dumps(one))
        assert type(again) is type(one) and again == one and again.name == one.name


def test_a_function_operator_of_a_script_is_pickled_by_value(tmp_path: Path) -> None:
    """As Ray sends it; annotations are text there, and the process that reads it has never seen the script."""
    end = "\nimport sys, cloudpickle\ncloudpickle.dump([third, third(of=2.0)], open(sys.argv[1], 'wb'))\n"
    (tmp_path / "script.py").write_text("from __future__ import annotations\n" + SCRIPT + end)
    subprocess.run([sys.executable, tmp_path / "script.py", tmp_path / "sent"], check=True, cwd=ROOT)
    plain, other = cloudpickle.loads((tmp_path / "sent").read_bytes())
    assert type(plain) is type(other) and plain != other
    assert other(3 * ONES).tolist() == [[2.0] * 3]
    once_more = cloudpickle.loads((tmp_path / "sent").read_bytes())[1]
    assert type(once_more) is type(other) and once_more == other
