"""Advantages of single rows: generalized advantage estimation (GAE), returns and whitening; groups are in `.groups`.

The functions are plain PyTorch; the operators below them are the same computations as nodes of a graph. Advantages are
constants of the policy gradient, so none of these functions records a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowrl.columns import (
    Advantages,
    ResponseMask,
    Returns,
    RowScores,
    TokenLevelRewards,
    TokenLevelScores,
    Values,
)
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.errors import DataError
from flowrl.operators.advantages.per_token import has_holes, select, select_rewards
from flowrl.operators.explains import exact, tokens_on

_BLOCK = 32  # tokens per block of the scan


@torch.no_grad()
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), over the tokens on the mask.

    ``A_t = delta_t + gamma * lam * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``, where ``t + 1`` is the
    next token *on the mask*: holes, such as the output of a tool, are skipped without a discount. The value after a
    row's last token is 0, so every response counts as terminated.

    It is computed as ``A_t = G_t - V_t``, with the returns ``G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam *
    G_{t+1})``: the same sums with less rounding, since no value is added and later subtracted.

    Args:
        token_level_rewards: float ``[batch response]``; zero off the mask.
        values: float ``[batch response]``, the value before each token.
        response_mask: bool ``[batch response]``.
        gamma: discount, in [0, 1].
        lam: lambda, in [0, 1]; a float ``[batch]`` tensor for one value per row.

    Returns:
        advantages and ``returns = advantages + values``, both float32 ``[batch response]``, 0 off the mask.
    """
    rewards = select_rewards(token_level_rewards, response_mask, "token_level_rewards")
    values = select(values, response_mask)
    discount = gamma * torch.as_tensor(lam, dtype=torch.float64, device=rewards.device).reshape(-1, 1)
    # G_t = r_t + W_{t+1} with W_t = gamma * (1 - lam) * V_t + gamma * lam * G_t, that is,
    # W_t = w_t + gamma * lam * W_{t+1} with w = gamma * lam * r + gamma * (1 - lam) * V.
    w = (discount.float() * rewards).addcmul_((gamma - discount).float(), values)
    returns = rewards.add_(_next_sums(w, response_mask, discount))
    return torch.sub(returns, values, out=values), returns


def _next_sums(w: Tensor, mask: Tensor, discount: Tensor) -> Tensor:
    """``W_{t+1}`` with ``W_t = w_t + discount * W_{t+1}`` over the tokens on the mask, 0 off it; overwrites `w`."""
    rows, width = w.shape
    if not has_holes(mask):
        sums = _discounted_sums(w, discount)
        w[:, :-1], w[:, -1:] = sums[:, 1:width], 0.0
        return w
    blocks = width // _BLOCK + 1  # at least one column of padding
    number = mask.sum(-1, dtype=torch.int32).long()
    begins = torch.arange(rows, device=mask.device) * (blocks * _BLOCK)
    packed = (begins - number.cumsum(0) + number).repeat_interleave(number)
    packed += torch.arange(len(packed), device=mask.device)
    left_aligned = w.new_zeros(rows * blocks * _BLOCK).scatter_(0, packed, _masked_select(w, mask))
    sums = _discounted_sums(left_aligned.view(rows, -1), discount)
    return _masked_put(w.zero_(), mask, sums.flatten()[1:].index_select(0, packed))


