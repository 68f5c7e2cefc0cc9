"""GRPO, as an edit of PPO."""

from __future__ import annotations

from flowrl.graph import Graph
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import RewardFn, edit_of
from flowrl.operators import GroupAdvantage, KLLoss, PPOClip, UpdateActor


@edit_of(ppo)
def grpo(
    reward_fn: RewardFn,
    *,
    n: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    kl_coef: float = 0.001,
    clip: float = 0.2,
    ppo_epochs: int = 1,
    mini_batch: int | None = None,
) -> Graph:
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300): PPO with the group as its baseline.

    It has no critic, and KL is a term of the loss instead of the reward.

    Args:
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt, the size of a group.
        temperature: sampling temperature.
        max_new_tokens: maximum length of a response in tokens.
        kl_coef: coefficient of KL to the reference, in the loss; 0 removes the term and the reference.
        clip: PPO's epsilon.
        ppo_epochs: passes over the rows of a step.
        mini_batch: rows per optimizer step; None for all.
    """
    kl = KLLoss("k3", kl_coef) if kl_coef else None
    return ppo(reward_fn, n=n, temperature=temperature, max_new_tokens=max_new_tokens).edit(
        replace={"gae": GroupAdvantage(), "update_actor": UpdateActor(PPOClip(clip), ppo_epochs, mini_batch, kl=kl)},
        drop=["kl_shape", "whiten", "update_critic"],
        name="grpo",
    )
