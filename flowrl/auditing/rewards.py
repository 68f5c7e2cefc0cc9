"""Rewards from a table, in place of reward functions and reward models."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from flowrl.auditing.task import AuditTask
from flowrl.columns import Prompts, ResponseMask, Responses, TokenLevelScores
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.roles import Reads, Role
from flowrl.operators.reward.operator import place_scores


@runtime_checkable
class RewardTables(Protocol):
    """Scores of responses by table."""

    def scores(self, table: str, prompts: Tensor, responses: Tensor, response_mask: Tensor) -> Tensor:
        """One for each row: float32 ``[batch]``."""
        ...


class Tables:
    """The reward tables of a task, by name."""

    def __init__(self, task: AuditTask) -> None:
        self.task = task
        self._tables: dict[str, Tensor] = {}

    def scores(self, table: str, prompts: Tensor, responses: Tensor, response_mask: Tensor) -> Tensor:
        """See `RewardTables`."""
        if table not in self._tables:
            table_of_scores = self.task.table(f"reward {table}", self.task.prompts, len(self.task.responses)).sigmoid()
            self._tables[table] = (table_of_scores > 0.5).double() if self.task.right_or_wrong else table_of_scores
        response = self.task.responses.number_of(responses, response_mask)
        return self._tables[table][self.task.number_of(prompts), response].float()


class HasResponses(Protocol):
    """Prompts with responses."""

    @property
    def prompts(self) -> Prompts: ...
    @property
    def responses(self) -> Responses: ...
    @property
    def response_mask(self) -> ResponseMask: ...


class TableReward(Operator):
    """A score for each response, from a table, on its last token."""

    granularity: ClassVar[Granularity] = "row"

    table: str
    task: Reads[RewardTables] = Role("task")

    def __call__(self, rollout: HasResponses) -> TokenLevelScores:
        scores = self.task.scores(self.table, rollout.prompts, rollout.responses, rollout.response_mask)
        return place_scores(scores, rollout.response_mask)
