"""VAPO, as an edit of PPO."""

from __future__ import annotations

from typing import Unpack

from flowrl.graph import Graph
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import PPOSettings, RewardFn, edit_of
from flowrl.operators import DecoupledGAE, PPOClip, PPOClipNLL


@edit_of(ppo, without=("lam", "kl_coef"), n=16, critic_warmup=50)
def vapo(
    reward_fn: RewardFn,
    *,
    alpha: float = 0.05,
    clip_high: float = 0.28,
    nll: float = 0.1,
    **settings: Unpack[PPOSettings],
) -> Graph:
    """PPO with a critic for long responses (VAPO: Yue et al. 2025, arXiv:2504.05118).

    The first steps train the critic only (value pretraining). Its returns have lambda 1, and the policy's lambda grows
    with the response length l, ``1 - 1 / (alpha * l)`` (decoupled and length-adaptive GAE). The policy loss has
    clip-higher, the mean over tokens, and the negative log-likelihood of right responses. There is no KL.

    Args:
        reward_fn: scores a response, above 0 if it is right; see `Reward`.
        alpha: see above.
        clip_high: the upper bound of the ratio is ``1 + clip_high``; the lower is ``1 - clip``.
        nll: coefficient of the negative log-likelihood.
        settings: settings of `ppo`, except ``lam`` and ``kl_coef``.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, **settings).edit(
        replace={"gae": DecoupledGAE(settings["gamma"], alpha=alpha)},
        set={"update_actor.loss": PPOClipNLL(PPOClip(settings["clip"], clip_high), nll)},
        drop=["kl_shape"],
        name="vapo",
    )
