"""verl's functions if it is installed; otherwise the same algorithms, reimplemented here.

`advantages.py` and `columns.py` compare every figure with this peer. ``make race`` installs verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

INSTALLED = find_spec("verl") is not None
PEER = f"verl {version('verl')}" if INSTALLED else "verl's algorithm"

Columns = dict[str, Tensor]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Whitened advantages, and returns; the mask is int64, as in verl."""
    next_value, next_advantage = torch.zeros(2, len(mask))
    backwards = []
    for t in reversed(range(mask.shape[1])):
        on = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_value = values[:, t] * on + (1 - on) * next_value
        next_advantage = advantage * on + (1 - on) * next_advantage
        backwards.append(next_advantage)
    advantages = torch.stack(backwards[::-1], dim=1)
    return _whitened(advantages, mask), advantages + values


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    number = mask.sum()
    mean = (x * mask).sum() / number
    variance = ((x - (x * mask).sum() / number).square() * mask).sum() / (number - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8)


def group_advantage(rewards: Tensor, mask: Tensor, uid: np.ndarray[Any, Any]) -> Tensor:
    """GRPO's advantages, without a loop over rows."""
    scores = rewards.sum(-1)
    index = torch.from_numpy(np.unique(uid, return_inverse=True)[1])
    number, total, squares = torch.zeros(3, int(index.max()) + 1)
    number.index_add_(0, index, torch.ones_like(scores))
    centred = scores - (total.index_add_(0, index, scores) / number)[index]
    std = (squares.index_add_(0, index, centred.square()) / (number - 1).clamp(min=1)).sqrt()
    return (centred / (std[index] + 1e-6)).unsqueeze(-1) * mask


class Batch:
    """Columns with rows to join, permute and repeat."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The concatenated rows."""
        return Batch({name: torch.cat([b.columns[name] for b in batches]) for name in batches[0].columns})

    def select_idxs(self, index: Tensor) -> Batch:
        """The rows at these indices."""
        return Batch({name: column[index] for name, column in self.columns.items()})

    def repeat(self, n: int) -> Batch:
        """Each row n times."""
        return Batch({name: column.repeat_interleave(n, dim=0) for name, column in self.columns.items()})


def batch(columns: Columns) -> Any:
    """The peer's record of columns: with `concat` of its class, `select_idxs` and `repeat`."""
    return Batch(columns)


if INSTALLED:
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_grpo_vectorized_outcome_advantage

    gae, group_advantage = compute_gae_advantage_return, compute_grpo_vectorized_outcome_advantage
    batch = DataProto.from_single_dict
