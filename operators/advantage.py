"""Advantages: generalised advantage estimation, group-relative advantages, and whitening.

The functions are plain torch; the operators below them are the same computations as nodes of a graph. Advantages are
constants of the policy gradient, so no gradient flows through any of these.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import Advantages, ResponseMask, Returns, TokenLevelRewards, Uid, Values
from flowrl.core.operator import Granularity, Operator
from flowrl.errors import DataError
from flowrl.operators.per_token import select, select_rewards


@torch.no_grad()
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), over the tokens on the mask.

    ``A_t = delta_t + gamma * lam * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``, where ``t + 1`` is the
    next token *on the mask*: a hole (say, the output of a tool) is stepped over, and the value and the advantage
    behind it are carried across undiscounted. The value after a row's last token is 0: every response counts as ended.

    Args:
        token_level_rewards: float ``[batch response]``; zero off the mask.
        values: float ``[batch response]``, the value before each token.
        response_mask: bool ``[batch response]``.
        gamma: discount, in [0, 1].
        lam: lambda, in [0, 1].

    Returns:
        advantages and ``returns = advantages + values``, both float32 ``[batch response]``, 0 off the mask.

    Raises:
        DataError: a reward off the mask, or shapes that differ.
    """
    rewards = select_rewards(token_level_rewards, response_mask, "token_level_rewards")
    values = select(values, response_mask)
    # Time goes first, so that each step of the loop reads contiguous memory.
    reward_t, value_t, mask_t = rewards.T.contiguous(), values.T.contiguous(), response_mask.T.contiguous()
    advantage_t = torch.zeros_like(reward_t)
    next_value = next_advantage = reward_t.new_zeros(reward_t.shape[1])
    for t in range(reward_t.shape[0] - 1, -1, -1):
        delta = reward_t[t] + gamma * next_value - value_t[t]
        next_advantage = torch.where(mask_t[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask_t[t], value_t[t], next_value)
        advantage_t[t] = next_advantage
    advantages = select(advantage_t.T, response_mask)
    return advantages, advantages + values


@torch.no_grad()
def group_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: np.ndarray,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages under outcome supervision (GRPO: Shao et al. 2024, arXiv:2402.03300, §4.1.2).

    A row's score is the sum of its rewards. Its advantage, the same at each of its tokens, is
    ``(score - mean) / (std + eps)`` over the rows that share its `uid`, where std is the sample standard deviation
    (``n - 1``), as in verl. Without `normalize_std` it is ``score - mean`` (Dr. GRPO: Liu et al. 2025,
    arXiv:2503.20783). A row that is masked entirely has no score and leaves the statistics of its group.

    Args:
        token_level_rewards: float ``[batch response]``; zero off the mask.
        response_mask: bool ``[batch response]``.
        uid: ``[batch]``, the group of each row; the rows of a group may stand anywhere in the batch.
        normalize_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group of equal scores.

    Raises:
        DataError: a group of one row, a reward off the mask, or shapes that differ.
    """
    # Scores are rounded to float32 and averaged in float64: the sum of n equal float32 numbers is exact there, so a
    # group of equal scores gets exactly 0, not rounding noise divided by eps.
    scores = select_rewards(token_level_rewards, response_mask, "token_level_rewards").sum(-1).double()
    if len(uid) != len(scores):
        raise DataError(f"uid names {len(uid)} rows but token_level_rewards has {len(scores)}; pass one uid per row.")
    names, index, sizes = np.unique(uid, return_inverse=True, return_counts=True)
    if (sizes == 1).any():
        lone = names[sizes == 1]
        raise DataError(
            f"{len(lone)} of {len(names)} groups have a single row, the first being uid {str(lone[0])!r}; a group "
            f"baseline over one row makes its advantage 0. Sample several rows per prompt, as with Repeat(8)."
        )
    group = torch.from_numpy(index.reshape(-1)).to(scores.device)
    live = response_mask.any(-1).double()

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(names)).index_add_(0, group, x)

    count = group_sum(live)
    mean = group_sum(scores) / count.clamp(min=1)  # the score of a masked row is 0 and adds nothing
    advantage = scores - mean[group]
    if normalize_std:
        variance = group_sum(live * advantage.square()) / (count - 1).clamp(min=1)
        advantage = advantage / (variance.sqrt()[group] + eps)
    return select(advantage.unsqueeze(-1).expand(response_mask.shape), response_mask)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`x` scaled to unit variance over all tokens on the mask, and to zero mean if `shift_mean`.

    ``(x - mean) * rsqrt(var + 1e-8)`` with the unbiased variance, as verl's and TRL's ``masked_whiten``.

    Args:
        x: float ``[batch response]``.
        mask: bool ``[batch response]``.
        shift_mean: if False, the mean is put back after scaling.

    Returns:
        float32 ``[batch response]``, 0 off the mask.

    Raises:
        DataError: exactly one token on the mask, whose variance is not defined; or shapes that differ.
    """
    selected = select(x, mask)
    numbers = selected[mask].double()  # in float64 equal numbers have a variance of exactly 0
    if numbers.numel() == 0:
        return selected
    if numbers.numel() == 1:
        raise DataError(
            "whitening found a single token on the mask, and the variance of one number is not defined; whiten a "
            "larger batch, or drop Whiten from the graph."
        )
    mean = numbers.mean()
    whitened = (selected.double() - mean) * torch.rsqrt(numbers.var() + 1e-8)
    return select(whitened if shift_mean else whitened + mean, mask)


class GAEOutput(NamedTuple):
    """Advantages, and the returns that a critic is trained on (taken before any whitening)."""

    advantages: Advantages
    returns: Returns


class GAE(Operator):
    """Generalised advantage estimation; see `gae`.

    Args:
        gamma: discount.
        lam: lambda: 0 is the one-step advantage, 1 the whole return less the value.
    """

    granularity: ClassVar[Granularity] = "row"

    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)

    def __call__(
        self, token_level_rewards: TokenLevelRewards, values: Values, response_mask: ResponseMask
    ) -> GAEOutput:
        return GAEOutput(*gae(token_level_rewards, values, response_mask, self.gamma, self.lam))


class GroupAdvantage(Operator):
    """Group-relative advantages, as in GRPO; see `group_advantage`.

    Args:
        normalize_std: divide by the standard deviation of the group; False is Dr. GRPO.
        eps: added to the standard deviation.
    """

    granularity: ClassVar[Granularity] = "group"

    normalize_std: bool = True
    eps: float = Field(default=1e-6, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline"}``: it needs several rows per prompt."""
        return frozenset({"group baseline"})

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, uid: Uid) -> Advantages:
        return group_advantage(token_level_rewards, response_mask, uid, self.normalize_std, self.eps)


class Whiten(Operator):
    """Advantages scaled to unit variance (and zero mean) over the batch; see `whiten`.

    Args:
        shift_mean: if False, the mean stays as it was.
    """

    granularity: ClassVar[Granularity] = "batch"

    shift_mean: bool = True

    def __call__(self, advantages: Advantages, response_mask: ResponseMask) -> Advantages:
        return whiten(advantages, response_mask, self.shift_mean)
