"""Token ids of rows as padded tensors: prompts on the left, responses on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids (int64 ``[rows longest]``) and mask (bool) of rows padded on the left."""
    ids, mask = pad_right([row[::-1] for row in rows], pad)
    return ids.flip(1), mask.flip(1)


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids (int64 ``[rows longest]``) and mask (bool) of rows padded on the right."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    mask = torch.arange(max(map(len, rows), default=0)) < lengths[:, None]
    ids = torch.full(mask.shape, pad, dtype=torch.int64)
    ids[mask] = torch.tensor([id for row in rows for id in row], dtype=torch.int64)
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Positions of the tokens in `mask`, counted from 0 along each row; padding repeats the last position, or 0.

    Both are ``[batch sequence]``, bool and int64: ``cumsum(mask) - 1`` clamped at 0.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def assemble(
    prompts: Tensor, prompt_mask: Tensor, responses: Tensor, response_present: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Join prompts (padded on the left) and their responses (padded on the right) into sequences.

    Args:
        prompts: int64 ``[batch prompt]``.
        prompt_mask: bool ``[batch prompt]``.
        responses: int64 ``[batch response]``.
        response_present: bool ``[batch response]``, True at every token of the response, sampled or not.

    Returns:
        `input_ids` (int64), `attention_mask` (bool) and `position_ids` (int64), each ``[batch sequence]`` with
        ``sequence = prompt + response``.
    """
    mask = torch.cat([prompt_mask, response_present], dim=1)
    return torch.cat([prompts, responses], dim=1), mask, positions(mask)
