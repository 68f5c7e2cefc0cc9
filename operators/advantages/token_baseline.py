"""A minimum-variance baseline for each token, weighted by accumulated logit-gradient norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.columns import Advantages, LogitNorms, ResponseMask, TokenLevelRewards, Uid
from flowrl.core.operators.operator import Operator
from flowrl.operators.advantages.groups import GroupBaseline, Groups
from flowrl.operators.advantages.per_token import has_holes, select
from flowrl.operators.explains import exact, tokens_on

_ROWS = 32
"""Rows per block of complete groups, small enough for the cache."""


@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards: Tensor, logit_norms: Tensor, response_mask: Tensor, uid: np.ndarray, zero_tail: bool = False
) -> Tensor:
    """Advantages against the minimum-variance baseline at each token (OTB: Li et al. 2026, arXiv:2602.07078).

    ``A_t = G_t - B_t`` and ``B_t = sum_i G_t W_t / sum_i W_t`` over the rows of a group that have a t-th token on the
    mask. ``G_t`` is the return from the row's t-th token on, and ``W_t = sum_{j <= t} w_j`` sums the squared gradient
    norms of its tokens so far, by the paper's logit-gradient proxy ``w = ||d log p / d logits||**2``. Where all weights
    of a group are 0, the baseline is the plain mean. A row that alone has a t-th token is its own baseline there, so
    its advantage is 0; with `zero_tail` the baseline there is 0, and the advantage the return.

    Args:
        token_level_rewards, response_mask, uid: see `Groups`.
        logit_norms: float ``[batch response]``, w; see `LogitNorm`.
        zero_tail: whether the baseline is 0 where a row alone has a t-th token; verl's default (``handle_zero_tail``).

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group whose rows have equal returns at each token.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    if logit_norms.shape != response_mask.shape:
        select(logit_norms, response_mask)  # raises
    out = torch.empty(response_mask.shape, device=response_mask.device)
    for rows, index in group.blocks(_ROWS):
        on = response_mask[rows]
        rewards, norms = select(token_level_rewards[rows], on), select(logit_norms[rows], on)
        out[rows] = _against_baseline(rewards, norms, on, index, zero_tail)
    return out


def _against_baseline(rewards: Tensor, norms: Tensor, mask: Tensor, group: Tensor, zero_tail: bool) -> Tensor:
    """`optimal_token_baseline` of a block of groups: float32 ``[rows response]``; `group` is int64 ``[rows]``."""
    order = mask.int().argsort(dim=1, descending=True, stable=True) if has_holes(mask) else None  # masked tokens last
    if order is not None:
        rewards, norms, mask = (x.gather(1, order) for x in (rewards, norms, mask))
    on, received = mask.double(), rewards.cumsum(1, dtype=torch.float64)
    returns = (received[:, -1:] - received + rewards) * on
    weights = norms.cumsum(1, dtype=torch.float64) * on

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(int(group.max()) + 1, x.shape[1]).index_add_(0, group, x)

    # Subtract the plain mean first, so that equal returns give exactly 0 for any weights.
    centered = (returns - (total(returns) / total(on).clamp(min=1))[group]) * on
    weight = total(weights)
    baseline = torch.where(weight == 0, 0.0, total(centered * weights) / weight.where(weight != 0, 1.0))  # NaN stays
    advantages = ((centered - baseline[group]) * on).float()
    if zero_tail:
        advantages = torch.where((total(on) == 1)[group], returns.float(), advantages)
    return advantages if order is None else torch.zeros_like(advantages).scatter_(1, order, advantages)


class OptimalTokenBaseline(GroupBaseline, Operator):
    """Returns minus a minimum-variance baseline for each token, as in OTB; see `optimal_token_baseline`.

    If a `RolloutCorrection` weights the advantages, its squared weights also weight the norms: insert
    `CorrectLogitNorms`.

    Args:
        zero_tail: whether the baseline is 0 where a row alone has a t-th token.
    """

    zero_tail: bool = False

    def __call__(
        self, token_level_rewards: TokenLevelRewards, logit_norms: LogitNorms, response_mask: ResponseMask, uid: Uid
    ) -> Advantages:
        return optimal_token_baseline(token_level_rewards, logit_norms, response_mask, uid, self.zero_tail)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        mask, rewards, norms = (inputs[name] for name in ("response_mask", "token_level_rewards", "logit_norms"))
        if not (on := tokens_on(mask, row)):
            return ""
        same = [other for other, uid in enumerate(inputs["uid"]) if uid == inputs["uid"][row] and mask[other].any()]
        returns = {other: float(select(rewards, mask)[other].sum(dtype=torch.float64)) for other in same}
        weights = {other: float(norms[other, tokens_on(mask, other)[0]]) for other in same}
        if not sum(weights.values()):
            weights = dict.fromkeys(same, 1.0)
        weighed = 0.0 if len(same) == 1 and self.zero_tail else sum(returns[other] * weights[other] for other in same)
        numbers = f"{returns[row]} - {weighed} / {sum(weights.values())}"
        after = exact(outputs["advantages"][row, on[0]])
        return f"token {on[0]}: return - sum(weight * return) / sum(weight) = {numbers} = {after}"
