"""Dr. GRPO, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.settings import refuse_lost
from flowrl.operators import PPOClip


def dr_grpo(
    reward_fn: str | Callable[..., Any], *, max_new_tokens: int = 1024, clip: float = 0.2, **settings: Any
) -> Graph:
    """GRPO "done right" (Liu et al. 2025, arXiv:2503.20783): without its two biases.

    Nothing is divided by the standard deviation of the group, which favours prompts that are very easy or very hard;
    nor by the length of the response, which favours long wrong answers: a constant takes its place. There is no KL.

    Args:
        reward_fn: scores a response; see `Reward`.
        max_new_tokens: the longest a response may get, and the constant.
        clip: PPO's epsilon.
        settings: others of `grpo`, except `kl_coef`.

    Raises:
        ParameterError: `kl_coef` was given.
    """
    refuse_lost("dr_grpo", settings, "kl_coef")
    loss = PPOClip(clip, aggregation="seq-mean-token-sum-norm", norm=max_new_tokens)
    return grpo(reward_fn, max_new_tokens=max_new_tokens, kl_coef=0.0, **settings).edit(
        set={"group_advantage.normalize_std": False, "update_actor.loss": loss}, name="dr_grpo"
    )
