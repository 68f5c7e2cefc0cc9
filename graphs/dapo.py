"""DAPO, as an edit of GRPO."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import GRPOSettings, RewardFn, edit_of
from flowrl.operators import Collect, MaskOverlong, OverlongPenalty, Spread


@edit_of(grpo, n=16, kl_coef=0.0)
def dapo(
    reward_fn: RewardFn,
    *,
    groups: int = 32,
    overlong_buffer: int | None = None,
    clip_high: float = 0.28,
    **settings: Unpack[GRPOSettings],
) -> Graph:
    """GRPO for long answers, on prompts that teach (DAPO: Yu et al. 2025, arXiv:2503.14476).

    There is no KL, but clip-higher (eq. 10); dynamic sampling (eq. 11): further prompts take the place of those whose
    answers are all right or all wrong; the mean over tokens (eq. 12), which is GRPO's here, too; and overlong answers
    (§3.4) lose score as they come near the end (eq. 13), and count for nothing in the loss if they were cut off. By
    ``edit(drop=["collect"])`` there is no dynamic sampling; so for ``"overlong_penalty"`` and ``"mask_overlong"``.

    Args:
        reward_fn: scores a response; see `Reward`.
        groups: prompts that are trained on in a step; see `Collect`.
        overlong_buffer: over how many of the last tokens the penalty grows; None is a fifth, as in the paper.
        clip_high: how far above 1 the ratio counts; `clip` is how far below.
        settings: of `grpo`; `kl_coef` is 0, since the paper has no KL.
    """
    max_new_tokens = settings["max_new_tokens"]
    buffer = max(1, max_new_tokens // 5) if overlong_buffer is None else overlong_buffer
    return grpo(reward_fn, **settings).edit(
        set={"update_actor.loss.clip_high": clip_high},
        insert={
            "collect": After("reward", Collect(Spread(), groups=groups)),
            "overlong_penalty": After("reward", OverlongPenalty(max_new_tokens, buffer)),
            "mask_overlong": After("group_advantage", MaskOverlong(max_new_tokens - 1)),
        },
        wire={"update_actor.rollout.response_mask": "mask_overlong.response_mask"},
        name="dapo",
    )
