"""Per-token numbers: masked selection and KL estimators.

A token is "on the mask" where the mask is True and "off the mask" where it is False. Values off the mask are selected
away, not multiplied by 0: ``0 * nan`` is NaN, in the value and in its gradient. All results are float32.

KL estimators use the log-prob of the sampled token only. With ``d = log_prob - ref_log_prob`` and the token sampled
from the policy (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html):

- ``k1 = d``: unbiased, of either sign, the largest variance;
- ``k2 = d**2 / 2``: biased, never negative;
- ``k3 = exp(-d) - 1 + d``: unbiased, never negative;
- ``abs = |d|``: a distance, not an estimate of KL;
- ``k1+``, ``k3+``: the value of k1 or k3 with the gradient of k2, as in verl. Without a gradient they are k1 and k3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import DataError

Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]

MAX_EXPONENT = 20.0
"""Bound on the exponent of log-ratios, a ratio of 5e8: exp(89) overflows float32."""

_BLOCK = 2**18  # elements of a block of rows


def select(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` in float32 on the mask and exactly 0 off it; no gradient reaches `x` off the mask.

    Args:
        x: any float dtype, of the shape of `mask`.
        mask: bool.
    """
    if mask.dtype != torch.bool:
        raise DataError(
            f"The mask has dtype {mask.dtype}, expected torch.bool. Pass mask.bool().",
            code="rows.shape-mismatch",
            expected="torch.bool",
            found=mask.dtype,
        )
    if x.shape != mask.shape:
        raise DataError(
            f"A tensor has shape {tuple(x.shape)} and its mask {tuple(mask.shape)}; the shapes must be equal, since "
            f"masks are not broadcast. Expand the tensor first.",
            code="rows.shape-mismatch",
            expected=tuple(mask.shape),
            found=tuple(x.shape),
        )
    x = x.float()
    if x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        return torch.where(mask, x, 0.0)
    # On a CPU `where` branches at each element; an integer mask of all ones or zeros gives the same bits faster.
    return mask.to(torch.int32).neg_().bitwise_and_(x.view(torch.int32)).view(torch.float32)


def has_holes(mask: Tensor) -> bool:
    """Whether any row of a mask, bool ``[batch response]``, has a True after a False."""
    on = mask.view(torch.int8)  # comparisons of bools are not vectorized
    return bool((on[:, 1:] > on[:, :-1]).view(torch.int8).sum(dtype=torch.int32))


def equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape are equal element by element; NaN equals nothing."""
    if a.device.type != "cpu" or torch.bfloat16 in (a.dtype, b.dtype):
        return torch.equal(a.float(), b.float())
    return np.array_equal(a.detach().numpy(), b.detach().numpy())  # four times as fast as torch


def select_rewards(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """`select` for per-token rewards or scores: refuses a reward off the mask, which would be lost.

    A NaN off the mask counts as padding.
    """
    selected = select(x, mask)
    if equal_numbers(selected, x):
        return selected
    stray = ~mask & (x != 0) & ~x.isnan()
    if stray.any():
        row, token = (int(i) for i in stray.nonzero()[0])
        raise DataError(
            f"{name}[{row}, {token}] is {float(x[row, token]):g} off the mask ({int(stray.sum())} such tokens), so the "
            f"reward would be lost. Put a terminal score on the last token where the mask is True.",
            code="reward.off-mask",
            column=name,
            row=row,
            token=token,
        )
    return selected


def row_blocks(mask: Tensor) -> Iterator[slice]:
    """Slices that cover all rows; on a CPU each is small enough for the cache."""
    step = max(1, len(mask))
    if mask.device.type == "cpu":
        step = max(1, _BLOCK * step // max(1, mask.numel()))
    for start in range(0, len(mask), step):
        yield slice(start, start + step)


def blocks_of_rewards(x: Tensor, mask: Tensor, name: str) -> Iterator[tuple[slice, Tensor]]:
    """`select_rewards` in blocks: the rows of each, and its rewards; errors have the row numbers of the batch."""
    padded = x.shape != mask.shape or mask.dtype != torch.bool
    if padded:
        select_rewards(x, mask, name)  # raises
    for rows in row_blocks(mask):
        selected = select(x[rows], mask[rows])
        if not padded and not equal_numbers(selected, x[rows]):
            select_rewards(x, mask, name)
            padded = True  # with NaN
        yield rows, selected


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, estimator: Estimator, bound: float | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference); differentiable in `log_prob`.

    verl calls these estimators ``kl``, ``mse``, ``low_var_kl`` and ``abs``. By default the value of k3 is not clamped
    to ±10 as in verl, which removes the gradient where the policy is far from the reference. Only its exponent is
    clamped, to `MAX_EXPONENT`; beyond it (the reference 5e8 times as likely as the policy) k3 is constant.

    Args:
        log_prob: float, any shape: log-probs of the sampled tokens under the policy.
        ref_log_prob: float, same shape: log-probs under the reference.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"abs"``, ``"k1+"`` or ``"k3+"``.
        bound: bound on the absolute value of an estimate, in nats; None is none. Beyond it there is no gradient, except
            for ``k1+`` and ``k3+``, which have that of k2.

    Returns:
        float32, same shape.
    """
    if bound is not None and estimator not in ("k1+", "k3+"):
        return kl_penalty(log_prob, ref_log_prob, estimator).clamp(-bound, bound)
    if log_prob.shape != ref_log_prob.shape:
        raise DataError(
            f"log_prob has shape {tuple(log_prob.shape)} and ref_log_prob {tuple(ref_log_prob.shape)}. Pass log-probs "
            f"of the same tokens.",
            code="rows.shape-mismatch",
            expected=tuple(log_prob.shape),
            found=tuple(ref_log_prob.shape),
        )
    if estimator in ("k1+", "k3+"):
        value = kl_penalty(log_prob, ref_log_prob, "k1" if estimator == "k1+" else "k3", bound).detach()
        of_gradient = kl_penalty(log_prob, ref_log_prob, "k2")
        return value + (of_gradient - of_gradient.detach())
    d = log_prob.float() - ref_log_prob.float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        exponent = (-d).clamp(max=MAX_EXPONENT)
        return torch.expm1(exponent) - exponent  # more precise than exp(x) - 1 for small x
    return d.abs()
