"""Variants of GRPO with another loss; as in most of their papers, without KL."""

from __future__ import annotations

from typing import Literal, Unpack

from flowrl.core.operators.loss import Loss
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import GRPOSettings, RewardFn, edit_of
from flowrl.operators import CISPO, DPO, DPPO, GMPO, GSPO, SAPO, ClipCov, KLCov


def _grpo(name: str, reward_fn: RewardFn, loss: Loss, aggregation: str, settings: GRPOSettings) -> Graph:
    changed = {"update_actor.loss": loss, "update_actor.aggregation": aggregation}
    return grpo(reward_fn, **settings).edit(set=changed, name=name)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def gspo(
    reward_fn: RewardFn, *, clip_low: float = 3e-4, clip_high: float = 4e-4, **settings: Unpack[GRPOSettings]
) -> Graph:
    """One clipped ratio per response (GSPO: Zheng et al. 2025, arXiv:2507.18071).

    The ratio is the geometric mean over the tokens, so it is near 1 and the clip is narrow; see `GSPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        clip_low, clip_high: the bounds of the ratio are ``1 - clip_low`` and ``1 + clip_high``.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("gspo", reward_fn, GSPO(clip_low, clip_high), "seq-mean-token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def cispo(reward_fn: RewardFn, *, clip_high: float = 0.28, **settings: Unpack[GRPOSettings]) -> Graph:
    """Clipped importance weights in place of a clipped surrogate (CISPO: MiniMax 2025, arXiv:2506.13585).

    Every token has a gradient, including those that PPO clips; see `CISPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        clip_high: the upper bound of the weight is ``1 + clip_high``.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("cispo", reward_fn, CISPO(clip_high=clip_high), "token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def gmpo(reward_fn: RewardFn, *, clip_log: float = 0.4, **settings: Unpack[GRPOSettings]) -> Graph:
    """The geometric mean of the ratios of a response (GMPO: Zhao et al. 2025, arXiv:2507.20673).

    It is less sensitive to outliers than an arithmetic mean, so the clip is wide; see `GMPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        clip_log: bound on the absolute log-ratio.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("gmpo", reward_fn, GMPO(clip_log), "seq-mean-token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def sapo(
    reward_fn: RewardFn, *, tau_pos: float = 1.0, tau_neg: float = 1.05, **settings: Unpack[GRPOSettings]
) -> Graph:
    """A soft gate in place of the clip (SAPO: Gao et al. 2025, arXiv:2511.20347); see `SAPO`.

    Gradients decay smoothly as the ratio departs from 1.

    Args:
        reward_fn: scores a response; see `Reward`.
        tau_pos, tau_neg: steepness for positive advantages, and for all others.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("sapo", reward_fn, SAPO(tau_pos, tau_neg), "seq-mean-token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def kl_cov(reward_fn: RewardFn, *, top: float = 2e-4, coef: float = 1.0, **settings: Unpack[GRPOSettings]) -> Graph:
    """A KL penalty on the tokens that reduce entropy most (KL-Cov: Cui et al. 2025, arXiv:2505.22617).

    These are the tokens with the largest covariance of log-prob and advantage in the mini-batch; see `KLCov`.

    Args:
        reward_fn: scores a response; see `Reward`.
        top: share of tokens with the penalty.
        coef: coefficient of the penalty.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("kl_cov", reward_fn, KLCov(top, coef), "token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def clip_cov(
    reward_fn: RewardFn, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0, **settings: Unpack[GRPOSettings]
) -> Graph:
    """Drop the gradient of some tokens that reduce entropy (Clip-Cov: Cui et al. 2025, arXiv:2505.22617).

    These are sampled from the tokens whose covariance of log-prob and advantage is in a range; see `ClipCov`.

    Args:
        reward_fn: scores a response; see `Reward`.
        share: size of the sample as a share of all tokens.
        low, high: range of the covariance.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("clip_cov", reward_fn, ClipCov(share, low, high), "token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def dppo(
    reward_fn: RewardFn,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    within: float = 0.2,
    within_high: float | None = None,
    **settings: Unpack[GRPOSettings],
) -> Graph:
    """A trust region by divergence instead of ratio (DPPO: Qi et al. 2026, arXiv:2602.04879).

    A rare token may change by a large ratio, a frequent one may not; see `DPPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        divergence: total variation or KL of the binary distribution (this token, any other).
        within: radius of the region.
        within_high: radius for positive advantages, if it differs.
        settings: settings of `grpo`, except ``clip``.

    Raises:
        ParameterError: ``clip`` was given.
    """
    return _grpo("dppo", reward_fn, DPPO(divergence, within, within_high=within_high), "token-mean", settings)


@edit_of(grpo, without=("clip", "kl_coef"), n=2)
def online_dpo(reward_fn: RewardFn, *, beta: float = 0.1, **settings: Unpack[GRPOSettings]) -> Graph:
    """DPO on the best and the worst of own samples (Guo et al. 2024, arXiv:2402.04792).

    The best and the worst response to each prompt, by reward, form a pair. There is no advantage, and the loss includes
    KL.

    Args:
        reward_fn: scores a response; see `Reward`.
        beta: coefficient of KL to the reference.
        settings: settings of `grpo`, except ``clip`` and ``kl_coef``.

    Raises:
        ParameterError: one of these was given.
    """
    changed = {
        "update_actor.loss": DPO(beta),
        "update_actor.kl": None,
        "update_actor.aggregation": "seq-mean-token-mean",
    }
    return grpo(reward_fn, **settings).edit(set=changed, name="online_dpo")
