"""REINFORCE++, as an edit of PPO, and with a group baseline, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import edit_of
from flowrl.operators import ReturnToGo, Whiten


@edit_of(ppo, without=("lam", "critic_warmup"))
def reinforce_plus_plus(
    reward_fn: str | Callable[..., Any] | None, *, n: int = 1, gamma: float = 1.0, **settings: Any
) -> Graph:
    """PPO without a critic (REINFORCE++: Hu 2025, arXiv:2501.03262): the mean over the batch is the baseline.

    Args:
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt.
        gamma: discount.
        settings: others of `ppo`, except `lam` and `critic_warmup`; KL is in the reward.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, n=n, **settings).edit(
        replace={"gae": ReturnToGo(gamma)}, drop=["update_critic"], name="reinforce_plus_plus"
    )


@edit_of(grpo)
def reinforce_plus_plus_baseline(
    reward_fn: str | Callable[..., Any] | None, *, n: int = 8, kl_coef: float = 0.001, **settings: Any
) -> Graph:
    """REINFORCE++ with a group baseline (Hu 2025, arXiv:2501.03262): GRPO, but the scale is that of the whole batch.

    Args:
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt, the size of a group.
        kl_coef: the weight of KL (by k2) to the reference, in the loss; above 0.
        settings: others of `grpo`.
    """
    return grpo(reward_fn, n=n, kl_coef=kl_coef, **settings).edit(
        set={"group_advantage.normalize_std": False, "update_actor.kl.estimator": "k2"},
        insert={"whiten": After("group_advantage", Whiten())},
        name="reinforce_plus_plus_baseline",
    )
