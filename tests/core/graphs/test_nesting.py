"""Algorithms within algorithms, and operators that write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import flowrl
from flowrl import INJECTED, After, Key, Metrics, operator
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.session import Session
from flowrl.data.proto.dataproto import DataProto
from flowrl.graph import algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import Generate, Repeat, Reward, Whiten
from flowrl.records import PromptBatch
from flowrl.run.engine.local import local_steps
from tests.support.errors import raises
from tests.support.kernel import exact


class Masked(NamedTuple):
    """Two columns."""

    advantages: c.Advantages
    response_mask: c.ResponseMask


@operator
def noisy(advantages: c.Advantages, key: Key = INJECTED) -> c.Advantages:
    """With noise."""
    return advantages + torch.rand(advantages.shape, generator=key.generator())


@operator
def log_sum(advantages: c.Advantages, metrics: Metrics = INJECTED) -> None:
    """Log the sum."""
    metrics.sum("logged/sum", advantages.sum())


class LogSum(Operator):
    """The same as a class."""

    def __call__(self, advantages: c.Advantages, metrics: Metrics = INJECTED) -> None:
        metrics.sum("logged/sum", advantages.sum())


@algorithm
def shaken(row: Masked, *, whiten: bool = True) -> Any:
    """Noise, and whitened."""
    shaky = noisy(row.advantages)
    return Whiten()(shaky, row.response_mask) if whiten else shaky


@algorithm
def once(row: Masked) -> Any:
    return shaken(row, whiten=False)


@algorithm
def both(row: Masked) -> Any:
    return shaken(row), shaken.under("again")(row)


@algorithm
def deep(row: Masked) -> Any:
    return both.under("all")(row)


def rows() -> Masked:
    return Masked(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool))


def test_an_algorithm_records_its_nodes_in_another() -> None:
    assert list(once().nodes) == ["row", "noisy"] and once().name == "once"
    assert shaken(whiten=False).name == "shaken"  # without its inputs, it is a graph by itself
    graph = both()
    assert list(graph.nodes) == ["row", "noisy", "whiten", "again_noisy", "again_whiten"]
    assert graph.sinks == ("whiten", "again_whiten") and graph["again_whiten"].sources == ["again_noisy", "row"]
    assert list(deep().nodes)[1:] == ["all_noisy", "all_whiten", "all_again_noisy", "all_again_whiten"]


def test_nested_algorithms_on_tensors_use_the_keys_of_their_nodes() -> None:
    session = Session({}, seed=5)
    with session.active():
        found = deep.step(rows())
    steps = local_steps(Plan(deep()), {}, seed=5)
    result = steps.step(DataProto(rows()._asdict()), 0)
    assert torch.equal(found[0], result.columns["all_whiten"].columns["advantages"])
    assert torch.equal(found[1], result.columns["all_again_whiten"].columns["advantages"])
    assert not torch.equal(found[0], found[1])


def test_a_graph_can_have_nested_algorithms() -> None:
    """A rollout with its reward, as two algorithms use it."""

    @algorithm
    def rolled(batch: PromptBatch, fn: Any, *, n: int = 1) -> Any:
        prompts = Repeat(n)(batch)
        rollout = Generate()(prompts)
        return rollout, Reward(fn)(rollout, prompts)

    @algorithm
    def two(batch: PromptBatch, fn: Any) -> Any:
        _, scores = rolled(batch, fn, n=2)
        _, others = rolled.under("base")(fn=fn, batch=batch)
        return scores, others

    graph = two(exact)
    assert graph["base_repeat"].operator == Repeat(1) and graph["repeat"].operator == Repeat(2)
    assert graph.fingerprint() == two(exact).fingerprint()


def test_duplicate_names_and_missing_inputs_of_nested_algorithms_are_refused() -> None:
    @algorithm
    def clash(row: Masked) -> Any:
        return shaken(row), shaken(row)

    with raises("graph.duplicate-name", node="noisy") as error:
        clash()
    assert 'give all nodes of shaken a prefix: shaken.under("second")' in error.value.message

    @algorithm
    def wrong(row: Masked) -> Any:
        return shaken(row, color=1)

    with raises("algorithm.bad-call", algorithm="shaken", reason="got an unexpected keyword argument 'color'"):
        wrong()
    with raises("algorithm.bad-call", algorithm="shaken"):
        shaken.under("x")()
    with raises("algorithm.bad-call", given="a b"):
        shaken.under("a b")
    with raises("graph.type-mismatch", node="noisy", port="advantages"):
        algorithm(_swapped)()


def _swapped(row: Masked) -> Any:
    return shaken(Masked(row.response_mask, row.advantages))


@pytest.mark.parametrize("sink", [log_sum, LogSum()])
def test_an_operator_without_outputs_is_a_sink(sink: Operator, tmp_path: Path) -> None:
    @algorithm
    def logged(row: Masked) -> Any:
        assert sink(row.advantages) is None
        return Whiten()(row.advantages, row.response_mask)

    graph = logged()
    assert graph.sinks == ("whiten", "log_sum") and graph["log_sum"].operator.signature.outputs == {}
    result = local_steps(Plan(graph), {}, seed=0).step(DataProto(rows()._asdict()), 0)
    assert result.metrics["logged/sum"].compute() == 7.0 and result.columns["log_sum"].columns == {}
    session = Session({}, seed=0)
    with session.active():
        logged.step(rows())
    assert session.all_metrics()["logged/sum"].compute() == 7.0

    trained = ppo("tests.support.kernel:exact").edit(insert={"log_sum": After("gae", sink)})
    assert trained.sinks == (*ppo(exact).sinks, "log_sum") and "log_sum" in trained.mermaid()
    assert trained.check() == []
    flowrl.save(trained, tmp_path / "logged.yaml")
    assert flowrl.load(tmp_path / "logged.yaml").fingerprint() == trained.fingerprint()


def test_edits_keep_a_sink_without_outputs() -> None:
    trained = ppo(exact).edit(insert={"log_sum": After("gae", log_sum)})
    for edited in (
        trained.edit(drop=["whiten"]),
        trained.edit(rename={"log_sum": "logged"}),
        trained.edit(replace={"log_sum": LogSum()}),
        trained.edit(set={"gae.lam": 0.5}),
        trained.edit(drop=["update_actor", "sync"]),
    ):
        name = "logged" if "logged" in edited else "log_sum"
        assert name in edited.sinks and edited[name].sources == ["gae"]
    assert "log_sum" not in trained.edit(drop=["log_sum"])
    alone = trained.edit(replace={"whiten": log_sum.named("also")}, wire={"update_actor.advantages": "gae.advantages"})
    assert alone.sinks[-1] == "also" and alone["update_actor"].inputs != {} and alone["also"].sources == ["gae"]
    assert "+ log_sum: log_sum  <- gae" in str(ppo(exact).diff(trained)).splitlines()
    assert "- log_sum: log_sum" in str(trained.diff(ppo(exact)))


def test_reading_from_a_sink_without_outputs_is_refused() -> None:
    with raises("edit.lost-source", node="whiten", port="update_actor.advantages", known=()):
        ppo(exact).edit(replace={"whiten": log_sum})
    with raises("graph.unknown-output", output="log_sum.logged"):
        grpo(exact).edit(
            insert={"log_sum": After("group_advantage", log_sum)}, wire={"update_actor.advantages": "log_sum.logged"}
        )

    @operator
    def sly(advantages: c.Advantages) -> None:
        return advantages

    with raises("call.return", node="sly", expected=None, found="a Tensor"):
        sly(torch.ones(1, 2))

    with raises("operator.missing-annotation", parameter="return"):

        class Silent(Operator):
            def __call__(self, advantages: c.Advantages): ...