def _discounted_sums(x: Tensor, discount: Tensor) -> Tensor:
    """``y_t = x_t + discount * y_{t+1}`` along each row, float32 ``[rows tokens]``, padded to full blocks by 0."""
    rows, width = x.shape
    blocks = -(-width // _BLOCK)
    y = F.pad(x, (0, blocks * _BLOCK - width)).view(rows, blocks, _BLOCK)
    other = torch.empty_like(y)
    reach = 1
    while reach < _BLOCK:
        power = (discount**reach).float().unsqueeze(-1)
        torch.addcmul(y[..., :-reach], power, y[..., reach:], out=other[..., :-reach])
        other[..., -reach:] = y[..., -reach:]
        y, other, reach = other, y, 2 * reach
    if blocks > 1:
        later = _discounted_sums(y[:, 1:, 0].contiguous(), discount**_BLOCK)[:, : blocks - 1]
        powers = discount ** torch.arange(_BLOCK, 0, -1, device=x.device)
        y[:, :-1].addcmul_(powers.float().unsqueeze(1), later.unsqueeze(-1))
    return y.view(rows, blocks * _BLOCK)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x[mask]
    return torch.from_numpy(x.numpy()[mask.numpy()])  # 7x faster than torch


def _masked_put(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Write `values` into `x` where the mask is True; returns `x`."""
    if x.device.type != "cpu":
        x[mask] = values
    else:
        x.numpy()[mask.numpy()] = values.numpy()
    return x


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, unbiased: bool = True) -> Tensor:
    """Scale `x` to unit variance over all tokens on the mask, and to zero mean if `shift_mean`.

    ``(x - mean) * rsqrt(var + 1e-8)`` with the unbiased variance, as ``masked_whiten`` of verl and TRL.

    Args:
        x: float ``[batch response]``.
        mask: bool ``[batch response]``.
        shift_mean: if False, the mean is added back after scaling.
        unbiased: divide the sum of squares by the tokens less 1; else by the tokens, as OpenRLHF.

    Returns:
        float32 ``[batch response]``, 0 off the mask.
    """
    selected = select(x, mask)
    number = int(mask.count_nonzero())
    if number == 0:
        return selected
    if number == 1:
        raise DataError(
            "Whitening needs at least two tokens on the mask, found one: its variance is undefined. Use a larger "
            'batch, or drop the node: edit(drop=["whiten"]).',
            code="advantage.single-token",
            expected=2,
            found=1,
        )
    mean = selected.sum(dtype=torch.float64) / number  # in float64 the mean of equal numbers is exact
    rest = mean - mean.float()
    centered = select(selected.sub_(mean.float()).sub_(rest.float()), mask)
    variance = torch.linalg.vector_norm(centered, dtype=torch.float64).square() / (number - unbiased)
    scale = torch.rsqrt(variance + 1e-8)
    if shift_mean and scale.isfinite():
        return centered.mul_(scale.float())
    return select(centered.mul_(scale.float()).add_(0.0 if shift_mean else mean.float()), mask)


def explain_gae(
    row: int, inputs: Mapping[str, Any], advantages: Tensor, gamma: float, lam: float, of: str = "token"
) -> str:
    """The equation of `gae` at the first and at the last token of a row, with its numbers."""
    rewards, values = inputs["token_level_rewards"][row], inputs["values"][row]
    lines = []
    on = tokens_on(inputs["response_mask"], row)
    for token, after in zip(on, [*on[1:], None][: len(on)], strict=True):
        if after is not None and token != on[0]:
            continue
        delta = f"{exact(rewards[token])} - {exact(values[token])}"
        what = f"{of} {token}: r - V = {delta}"
        if after is not None:
            later = f" + {gamma} * {exact(values[after])} + {gamma} * {exact(lam)} * {exact(advantages[row, after])}"
            what = f"{of} {token}: r - V + gamma * V' + gamma * lam * A' = {delta}{later}"
        lines.append(f"{what} = {exact(advantages[row, token])}")
    return "\n".join(lines)


class GAEOutput(NamedTuple):
    """Advantages, and the returns that train a critic (before any whitening)."""

    advantages: Advantages
    returns: Returns


class GAE(Operator):
    """Generalized advantage estimation; see `gae`.

    Args:
        gamma: discount.
        lam: lambda: 0 is the one-step advantage, 1 the full return minus the value.
    """

    granularity: ClassVar[Granularity] = "row"

    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)

    def __call__(
        self, token_level_rewards: TokenLevelRewards, values: Values, response_mask: ResponseMask
    ) -> GAEOutput:
        return GAEOutput(*gae(token_level_rewards, values, response_mask, self.gamma, self.lam))

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        return explain_gae(row, inputs, outputs["advantages"], self.gamma, self.lam)


class DecoupledGAE(Operator):
    """GAE with one lambda for the policy and another for the critic (VAPO: Yue et al. 2025, arXiv:2504.05118).

    With lambda below 1, a reward at the end of a long response hardly reaches the returns of its first tokens, so the
    critic uses lambda 1; the policy uses a smaller lambda for less variance.

    Args:
        gamma: discount.
        lam: lambda of the policy.
        alpha: if given, the policy's lambda is ``max(0, 1 - 1 / (alpha * l))`` for a response of l tokens, and `lam` is
            ignored (length-adaptive GAE; 0.05 in the paper).
        critic_lam: lambda of the returns.
    """

    granularity: ClassVar[Granularity] = "row"

    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    alpha: float | None = Field(default=None, gt=0)
    critic_lam: float = Field(default=1.0, ge=0, le=1)

    def __call__(
        self, token_level_rewards: TokenLevelRewards, values: Values, response_mask: ResponseMask
    ) -> GAEOutput:
        advantages, _ = gae(token_level_rewards, values, response_mask, self.gamma, self._lam(response_mask))
        _, returns = gae(token_level_rewards, values, response_mask, self.gamma, self.critic_lam)
        return GAEOutput(advantages, returns)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        lam = self._lam(inputs["response_mask"])
        own = float(lam[row]) if isinstance(lam, Tensor) else lam
        return explain_gae(row, inputs, outputs["advantages"], self.gamma, own)

    def _lam(self, response_mask: Tensor) -> float | Tensor:
        """Lambda of the policy, or that of each row."""
        if self.alpha is None:
            return self.lam
        return (1.0 - 1.0 / (self.alpha * response_mask.sum(-1).clamp(min=1))).clamp(min=0.0)


class ReturnToGo(Operator):
    """The discounted return from each token on, without baseline or critic (REINFORCE: Williams 1992).

    ``A_t = sum_k gamma^k r_{t+k}`` over the tokens on the mask. Follow it by `Whiten` to use the mean over the batch as
    baseline, as in REINFORCE++ (Hu 2025, arXiv:2501.03262).

    Args:
        gamma: discount.
    """

    granularity: ClassVar[Granularity] = "row"

    gamma: float = Field(default=1.0, ge=0, le=1)

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask) -> Advantages:
        return gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask, self.gamma, 1.0)[0]

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        rewards, returns = inputs["token_level_rewards"][row], outputs["advantages"][row]
        on = tokens_on(inputs["response_mask"], row)
        if len(on) < 2:
            return ""
        first, second = on[:2]
        later = f"{exact(rewards[first])} + {self.gamma} * {exact(returns[second])}"
        return f"token {first}: r + gamma * A' = {later} = {exact(returns[first])}"


class RowScore(Operator):
    """The score of each response: the sum over its tokens, float32 ``[batch]``.

    Without the token axis, it can serve as the baseline of other responses to the same prompts.
    """

    granularity: ClassVar[Granularity] = "row"

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> RowScores:
        return select_rewards(token_level_scores, response_mask, "token_level_scores").sum(-1)


class SubtractBaseline(Operator):
    """Subtract one baseline per row from its advantages, as in ReMax (Li et al. 2023, arXiv:2310.10505).

    ``A_t - b(x)``. The policy gradient stays unbiased if b depends on the prompt only, not on the row's own response.
    """

    granularity: ClassVar[Granularity] = "row"

    def __call__(self, advantages: Advantages, baseline: RowScores, response_mask: ResponseMask) -> Advantages:
        return select(advantages - baseline.unsqueeze(-1), response_mask)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not (on := tokens_on(inputs["response_mask"], row)):
            return ""
        before, baseline = exact(inputs["advantages"][row, on[0]]), exact(inputs["baseline"][row])
        return f"token {on[0]}: A - baseline = {before} - {baseline} = {exact(outputs['advantages'][row, on[0]])}"


class Whiten(Operator):
    """Scale advantages to unit variance (and zero mean) over the batch; see `whiten`.

    Args:
        shift_mean: if False, the mean does not change.
        unbiased: divide the sum of squares by the tokens less 1, as verl and TRL; else by the tokens, as OpenRLHF.
    """

    granularity: ClassVar[Granularity] = "batch"

    shift_mean: bool = True
    unbiased: bool = True

    @property
    def effects(self) -> frozenset[str]:
        """``{"scaled"}``."""
        return frozenset({Effect.SCALED})

    def __call__(self, advantages: Advantages, response_mask: ResponseMask) -> Advantages:
        return whiten(advantages, response_mask, self.shift_mean, self.unbiased)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        on = tokens_on(mask := inputs["response_mask"], row)
        if not on:
            return ""
        all_ = inputs["advantages"][mask].double()
        before, after = inputs["advantages"][row, on[0]], outputs["advantages"][row, on[0]]
        scaled = (
            f"({exact(before)} - {exact(all_.mean())}) / {exact((all_.var(correction=self.unbiased) + 1e-8).sqrt())}"
        )
        back = "" if self.shift_mean else f" + {exact(all_.mean())}"
        return f"token {on[0]}: (A - mean) / std{' + mean' if back else ''} = {scaled}{back} = {exact(after)}"
