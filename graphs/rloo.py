"""RLOO, as an edit of PPO."""

from __future__ import annotations

from typing import Unpack

from flowrl.graph import Graph
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import PPOSettings, RewardFn, edit_of
from flowrl.operators import RLOOAdvantage


@edit_of(ppo, without=("gamma", "lam", "critic_warmup"), n=4, kl_coef=0.05)
def rloo(reward_fn: RewardFn, **settings: Unpack[PPOSettings]) -> Graph:
    """REINFORCE with a leave-one-out baseline (RLOO: Ahmadian et al. 2024, arXiv:2402.14740).

    The other answers to a prompt are each one's baseline, so the critic disappears. A whole response is one action: its
    tokens are summed, and not averaged. KL stays in the reward.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `ppo`, except those of its critic: `gamma`, `lam` and `critic_warmup`. With one mini-batch a
            step nothing is clipped, and the update is REINFORCE's.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, **settings).edit(
        replace={"gae": RLOOAdvantage()},
        set={"update_actor.aggregation": "seq-mean-token-sum"},
        drop=["whiten", "update_critic"],
        name="rloo",
    )
