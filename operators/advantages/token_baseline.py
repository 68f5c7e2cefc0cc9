"""A baseline for each token, by how hard the tokens so far have pulled at the policy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowrl.columns import Advantages, LogitNorms, ResponseMask, TokenLevelRewards, Uid
from flowrl.core.operators.operator import Operator
from flowrl.operators.advantages.groups import GroupBaseline, Groups
from flowrl.operators.advantages.per_token import has_holes, select

_ROWS = 32
"""Rows of whole groups that are worked on at a time, so that they stay in the cache."""


@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards: Tensor, logit_norms: Tensor, response_mask: Tensor, uid: np.ndarray
) -> Tensor:
    """Advantages against the baseline of least variance at each token (OTB: Li et al. 2026, arXiv:2602.07078).

    ``A_t = G_t - B_t`` and ``B_t = sum_i G_t W_t / sum_i W_t`` over the rows of a group that have a t-th token on the
    mask, where ``G_t`` is what a row is still paid from its t-th token on, and ``W_t = sum_{j <= t} w_j`` how hard its
    tokens so far have pulled, with ``w = ||d log p / d logits||**2`` for the squared norm of their gradients (the
    paper's logit-gradient proxy). Where no row of a group has pulled at all, each counts the same. A row that alone has
    a t-th token is its own baseline there, so its advantage is 0.

    Args:
        token_level_rewards, response_mask, uid: see `Groups`.
        logit_norms: float ``[batch response]``, w.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group whose rows are always still paid the same.

    Raises:
        DataError: as `Groups`.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    if logit_norms.shape != response_mask.shape:
        select(logit_norms, response_mask)  # refuses
    out = torch.empty(response_mask.shape, device=response_mask.device)
    for rows, index in group.blocks(_ROWS):
        on = response_mask[rows]
        out[rows] = _against_baseline(select(token_level_rewards[rows], on), select(logit_norms[rows], on), on, index)
    return out


def _against_baseline(rewards: Tensor, norms: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """`optimal_token_baseline` of some whole groups: float32 ``[rows response]``; `group` is int64 ``[rows]``."""
    order = mask.int().argsort(dim=1, descending=True, stable=True) if has_holes(mask) else None  # its tokens first
    if order is not None:
        rewards, norms, mask = (x.gather(1, order) for x in (rewards, norms, mask))
    on, paid = mask.double(), rewards.cumsum(1, dtype=torch.float64)
    to_come = (paid[:, -1:] - paid + rewards) * on
    pulled = norms.cumsum(1, dtype=torch.float64) * on

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(int(group.max()) + 1, x.shape[1]).index_add_(0, group, x)

    # Against the plain mean first: then equal numbers are exactly 0 whatever they weigh.
    apart = (to_come - (total(to_come) / total(on).clamp(min=1))[group]) * on
    weight = total(pulled)
    baseline = torch.where(weight == 0, 0.0, total(apart * pulled) / weight.where(weight != 0, 1.0))  # NaN stays
    found = ((apart - baseline[group]) * on).float()
    return found if order is None else torch.zeros_like(found).scatter_(1, order, found)


class OptimalTokenBaseline(GroupBaseline, Operator):
    """What is still to come, less a baseline of least variance a token, as in OTB; see `optimal_token_baseline`."""

    def __call__(
        self, token_level_rewards: TokenLevelRewards, logit_norms: LogitNorms, response_mask: ResponseMask, uid: Uid
    ) -> Advantages:
        return optimal_token_baseline(token_level_rewards, logit_norms, response_mask, uid)
