"""Numbers per token: what a mask lets through, and estimates of KL.

What is off the mask is left out by selection and never computed with. Multiplying by a mask would not do, since
``0 * nan`` is NaN, in the value and in its gradient. Everything here is in float32 whatever the input. A token is "on
the mask" where the mask is True and "off the mask" where it is False.

KL estimators see the log-prob of the sampled token only. With ``d = log_prob - ref_log_prob`` and the token sampled
from the policy (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html):

- ``k1 = d``: unbiased, of either sign, the largest variance;
- ``k2 = d**2 / 2``: biased, never negative;
- ``k3 = exp(-d) - 1 + d``: unbiased, never negative;
- ``abs = |d|``: a distance, not an estimate of KL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import DataError

Estimator = Literal["k1", "k2", "k3", "abs"]

MAX_EXPONENT = 20.0
"""Exponents of log-ratios stop here, at a ratio of 5e8, so that nothing overflows in float32 (exp(89) does)."""

_BLOCK = 2**18  # numbers of a block of rows


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in float32 on the mask and exactly 0 off it; no gradient reaches `x` off the mask.

    Args:
        x: any float dtype, of the shape of `mask`.
        mask: bool.

    Raises:
        DataError: the shapes differ (nothing is broadcast), or the mask is not bool.
    """
    if mask.dtype != torch.bool:
        raise DataError(f"the mask is {mask.dtype}, but a mask is torch.bool; pass mask.bool().")
    if x.shape != mask.shape:
        raise DataError(
            f"a tensor of shape {tuple(x.shape)} meets a mask of shape {tuple(mask.shape)}; both must have one shape, "
            f"as nothing is broadcast; expand the tensor where that is meant."
        )
    x = x.float()
    if x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        return torch.where(mask, x, 0.0)
    # On a CPU `where` branches at each element; a mask of 32 ones or zeros gives the same bits at once.
    return mask.to(torch.int32).neg_().bitwise_and_(x.view(torch.int32)).view(torch.float32)


def has_holes(mask: Tensor) -> bool:
    """Whether some row of a mask, bool ``[batch response]``, is True behind a token where it is False."""
    on = mask.view(torch.int8)  # comparisons of bools are not vectorised
    return bool((on[:, 1:] > on[:, :-1]).view(torch.int8).sum(dtype=torch.int32))


def equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers; NaN equals nothing."""
    if a.device.type != "cpu" or torch.bfloat16 in (a.dtype, b.dtype):
        return torch.equal(a.float(), b.float())
    return np.array_equal(a.detach().numpy(), b.detach().numpy())  # four times as fast as torch


def select_rewards(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """`select` for per-token rewards or scores, which must not be lost: one off the mask is refused.

    A NaN off the mask is padding, not a reward, and stays out.

    Raises:
        DataError: some number off the mask is not zero; or as `select`.
    """
    selected = select(x, mask)
    if equal_numbers(selected, x):
        return selected
    stray = ~mask & (x != 0) & ~x.isnan()
    if stray.any():
        row, token = (int(i) for i in stray.nonzero()[0])
        raise DataError(
            f"{name}[{row}, {token}] is {float(x[row, token]):g} where the mask is False ({int(stray.sum())} such "
            f"tokens); a reward there would be lost. Put a terminal score on the last token where the mask is True."
        )
    return selected


def row_blocks(mask: Tensor) -> Iterator[slice]:
    """All rows, some at a time: on a CPU so few that what is made of them stays in the cache."""
    step = max(1, len(mask))
    if mask.device.type == "cpu":
        step = max(1, _BLOCK * step // max(1, mask.numel()))
    for start in range(0, len(mask), step):
        yield slice(start, start + step)


def blocks_of_rewards(x: Tensor, mask: Tensor, name: str) -> Iterator[tuple[slice, Tensor]]:
    """`select_rewards` of some rows at a time, and which they are.

    Raises:
        DataError: as `select_rewards`, with the numbers of the rows in the whole.
    """
    padded = x.shape != mask.shape or mask.dtype != torch.bool
    if padded:
        select_rewards(x, mask, name)  # refuses
    for rows in row_blocks(mask):
        selected = select(x[rows], mask[rows])
        if not padded and not equal_numbers(selected, x[rows]):
            select_rewards(x, mask, name)
            padded = True  # with NaN, which is no reward
        yield rows, selected


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, estimator: Estimator) -> Tensor:
    """The per-token estimate of KL(policy || reference); differentiable in `log_prob`.

    verl calls these estimators ``kl``, ``mse``, ``low_var_kl`` and ``abs``. Unlike verl's, the value of k3 is not
    clamped to ±10: that would end the pull of the reference just where the policy has gone far. Only the exponent is
    kept below `MAX_EXPONENT`; beyond (the reference 5e8 times as likely as the policy) k3 is flat.

    Args:
        log_prob: float, any shape: log-prob of the sampled tokens under the policy.
        ref_log_prob: the same under the reference.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.

    Returns:
        float32 of that shape.

    Raises:
        DataError: the shapes differ.
    """
    if log_prob.shape != ref_log_prob.shape:
        raise DataError(
            f"log_prob has shape {tuple(log_prob.shape)} and ref_log_prob {tuple(ref_log_prob.shape)}; pass log-probs "
            f"of the same tokens."
        )
    d = log_prob.float() - ref_log_prob.float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        exponent = (-d).clamp(max=MAX_EXPONENT)
        return torch.expm1(exponent) - exponent  # expm1 keeps the digits that exp(x) - 1 loses at small x
    return d.abs()
