"""RLOO, as an edit of PPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import edit_of
from flowrl.operators import RLOOAdvantage


@edit_of(ppo, without=("gamma", "lam", "critic_warmup"))
def rloo(reward_fn: str | Callable[..., Any] | None, *, n: int = 4, kl_coef: float = 0.05, **settings: Any) -> Graph:
    """REINFORCE with a leave-one-out baseline (RLOO: Ahmadian et al. 2024, arXiv:2402.14740).

    The other answers to a prompt are each one's baseline, so the critic disappears. A whole response is one action: its
    tokens are summed, and not averaged. KL stays in the reward.

    Args:
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt.
        kl_coef: the weight of KL to the reference, in the reward.
        settings: others of `ppo`, except those of its critic: `gamma`, `lam` and `critic_warmup`. With one mini-batch a
            step nothing is clipped, and the update is REINFORCE's.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, n=n, kl_coef=kl_coef, **settings).edit(
        replace={"gae": RLOOAdvantage()},
        set={"update_actor.aggregation": "seq-mean-token-sum"},
        drop=["whiten", "update_critic"],
        name="rloo",
    )
