"""Masked arithmetic by selection: what is off the mask is never computed with, so a NaN there stays out.

Multiplying by a mask would not do, since ``0 * nan`` is NaN, in the value and in its gradient. Everything here is in
float32 whatever the input. A token is "on the mask" where the mask is True and "off the mask" where it is False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.errors import DataError


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
    return torch.where(mask, x.float(), 0.0)


def select_rewards(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """`select` for per-token rewards or scores, which must not be lost: one off the mask is refused.

    A NaN off the mask is padding, not a reward, and stays out.

    Raises:
        DataError: some number off the mask is not zero; or as `select`.
    """
    selected = select(x, mask)
    stray = ~mask & (x != 0) & ~x.isnan()
    if stray.any():
        row, token = (int(i) for i in stray.nonzero()[0])
        raise DataError(
            f"{name}[{row}, {token}] is {float(x[row, token]):g} where the mask is False ({int(stray.sum())} such "
            f"tokens); a reward there would be lost. Put a terminal score on the last token where the mask is True."
        )
    return selected


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of `x` on the mask, float32, over everything or over `dim`; a sum over nothing is 0."""
    return select(x, mask).sum() if dim is None else select(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of `x` on the mask, float32, over everything or over `dim`; a mean over nothing is NaN."""
    return masked_sum(x, mask, dim) / (mask.sum() if dim is None else mask.sum(dim))
