"""What every rollout engine asks of its prompts, refused before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.core.protocols import Sampling
from flowrl.errors import DataError


def check_prompts(
    prompts: Tensor,
    mask: Tensor,
    row_ids: Sequence[str],
    sampling: Sampling,
    *,
    vocabulary: int,
    positions: int | None,
    folder: str,
) -> None:
    """Refuse prompts that a model cannot take.

    Args:
        prompts: int64 ``[batch prompt]``, padded on the left.
        mask: bool ``[batch prompt]``.
        row_ids: one per row.
        sampling: for how many tokens there must be room.
        vocabulary: token ids that the model has, from 0.
        positions: tokens that a sequence may have, None for any number.
        folder: of the model's tokeniser.

    Raises:
        DataError: shapes, padding, vocabulary or length are not what is expected.
    """
    if prompts.ndim != 2 or mask.shape != prompts.shape or mask.dtype != torch.bool or len(row_ids) != len(prompts):
        raise DataError(
            f"prompts are {tuple(prompts.shape)} with a {mask.dtype} mask {tuple(mask.shape)} and {len(row_ids)} "
            f"row ids; expected two [batch prompt] tensors, the mask a bool, and one id per row."
        )
    if len(prompts) == 0:
        return
    holes = (~mask[:, -1]) | (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if holes.any():
        raise DataError(
            f"prompt {int(holes.nonzero()[0])} is empty, padded on the right, or has a hole in its mask; expected "
            f"tokens padded on the left, as tokenizer.pad_left(rows) makes them."
        )
    tokens = prompts[mask]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise DataError(
            f"prompts hold token ids from {int(tokens.min())} to {int(tokens.max())}, but the model's vocabulary is 0 "
            f"to {vocabulary - 1}; make prompts with its own tokeniser ({folder!r})."
        )
    longest = int(mask.sum(1).max())
    if positions is not None and longest + sampling.max_new_tokens > positions:
        raise DataError(
            f"the longest prompt has {longest} tokens, and {longest} + max_new_tokens={sampling.max_new_tokens} is "
            f"more than the {positions} tokens that a sequence may have here, by the model or the engine's "
            f"max_model_len; raise that where the model allows it, lower max_new_tokens, or drop prompts of more than "
            f"{positions - sampling.max_new_tokens} tokens."
        )
