"""Tests of `fitting.py` and `objective.py`: graphs fitted to a task, and graphs that cannot be audited."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import pytest
import torch
from torch import Tensor

from flowrl import After, AuditTask, Graph, Operator, Reads, Role, State, When, algorithm, audit, operator
from flowrl.auditing.fitting import fitted
from flowrl.auditing.objective import stated
from flowrl.auditing.rewards import TableReward
from flowrl.columns import Advantages, ResponseMask, ResponseText, RowMask, TokenLevelRewards, TokenLevelScores
from flowrl.core.operators.operator import Granularity
from flowrl.errors import GraphError
from flowrl.graphs import grpo, remax, rloo, sft
from flowrl.operators import NLL, Collect, Filter, Generate, Length, Reinforce, Repeat, Spread, Sync, UpdateActor
from flowrl.records import PromptBatch, Receipt, RolloutBatch
from flowrl.schedules import Linear
from tests.auditing.listed import ONE, unread
from tests.support.errors import raises


@operator
def shorter(token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
    """A tenth less for each token."""
    return torch.where(response_mask, token_level_scores - 0.1, 0.0)


@operator
def of_text(response_text: ResponseText, response_mask: ResponseMask) -> TokenLevelScores:
    """A score of its own."""
    return torch.zeros(response_mask.shape)


@operator
def ranked(token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
    """A score that depends on the others."""
    return torch.where(token_level_scores == token_level_scores.max(), 1.0, 0.0)


def test_reward_functions_become_tables_and_equal_functions_share_one() -> None:
    graph, _, notes = fitted(remax(unread), ONE, None)
    tables = {name: node.operator for name, node in graph.nodes.items() if isinstance(node.operator, TableReward)}
    assert set(tables) == {"reward", "greedy_reward"}
    assert len({table.table for table in tables.values()}) == 1
    assert notes == []
    other, _, _ = fitted(remax(unread).edit(set={"greedy_reward.fn": _other}), ONE, None)
    assert len({other[name].operator.table for name in tables}) == 2  # type: ignore[attr-defined]


def _other(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    raise AssertionError


def test_batch_sizes_and_lengths_are_reduced_to_the_task_and_notes_state_it() -> None:
    graph = grpo(unread, mini_batch=32, max_new_tokens=2).edit(
        insert={"collect": After("reward", Collect(Spread(), groups=8))}, lag=1
    )
    fitting, task, notes = fitted(graph, AuditTask(), 2)
    assert task.steps == 2
    assert fitting.lag.versions == 0
    assert [fitting["repeat"].operator.n, fitting["collect"].operator.groups] == [2, 2]  # type: ignore[attr-defined]
    assert fitting["update_actor"].operator.mini_batch is None  # type: ignore[attr-defined]
    assert len(notes) == 4
    assert "update_actor sees its 4 rows at once, since mini_batch=32 does not divide them." in notes
    kept, _, _ = fitted(grpo(unread, n=2, mini_batch=2), AuditTask(), None)
    assert kept["update_actor"].operator.mini_batch == 2  # type: ignore[attr-defined]
    _, task, _ = fitted(grpo(unread).edit(set={"generate.ignore_eos": True}), AuditTask(), None)
    assert not task.ends


def test_the_audited_objective_is_the_last_scores_before_the_advantage() -> None:
    shaped = rloo(unread).edit(insert={"shorter": After("reward", shorter)})
    assert [str(e) for e in stated(fitted(shaped, ONE, 2)[0], None).scores] == ["shorter.token_level_scores"]
    assert not audit(shaped, ONE, n=2).biased  # the penalty is part of what is expected
    gated = shaped.edit(insert={"filter": After("shorter", Filter(Length(least=1)))})
    assert [str(e) for e in stated(fitted(gated, ONE, 2)[0], None).scores] == ["shorter.token_level_scores"]
    assert not audit(gated, ONE, n=2).biased
    baseline = stated(fitted(remax(unread), ONE, None)[0], None)
    assert [str(e) for e in baseline.scores] == ["reward.token_level_scores"]


def test_a_custom_scorer_becomes_a_table_and_a_note_states_it() -> None:
    graph = rloo(unread).edit(replace={"reward": of_text})
    found = audit(graph, ONE, n=2)
    assert not found.biased
    assert any("scores by a table, and not by" in note for note in found.notes)


def test_scores_that_depend_on_other_rows_are_refused() -> None:
    with raises("audit.unsupported-graph", node="ranked"):
        audit(rloo(unread).edit(insert={"ranked": After("reward", ranked)}), ONE, n=2)


@runtime_checkable
class Oracle(Protocol):
    """An engine that no table can be."""

    def foretell(self, text: object) -> Tensor: ...


class Foretold(Operator):
    """Advantages by an oracle."""

    oracle: Reads[Oracle] = Role("oracle")

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask) -> Advantages:
        return self.oracle.foretell(token_level_rewards)


@algorithm
def no_reward(batch: PromptBatch) -> Receipt:
    """Learns from nothing."""
    rollout = Generate()(Repeat(2)(batch))
    adv = ones(rollout.response_mask)
    return Sync()(UpdateActor(Reinforce())(rollout, advantages=adv))


@operator
def ones(response_mask: ResponseMask) -> Advantages:
    """1 everywhere."""
    return response_mask.float()


@algorithm
def nothing_trained(batch: PromptBatch) -> RolloutBatch:
    """Generation only."""
    rollout: RolloutBatch = Generate()(batch)
    return rollout


@pytest.mark.parametrize(
    ("graph", "code", "facts"),
    [
        (
            rloo(unread).edit(replace={"rloo_advantage": Foretold()}),
            "audit.unsupported-graph",
            {"role": "oracle", "missing": ("foretell",)},
        ),
        (no_reward(), "audit.unsupported-graph", {"node": "update_actor"}),
        (nothing_trained(), "audit.unsupported-graph", {"graph": "nothing_trained", "trained": ()}),
        (sft(), "audit.unsupported-graph", {"graph": "sft", "input": "demos", "column": "responses"}),
    ],
    ids=["oracle", "no reward", "nothing trained", "from a file"],
)
def test_a_graph_that_cannot_be_audited_is_refused_with_the_reason(
    graph: Graph, code: str, facts: dict[str, Any]
) -> None:
    with raises(code, **facts):
        audit(graph, ONE)


def test_the_role_selects_the_audited_policy() -> None:
    with raises("audit.unsupported-graph", found="opponent", trained=("actor",)):
        audit(rloo(unread), ONE, role="opponent")
    assert not audit(rloo(unread), ONE, n=2, role="actor").biased


def test_an_update_that_starts_late_is_audited_at_its_first_step() -> None:
    late = rloo(unread).edit(when={"update_actor": When(start=3, every=2)})
    found = audit(late, ONE, n=2)
    assert "It is as in step 4, the first in which update_actor runs." in found.notes
    assert not found.biased
    falling = late.edit(set={"kl_shape.coef": Linear(0.4, 0.0, steps=6)})
    assert audit(falling, ONE, n=2).objective == "expected reward - 0.2 · KL(actor || ref)"


@operator
def best(token_level_scores: TokenLevelScores) -> RowMask:
    """The best answer of all."""
    scores = token_level_scores.sum(-1)
    return scores >= scores.max()


def test_scores_that_only_select_rows_are_the_objective() -> None:
    gated = rloo(unread).edit(insert={"filter": After("reward", Filter(best))})
    chosen = gated.edit(set={"update_actor.loss": NLL()}, drop=["rloo_advantage"])
    found = audit(chosen, ONE, n=2, explain=False)
    assert found.objective == "expected reward"
    assert found.whole.scale.low > 0
    assert found.biased


def test_the_argument_must_be_a_graph() -> None:
    with pytest.raises(GraphError):
        audit("grpo")  # type: ignore[arg-type]


class RunningMean(Operator):
    """A baseline that learns from step to step."""

    granularity: ClassVar[Granularity] = "batch"
    mean = State(lambda self: 0.0)

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask) -> Advantages:
        scores, before = token_level_rewards.sum(-1), self.mean.value
        self.mean.value = float(scores.mean())
        return torch.where(response_mask, (scores - before)[:, None], 0.0)


def test_operator_state_has_its_initial_value_and_a_note_states_it() -> None:
    graph = rloo(unread, kl_coef=0.0).edit(replace={"rloo_advantage": RunningMean()}, drop=["kl_shape"])
    assert "running_mean keeps state, which is as it is before the first step of a run." in audit(graph, ONE, n=2).notes
