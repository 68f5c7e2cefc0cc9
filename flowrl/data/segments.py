"""Segments: sequences of a row that a model reads one by one.

The positions of a row restart at 0 where a segment begins, as transformers marks packed sequences; the first one begins
with the row. An episode whose context is rewritten has several: each starts with its own context, off `response_mask`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.errors import DataError


def begins(attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """The first token of each segment but a row's first: bool ``[batch sequence]``, the shape of both."""
    attended = attention_mask.bool()
    return attended & (position_ids == 0) & (attended.cumsum(1) > 1)


def restart(position_ids: Tensor, starts: Tensor) -> Tensor:
    """Positions that count from 0 again at the true elements of `starts`, bool ``[batch sequence]``."""
    own = torch.where(starts, position_ids, 0).cummax(1).values
    return position_ids - own


def refuse_segments(attention_mask: Tensor, position_ids: Tensor, reader: str) -> None:
    """Raise `DataError` if a row has several segments, for a reader of single sequences."""
    rows = begins(attention_mask, position_ids).any(1).nonzero().flatten().tolist()
    if rows:
        raise DataError(
            f"{reader} reads a row as a single sequence, but row {rows[0]} ({len(rows)} of {len(attention_mask)}) has "
            f"several segments: its positions restart at 0. Keep episodes in one with Interact(rewrites='refuse'), or "
            f"use an operator that reads their text.",
            code="rows.segmented",
            reader=reader,
            row=rows[0],
        )
