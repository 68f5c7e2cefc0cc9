"""VAPO, as an edit of PPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import edit_of
from flowrl.operators import DecoupledGAE, PPOClip, PPOClipNLL


@edit_of(ppo, without=("lam", "kl_coef"))
def vapo(
    reward_fn: str | Callable[..., Any] | None,
    *,
    n: int = 16,
    alpha: float = 0.05,
    clip: float = 0.2,
    clip_high: float = 0.28,
    nll: float = 0.1,
    critic_warmup: int = 50,
    **settings: Any,
) -> Graph:
    """PPO with a critic that keeps up with long answers (VAPO: Yue et al. 2025, arXiv:2504.05118).

    The critic is trained alone first (value pretraining); its returns have lambda 1, and the policy's lambda grows with
    the length, ``1 - 1 / (alpha * l)`` (decoupled and length-adaptive GAE). The policy has clip-higher, the mean over
    tokens, and the negative log-likelihood of right answers in its loss. There is no KL.

    Args:
        reward_fn: scores a response, above 0 if it is right; see `Reward`.
        n: responses per prompt.
        alpha: see above.
        clip, clip_high: how far below and above 1 the ratio counts.
        nll: the weight of right answers' negative log-likelihood.
        critic_warmup: the steps in which the critic is trained alone.
        settings: others of `ppo`, except `lam` and `kl_coef`.

    Raises:
        ParameterError: one of these was given.
    """
    return ppo(reward_fn, n=n, critic_warmup=critic_warmup, **settings).edit(
        replace={"gae": DecoupledGAE(settings.get("gamma", 1.0), alpha=alpha)},
        set={"update_actor.loss": PPOClipNLL(PPOClip(clip, clip_high), nll)},
        drop=["kl_shape"],
        name="vapo",
    )
