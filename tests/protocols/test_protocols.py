"""Protocols: what an engine is asked for counts, and not which class says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import pytest
from torch import Tensor

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import Generate, KLLoss, Sync, UpdateActor, UpdateCritic, Value
from flowrl.protocols.backend import members
from flowrl.protocols.protocols import Critic, Rollout, Scorer, Trainer
from flowrl.records import Sequences, Updated
from tests.support.errors import raises
from tests.support.kernel import exact


@runtime_checkable
class MyTrainer(Trainer, Protocol):
    """One that extends it."""

    def more(self) -> None: ...


@runtime_checkable
class Alike(Protocol):
    """One that declares the same, and derives from nothing."""

    version: int

    def log_probs(self, batch: Sequences) -> Tensor: ...
    def update(self, batch: Any, mini_batches: Sequence[Any], loss: Any) -> Any: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def save_pretrained(self, folder: str) -> None: ...


@runtime_checkable
class MyRollout(Rollout, Protocol):
    """One that extends it."""


@runtime_checkable
class MyCritic(Critic, Protocol):
    """One that extends it."""


class UpdateMine(UpdateActor):
    actor: Writes[MyTrainer] = Role("actor")


class UpdateAlike(UpdateActor):
    actor: Writes[Alike] = Role("actor")


class GenerateMine(Generate):
    rollout: Reads[MyRollout] = Role("rollout")


class SyncMine(Sync):
    actor: Reads[MyTrainer] = Role("actor")
    rollout: Writes[MyRollout] = Role("rollout")


class UpdateMyCritic(UpdateCritic):
    critic: Writes[MyCritic] = Role("critic")


class ValueOfMine(Value):
    critic: Reads[MyCritic] = Role("critic")


def rules_of(graph: Graph) -> set[str]:
    return {finding.rule for finding in graph.check()}


@pytest.mark.parametrize("update", [UpdateActor, UpdateMine, UpdateAlike])
def test_rules_follow_what_is_asked_of_an_engine(update: type[UpdateActor]) -> None:
    """Greedy, in groups of one, and never synced."""
    graph = grpo(exact, n=1, temperature=0.0).edit(
        replace={"update_actor": update(kl=KLLoss()).named("update_actor")}, drop=["sync"]
    )
    assert rules_of(graph) == {"FR002", "FR003", "FR007"}
    assert graph.trained == ["actor"]


def test_engines_that_generate_are_known_by_what_they_are_asked_for() -> None:
    graph = grpo(exact).edit(replace={"generate": GenerateMine().named("generate"), "sync": SyncMine().named("sync")})
    assert rules_of(graph) == set()
    assert graph.back_edges == [("sync", "generate")]
    assert (graph.generators, graph.trained) == (["rollout"], ["actor"])
    assert graph["sync"].is_sync and not graph["generate"].is_sync
    assert rules_of(graph.edit(drop=["sync"])) == {"FR002"}


def test_critics_too() -> None:
    mine = {"update_critic": UpdateMyCritic().named("update_critic")}
    assert rules_of(ppo(exact).edit(replace=mine)) == set()
    other = mine | {"value": ValueOfMine(critic=Role("other")).named("value")}
    assert rules_of(ppo(exact).edit(replace=other)) == {"FR005"}


def test_a_scorer_is_no_trainer() -> None:
    class Look(Operator):
        judge: Writes[Scorer] = Role("judge")

        def __call__(self, values: c.Values) -> Updated: ...

    graph = ppo(exact).edit(insert={"look": After("value", Look())})
    assert rules_of(graph) == set()
    assert "judge" in graph.trained


def test_members_are_methods_properties_and_annotations() -> None:
    assert members(Alike) == members(Trainer) == {"log_probs", "version", "update", "weights", "save_pretrained"}
    assert members(MyTrainer) == members(Trainer) | {"more"}


@pytest.mark.parametrize("prompts", [0, -1, 2.0, "4", True])
def test_a_number_of_prompts_is_a_count(prompts: Any) -> None:
    with raises("parameter.invalid", prompts=prompts):
        grpo(exact).check(prompts=prompts)
