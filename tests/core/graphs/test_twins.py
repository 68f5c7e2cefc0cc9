"""Twins: duplicate nodes are found, nodes that may differ are not, and the suggested edit removes one."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from pydantic import Field

from flowrl import INJECTED, Key, Operator, PromptBatch, algorithm
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.core.graphs.twins import Twin, twins
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.session import State
from flowrl.core.operators.when import When
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo, remax
from flowrl.run.engine.local import local_steps
from tests.support.jobs import PROMPTS
from tests.support.kernel import exact


class Shift(Operator):
    """Moves a mask."""

    by: int = Field(1, ge=0)

    def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
        return prompt_mask.roll(self.by, dims=1)


class Both(Operator):
    """Both masks combined."""

    def __call__(self, one: c.PromptMask, other: c.PromptMask) -> c.PromptMask:
        return one & other


class Drawn(Operator):
    """A mask of its own."""

    def __call__(self, prompt_mask: c.PromptMask, key: Key = INJECTED) -> c.PromptMask:
        return torch.rand(prompt_mask.shape, generator=key.generator()) < 0.5


class Counted(Operator):
    """Another mask at every call."""

    calls = State(lambda self: 0)

    def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
        self.calls.value += 1
        return prompt_mask.roll(self.calls.value, dims=1)


class Asked(Operator):
    """A mask from elsewhere."""

    effects: ClassVar[frozenset[str]] = frozenset({Effect.EXTERNAL})

    def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
        return prompt_mask


def pair(one: Operator, other: Operator) -> Graph:
    """Two operators on the same mask, and both outputs combined."""

    @algorithm
    def paired(batch: PromptBatch) -> Any:
        return Both()(one.named("one")(batch.prompt_mask), other.named("other")(batch.prompt_mask))

    return paired()


def found(graph: Graph) -> list[Twin]:
    return twins(Plan(graph).order)


def result(graph: Graph) -> torch.Tensor:
    steps = local_steps(Plan(graph), {}, 0)
    [column] = steps.step(PROMPTS, 0).columns["both"].columns.values()
    assert isinstance(column, torch.Tensor)
    return column


def test_twins_are_found_and_the_suggested_edit_removes_one() -> None:
    graph = pair(Shift(1), Shift(1))
    assert found(graph) == [Twin("one", "other", None)]
    line = str(Plan(graph)).splitlines()[-1]
    description, _, call = line.partition(": ")
    assert description == "other computes the same as one; merge them"
    mended: Graph = eval(f"graph.{call}", {"graph": graph})
    assert list(mended.nodes) == ["batch", "one", "both"]
    assert found(mended) == []
    assert torch.equal(result(mended), result(graph))
    assert torch.equal(result(graph), PROMPTS.columns["prompt_mask"].roll(1, dims=1))


def test_operators_with_different_parameters_are_not_twins() -> None:
    assert found(pair(Shift(1), Shift(2))) == []


def test_nodes_in_different_steps_are_not_twins() -> None:
    assert found(pair(Shift(1), Shift(1)).edit(when={"other": When(start=3)})) == []


@pytest.mark.parametrize(
    ("operator", "why"),
    [
        (Drawn(), "each samples its own random numbers"),
        (Counted(), "each has its own state"),
        (Asked(), "each calls code outside of the graph"),
    ],
)
def test_twins_with_random_stateful_or_external_results_state_the_reason(operator: Operator, why: str) -> None:
    graph = pair(operator, operator)
    assert found(graph) == [Twin("one", "other", why)]
    assert str(Plan(graph)).endswith(f"other reads the same as one, but differs: {why}")


def test_readers_of_twins_are_twins() -> None:
    @algorithm
    def chains(batch: PromptBatch) -> Any:
        ends = [Shift(2).named(f"b{i}")(Shift(1).named(f"a{i}")(batch.prompt_mask)) for i in range(2)]
        return Both()(*ends)

    assert found(chains()) == [Twin("a0", "a1", None), Twin("b0", "b1", None)]


def test_readers_of_separate_random_samples_are_not_twins() -> None:
    @algorithm
    def chains(batch: PromptBatch) -> Any:
        ends = [Shift(2).named(f"b{i}")(Drawn().named(f"a{i}")(batch.prompt_mask)) for i in range(2)]
        return Both()(*ends)

    assert [(twin.first, twin.second) for twin in found(chains())] == [("a0", "a1")]


def test_a_sink_is_dropped_by_name() -> None:
    @algorithm
    def two_sinks(batch: PromptBatch) -> Any:
        return Shift(1).named("one")(batch.prompt_mask), Shift(1).named("other")(batch.prompt_mask)

    graph = two_sinks()
    assert str(Plan(graph)).endswith("merge them: edit(drop=['other'])")
    assert found(graph.edit(drop=["other"])) == []


def test_readers_of_a_dropped_sink_move_to_its_twin() -> None:
    @algorithm
    def read_too(batch: PromptBatch) -> Any:
        one = Shift(1).named("one")(batch.prompt_mask)
        other = Shift(1).named("other")(batch.prompt_mask)
        return other, Both()(one, other)

    graph = read_too()
    call = str(Plan(graph)).splitlines()[-1].partition(": ")[2]
    mended: Graph = eval(f"graph.{call}", {"graph": graph})
    assert list(mended.nodes) == ["batch", "one", "both"]
    assert torch.equal(result(mended), result(graph))


@pytest.mark.parametrize("make", [ppo, grpo, remax])
def test_no_algorithm_of_the_package_has_twins(make: Any) -> None:
    assert all(twin.why_not for twin in found(make(exact)))
