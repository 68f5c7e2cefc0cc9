"""Segments: sequences of a row that a model reads one by one.

The positions of a row restart at 0 where a segment begins, as transformers marks packed sequences; the first one begins
with the row. An episode whose context is rewritten has several: each starts with its own context, off `response_mask`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def begins(attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """The first token of each segment but a row's first: bool ``[batch sequence]``, the shape of both."""
    attended = attention_mask.bool()
    return attended & (position_ids == 0) & (attended.cumsum(1) > 1)


def restart(position_ids: Tensor, starts: Tensor) -> Tensor:
    """Positions that count from 0 again at the true elements of `starts`, bool ``[batch sequence]``."""
    own = torch.where(starts, position_ids, 0).cummax(1).values
    return position_ids - own
