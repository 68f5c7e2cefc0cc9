"""`Feedback`: reports scores to samplers that learn from them."""

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
    """Report the scores of each group to the sampler of the data; returns the scores unchanged.

    Use ``edit(insert={"feedback": After("reward", Feedback())})`` with ``PromptData(sampler=ByDifficulty())``. The
    sampler learns the scores of a step before it samples the next one. Before a `Collect`, it also learns those of the
    groups that `Collect` drops.

    A row's score is the sum of its token-level scores. Fully masked rows have no score.

    Returns:
        `token_level_scores`, unchanged. Metrics: ``<node>/differ``, the share of groups whose scores differ.
    """

    granularity: ClassVar[Granularity] = "group"

    @property
    def effects(self) -> frozenset[str]:
        """``{"sampler feedback"}``."""
        return frozenset({Effect.SAMPLER_FEEDBACK})

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid, metrics: Metrics = INJECTED
    ) -> TokenLevelScores:
        scores = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64).tolist()
        live = response_mask.any(-1).tolist()
        by_group = {group: [scores[row] for row in rows if live[row]] for group, rows in rows_of_groups(uid).items()}
        metrics.groups(f"{self.name}/differ", {group: found for group, found in by_group.items() if found})
        return token_level_scores
