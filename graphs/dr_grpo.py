"""Dr. GRPO, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import edit_of


@edit_of(grpo)
def dr_grpo(
    reward_fn: str | Callable[..., Any] | None, *, max_new_tokens: int = 1024, kl_coef: float = 0.0, **settings: Any
) -> Graph:
    """GRPO "done right" (Liu et al. 2025, arXiv:2503.20783): without its two biases.

    Nothing is divided by the standard deviation of the group, which favours prompts that are very easy or very hard;
    nor by the length of the response, which favours long wrong answers: a constant takes its place.

    Args:
        reward_fn: scores a response; see `Reward`.
        max_new_tokens: the longest a response may get, and the constant.
        kl_coef: the weight of KL to the reference, in the loss; the paper has none.
        settings: others of `grpo`.
    """
    return grpo(reward_fn, max_new_tokens=max_new_tokens, kl_coef=kl_coef, **settings).edit(
        set={
            "group_advantage.normalize_std": False,
            "update_actor.aggregation": "seq-mean-token-sum-norm",
            "update_actor.norm": float(max_new_tokens),
        },
        name="dr_grpo",
    )
