"""Dr. GRPO, as an edit of GRPO."""

from __future__ import annotations

from typing import Unpack

from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import GRPOSettings, RewardFn, edit_of


@edit_of(grpo, kl_coef=0.0)
def dr_grpo(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """GRPO "done right" (Liu et al. 2025, arXiv:2503.20783): without its two biases.

    Nothing is divided by the standard deviation of the group, which favours prompts that are very easy or very hard;
    nor by the length of the response, which favours long wrong answers: a constant takes its place.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `grpo`; `max_new_tokens` is also the constant, and `kl_coef` is 0, since the paper has no KL.
    """
    return grpo(reward_fn, **settings).edit(
        set={
            "group_advantage.normalize_std": False,
            "update_actor.aggregation": "seq-mean-token-sum-norm",
            "update_actor.norm": float(settings["max_new_tokens"]),
        },
        name="dr_grpo",
    )
