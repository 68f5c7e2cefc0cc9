"""REINFORCE with a baseline instead of a critic: RLOO, REINFORCE++ and ReMax, as edits of PPO, GRPO and each other."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import GRPOSettings, PPOSettings, RewardFn, edit_of
from flowrl.operators import Generate, ReturnToGo, Reward, RLOOAdvantage, RowScore, SubtractBaseline, Whiten


@edit_of(ppo, without=("gamma", "lam", "critic_warmup"), n=4, kl_coef=0.05)
def rloo(reward_fn: RewardFn, **settings: Unpack[PPOSettings]) -> Graph:
    """REINFORCE with a leave-one-out baseline (RLOO: Ahmadian et al. 2024, arXiv:2402.14740).

    The baseline of a response is the mean of the others, so there is no critic. A response is one action: its tokens
    are summed, not averaged. KL is in the reward.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `ppo`, except those of the critic: ``gamma``, ``lam`` and ``critic_warmup``. With one
            mini-batch per step nothing is clipped, and the update is that of REINFORCE.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, **settings).edit(
        replace={"gae": RLOOAdvantage()},
        set={"update_actor.aggregation": "seq-mean-token-sum"},
        drop=["whiten", "update_critic"],
        name="rloo",
    )


@edit_of(ppo, without=("lam", "critic_warmup"))
def reinforce_plus_plus(reward_fn: RewardFn, **settings: Unpack[PPOSettings]) -> Graph:
    """PPO without a critic (REINFORCE++: Hu 2025, arXiv:2501.03262): the mean over the batch is the baseline.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `ppo`, except ``lam`` and ``critic_warmup``; KL is in the reward.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, **settings).edit(
        replace={"gae": ReturnToGo(settings["gamma"])}, drop=["update_critic"], name="reinforce_plus_plus"
    )


@edit_of(grpo)
def reinforce_plus_plus_baseline(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """REINFORCE++ with a group baseline (Hu 2025, arXiv:2501.03262): GRPO, normalized over the batch.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `grpo`; `kl_coef`, the coefficient of KL (k2), must be above 0.
    """
    return grpo(reward_fn, **settings).edit(
        set={"group_advantage.normalize_std": False, "update_actor.kl.estimator": "k2"},
        insert={"whiten": After("group_advantage", Whiten())},
        name="reinforce_plus_plus_baseline",
    )


@edit_of(reinforce_plus_plus, without=("lam", "critic_warmup"))
def remax(reward_fn: RewardFn, **settings: Unpack[PPOSettings]) -> Graph:
    """REINFORCE with the greedy response as baseline (ReMax: Li et al. 2023, arXiv:2310.10505, eq. 6).

    The baseline is the score of the greedy response to the same prompt, which is not trained on. A response is one
    action: its tokens are summed, not averaged.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `reinforce_plus_plus`; `max_new_tokens` also applies to the greedy response. With n above
            1, each copy of a prompt has its own greedy response. With one mini-batch per step nothing is clipped, and
            the update is that of REINFORCE.

    Raises:
        ParameterError: ``lam`` or ``critic_warmup``, settings of a critic, was given.
    """
    return reinforce_plus_plus(reward_fn, **settings).edit(
        insert={
            "greedy": After("generate", Generate(temperature=0.0, max_new_tokens=settings["max_new_tokens"])),
            "greedy_reward": After("reward", Reward(reward_fn)),
            "row_score": After("reward", RowScore()),
            "subtract_baseline": After("return_to_go", SubtractBaseline()),
        },
        wire={
            "greedy.prompts": "repeat",
            "greedy_reward.prompts": "repeat",
            "greedy_reward.rollout": "greedy",
            "row_score.token_level_scores": "greedy_reward.token_level_scores",
            "row_score.response_mask": "greedy.response_mask",
            "subtract_baseline.baseline": "row_score.row_scores",
        },
        set={"update_actor.aggregation": "seq-mean-token-sum"},
        drop=["whiten"],
        name="remax",
    )
