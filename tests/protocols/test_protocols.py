"""Protocols: the members that an operator requires of an engine count, not the name of the protocol class."""

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
    """`Trainer` with one more method."""

    def more(self) -> None: ...


@runtime_checkable
class SameMembers(Protocol):
    """The members of `Trainer`, without deriving from it."""

    version: int

    def log_probs(self, batch: Sequences) -> Tensor: ...
    def update(self, batch: Any, mini_batches: Sequence[Any], loss: Any) -> Any: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def save_pretrained(self, folder: str) -> None: ...


@runtime_checkable
class MyRollout(Rollout, Protocol):
    """A subclass of `Rollout` with the same members."""


@runtime_checkable
class MyCritic(Critic, Protocol):
    """A subclass of `Critic` with the same members."""


class UpdateMine(UpdateActor):
    actor: Writes[MyTrainer] = Role("actor")


class UpdateSameMembers(UpdateActor):
    actor: Writes[SameMembers] = Role("actor")


class GenerateMine(Generate):
    rollout: Reads[MyRollout] = Role("rollout")


class SyncMine(Sync):
    actor: Reads[MyTrainer] = Role("actor")
    rollout: Writes[MyRollout] = Role("rollout")


class UpdateMyCritic(UpdateCritic):
    critic: Writes[MyCritic] = Role("critic")


class ValueOfMyCritic(Value):
    critic: Reads[MyCritic] = Role("critic")


def rules_of(graph: Graph) -> set[str]:
    return {finding.rule for finding in graph.check()}


@pytest.mark.parametrize("update", [UpdateActor, UpdateMine, UpdateSameMembers])
def test_rules_find_updates_by_the_members_of_the_required_protocol(update: type[UpdateActor]) -> None:
    """The graph violates three rules about policies: never synced, groups of one, greedy."""
    graph = grpo(exact, n=1, temperature=0.0).edit(
        replace={"update_actor": update(kl=KLLoss()).named("update_actor")}, drop=["sync"]
    )
    assert rules_of(graph) == {"FR002", "FR003", "FR007"}
    assert graph.trained == ["actor"]


def test_generating_engines_are_found_by_the_members_of_the_required_protocol() -> None:
    graph = grpo(exact).edit(replace={"generate": GenerateMine().named("generate"), "sync": SyncMine().named("sync")})
    assert rules_of(graph) == set()
    assert graph.back_edges == [("sync", "generate")]
    assert (graph.generators, graph.trained) == (["rollout"], ["actor"])
    assert graph["sync"].is_sync and not graph["generate"].is_sync
    assert rules_of(graph.edit(drop=["sync"])) == {"FR002"}


def test_critics_are_found_by_the_members_of_the_required_protocol() -> None:
    replaced = {"update_critic": UpdateMyCritic().named("update_critic")}
    assert rules_of(ppo(exact).edit(replace=replaced)) == set()
    two_critics = replaced | {"value": ValueOfMyCritic(critic=Role("two_critics")).named("value")}
    assert rules_of(ppo(exact).edit(replace=two_critics)) == {"FR005"}


def test_a_role_that_only_scores_does_not_count_as_a_policy_for_rules() -> None:
    class Look(Operator):
        judge: Writes[Scorer] = Role("judge")

        def __call__(self, values: c.Values) -> Updated: ...

    graph = ppo(exact).edit(insert={"look": After("value", Look())})
    assert rules_of(graph) == set()
    assert "judge" in graph.trained


def test_members_are_methods_properties_and_annotations() -> None:
    assert members(SameMembers) == members(Trainer) == {"log_probs", "version", "update", "weights", "save_pretrained"}
    assert members(MyTrainer) == members(Trainer) | {"more"}


@pytest.mark.parametrize("prompts", [0, -1, 2.0, "4", True])
def test_check_refuses_a_number_of_prompts_that_is_not_a_positive_int(prompts: Any) -> None:
    with raises("parameter.invalid", prompts=prompts):
        grpo(exact).check(prompts=prompts)
