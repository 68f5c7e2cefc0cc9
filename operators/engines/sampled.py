"""`Sampled`: what another engine of episodes sampled, as rows to train on."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.roles import Reads
from flowrl.errors import EpisodeError, offer
from flowrl.operators.engines.episode_rows import episode_batch
from flowrl.protocols.protocols import Rollout
from flowrl.records import EpisodeBatch


class Sampled(Operator):
    """Episodes as one of their other engines saw them: what it read and sampled there, to train its role.

    A row is an episode, and its tokens are those of the other engine alone: the conversations that it was asked to
    answer, in segments (`flowrl.data.segments`), with a mask that is True on what it sampled. An episode in which it
    answered nothing is a row without a response.

    Args:
        other: the engine's name in ``Interact(others=...)``.
        role: its role there.

    Returns:
        The columns of `Interact`; `token_level_scores` has the rewards that ``chat.others[name].reward(...)`` gave.

    Raises:
        EpisodeError: the episodes have no engine of that name.
    """

    granularity: ClassVar[Granularity] = "row"
    other: str
    role: Reads[Rollout]

    @property
    def effects(self) -> frozenset[str]:
        """``"asked"``."""
        return frozenset({Effect.ASKED})

    def __call__(self, asked: c.Asked) -> EpisodeBatch:
        for sides in asked:
            if self.other not in sides:
                raise EpisodeError(
                    f"{self.name} makes rows of the engine {self.other!r}, which the episodes do not have; "
                    f"{offer(self.other, sides, 'they have')} Name a key of Interact(others=...).",
                    code="episode.unknown-engine",
                    name=self.other,
                    known=sorted(sides),
                )
        own = [sides[self.other] for sides in asked]
        return episode_batch(
            [side.record for side in own],
            [side.summary for side in own],
            [{}] * len(own),
            self.role.tokenizer,
            torch.tensor([side.temperature for side in own]),
            torch.tensor([side.version for side in own], dtype=torch.int64),
        )
