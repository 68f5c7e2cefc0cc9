"""REINFORCE++, as an edit of PPO, and with a group baseline, as an edit of GRPO."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import GRPOSettings, PPOSettings, RewardFn, edit_of
from flowrl.operators import ReturnToGo, Whiten


@edit_of(ppo, without=("lam", "critic_warmup"))
def reinforce_plus_plus(reward_fn: RewardFn, **settings: Unpack[PPOSettings]) -> Graph:
    """PPO without a critic (REINFORCE++: Hu 2025, arXiv:2501.03262): the mean over the batch is the baseline.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `ppo`, except `lam` and `critic_warmup`; KL is in the reward.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, **settings).edit(
        replace={"gae": ReturnToGo(settings["gamma"])}, drop=["update_critic"], name="reinforce_plus_plus"
    )


@edit_of(grpo)
def reinforce_plus_plus_baseline(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """REINFORCE++ with a group baseline (Hu 2025, arXiv:2501.03262): GRPO, but the scale is that of the whole batch.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `grpo`; `kl_coef`, the weight of KL by k2, is above 0.
    """
    return grpo(reward_fn, **settings).edit(
        set={"group_advantage.normalize_std": False, "update_actor.kl.estimator": "k2"},
        insert={"whiten": After("group_advantage", Whiten())},
        name="reinforce_plus_plus_baseline",
    )
