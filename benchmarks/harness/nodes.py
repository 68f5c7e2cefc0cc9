"""Trivial nodes: a chain on the general host, and one on the host of a role.

They have their own module, because the processes of a job import operators and backends by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl import Operator, algorithm
from flowrl.backends import Backend
from flowrl.columns import TokenLevelScores
from flowrl.core.operators.roles import Reads, Role
from flowrl.protocols.protocols import BuildContext, Scorer
from flowrl.records import Sequences

NODES = 32


class Scores(NamedTuple):
    """Input of the chains."""

    token_level_scores: TokenLevelScores


class Shift(Operator):
    """A minimal operator without a role."""

    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        return token_level_scores + 1.0


class ShiftAtRole(Operator):
    """A minimal operator on the role ``ref``."""

    ref: Reads[Scorer] = Role("ref")

    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        return token_level_scores + 1.0


class IdleEngine:
    """A `Scorer` without weights."""

    def log_probs(self, batch: Sequences) -> Tensor:
        """Zeros: float32 ``[batch response]``."""
        return torch.zeros(batch.response_mask.shape)


class Idle(Backend):
    """A backend that loads nothing."""

    serves = (Scorer,)

    def build(self, context: BuildContext) -> IdleEngine:
        return IdleEngine()


@algorithm
def general_chain(batch: Scores) -> Any:
    """`NODES` sequential nodes without a role."""
    scores = batch.token_level_scores
    for i in range(NODES):
        scores = Shift().named(f"shift_{i}")(scores)
    return scores


@algorithm
def role_chain(batch: Scores) -> Any:
    """`NODES` sequential nodes on the role ``ref``."""
    scores = batch.token_level_scores
    for i in range(NODES):
        scores = ShiftAtRole().named(f"shift_{i}")(scores)
    return scores
