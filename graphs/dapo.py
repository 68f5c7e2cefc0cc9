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
    """GRPO with dynamic sampling for long responses (DAPO: Yu et al. 2025, arXiv:2503.14476).

    It has clip-higher (eq. 10); dynamic sampling (eq. 11), which replaces prompts with equal scores by further ones;
    the mean over tokens (eq. 12), the default of `grpo`; and, for overlong responses (§3.4), a penalty near the maximum
    length (eq. 13) and a mask on truncated ones. Each part can be dropped: ``edit(drop=["collect"])``,
    ``"overlong_penalty"``, ``"mask_overlong"``.

    Args:
        reward_fn: scores a response; see `Reward`.
        groups: prompts to train on per step; see `Collect`.
        overlong_buffer: tokens over which the penalty grows; None is a fifth of `max_new_tokens`, as in the paper.
        clip_high: the upper bound of the ratio is ``1 + clip_high``; the lower is ``1 - clip``.
        settings: settings of `grpo`; `kl_coef` is 0, as in the paper.
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
