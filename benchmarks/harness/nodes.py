"""Nodes that compute next to nothing: a chain on the general host, and one on the host of a role.

They are in a module of their own, because the processes of a job import operators and backends by name.
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
    """What the chains read."""

    token_level_scores: TokenLevelScores


class Shift(Operator):
    """As little as an operator can compute, without a role."""

    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        return token_level_scores + 1.0


class ShiftAtRole(Operator):
    """The same where the role ``ref`` lives."""

    ref: Reads[Scorer] = Role("ref")

    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        return token_level_scores + 1.0


class IdleEngine:
    """A `Scorer` that holds no weights."""

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
    """`NODES` nodes one after the other, without a role."""
    scores = batch.token_level_scores
    for i in range(NODES):
        scores = Shift().named(f"shift_{i}")(scores)
    return scores


@algorithm
def role_chain(batch: Scores) -> Any:
    """`NODES` nodes one after the other, all on the role ``ref``."""
    scores = batch.token_level_scores
    for i in range(NODES):
        scores = ShiftAtRole().named(f"shift_{i}")(scores)
    return scores
