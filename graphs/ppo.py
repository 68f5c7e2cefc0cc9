"""PPO for language models, one operator per line."""

from __future__ import annotations

from flowrl.graph import algorithm
from flowrl.graphs.variants import RewardFn
from flowrl.operators import (
    GAE,
    Generate,
    KLShape,
    Mismatch,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    Reward,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
    Whiten,
)
from flowrl.operators.corrections import Mismatched
from flowrl.records import CriticUpdated, PromptBatch, Receipt


@algorithm
def ppo(
    batch: PromptBatch,
    reward_fn: RewardFn,
    *,
    n: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    kl_coef: float = 0.001,
    gamma: float = 1.0,
    lam: float = 0.95,
    clip: float = 0.2,
    ppo_epochs: int = 1,
    mini_batch: int | None = None,
    critic_warmup: int = 0,
) -> tuple[Receipt, CriticUpdated, Mismatched]:
    """Proximal policy optimization with a critic and KL in the reward (Ouyang et al. 2022, arXiv:2203.02155).

    Args:
        batch: prompts.
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt.
        temperature: sampling temperature.
        max_new_tokens: maximum length of a response in tokens.
        kl_coef: coefficient of KL to the reference, in the reward.
        gamma: discount.
        lam: GAE's lambda.
        clip: PPO's epsilon.
        ppo_epochs: passes over the rows of a step.
        mini_batch: rows per optimizer step; None for all.
        critic_warmup: initial steps that train the critic only (VC-PPO: Yuan et al. 2025, arXiv:2503.01491).
    """
    prompts = Repeat(n)(batch)
    rollout = Generate(temperature=temperature, max_new_tokens=max_new_tokens)(prompts)
    old = OldLogProb()(rollout)
    mismatch = Mismatch()(rollout.rollout_log_probs, old, rollout.response_mask)
    ref = RefLogProb()(rollout)
    values = Value()(rollout)
    scores = Reward(reward_fn)(rollout, prompts)
    rewards = KLShape(kl_coef)(scores, old, ref, rollout.response_mask)
    adv = GAE(gamma, lam)(rewards, values, rollout.response_mask)
    white = Whiten()(adv.advantages, rollout.response_mask)
    critic = UpdateCritic(ppo_epochs=ppo_epochs, mini_batch=mini_batch)(rollout, values=values, returns=adv.returns)
    update = UpdateActor(PPOClip(clip), ppo_epochs, mini_batch).when(start=critic_warmup)
    actor = update(rollout, old_log_probs=old, advantages=white)
    return Sync()(actor), critic, mismatch
