"""`Feedback`: tells the data how what it gave was answered, for samplers that learn from it."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowrl.columns import ResponseMask, TokenLevelScores, Uid
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.data.proto.column_math import rows_of_groups


class Feedback(Operator):
    """Tells the source of the rows how each group scored; scores pass as they are.

    ``edit(insert={"feedback": After("reward", Feedback())})`` goes with ``PromptData(sampler=ByDifficulty())``. What
    is told in a step is heard before the next one is drawn. In front of a `Collect` it tells of all that was offered,
    so the sampler hears of the groups that teach nothing, too.

    A row's score is the sum of its token-level scores. Rows that are masked entirely have none.

    Returns:
        `token_level_scores`, as they are. Metrics: ``<node>/differ``, the share of groups whose answers do not all
        score the same.
    """

    granularity: ClassVar[Granularity] = "group"

    @property
    def effects(self) -> frozenset[str]:
        """``"tells scores"``."""
        return frozenset({Effect.TELLS_SCORES})

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid, metrics: Metrics = INJECTED
    ) -> TokenLevelScores:
        scores = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64).tolist()
        live = response_mask.any(-1).tolist()
        told = {group: [scores[row] for row in rows if live[row]] for group, rows in rows_of_groups(uid).items()}
        metrics.groups(f"{self.name}/differ", {group: answers for group, answers in told.items() if answers})
        return token_level_scores
