"""GRPO with another loss in the place of the clipped surrogate; like most of these papers, without KL."""

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
    """One ratio a response, clipped as a whole (GSPO: Zheng et al. 2025, arXiv:2507.18071).

    The ratio is the geometric mean of those of the tokens, so it is near 1 and the clip is narrow; see `GSPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        clip_low, clip_high: how far below and above 1 the ratio counts.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("gspo", reward_fn, GSPO(clip_low, clip_high), "seq-mean-token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def cispo(reward_fn: RewardFn, *, clip_high: float = 0.28, **settings: Unpack[GRPOSettings]) -> Graph:
    """Clipped weights in place of clipped gradients (CISPO: MiniMax 2025, arXiv:2506.13585).

    Every token has a gradient, also those that PPO would cut off; see `CISPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        clip_high: how far above 1 a weight may be.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("cispo", reward_fn, CISPO(clip_high=clip_high), "token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def gmpo(reward_fn: RewardFn, *, clip_log: float = 0.4, **settings: Unpack[GRPOSettings]) -> Graph:
    """The geometric mean of the ratios of a response (GMPO: Zhao et al. 2025, arXiv:2507.20673).

    Outliers count less than in an arithmetic mean, so the clip is wide; see `GMPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        clip_log: how far from 0 a log-ratio counts.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("gmpo", reward_fn, GMPO(clip_log), "seq-mean-token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def sapo(
    reward_fn: RewardFn, *, tau_pos: float = 1.0, tau_neg: float = 1.05, **settings: Unpack[GRPOSettings]
) -> Graph:
    """A soft gate in place of the clip (SAPO: Gao et al. 2025, arXiv:2511.20347); see `SAPO`.

    Gradients fall smoothly as the ratio leaves 1, and do not end.

    Args:
        reward_fn: scores a response; see `Reward`.
        tau_pos, tau_neg: the steepness where the advantage is positive, and where it is not.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("sapo", reward_fn, SAPO(tau_pos, tau_neg), "seq-mean-token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def kl_cov(reward_fn: RewardFn, *, top: float = 2e-4, coef: float = 1.0, **settings: Unpack[GRPOSettings]) -> Graph:
    """KL on the tokens that cost most entropy (KL-Cov: Cui et al. 2025, arXiv:2505.22617).

    They are those whose log-prob and advantage vary together most, over the mini-batch; see `KLCov`.

    Args:
        reward_fn: scores a response; see `Reward`.
        top: the share of tokens.
        coef: the weight of KL there.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("kl_cov", reward_fn, KLCov(top, coef), "token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def clip_cov(
    reward_fn: RewardFn, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0, **settings: Unpack[GRPOSettings]
) -> Graph:
    """No gradient from some of the tokens that cost entropy (Clip-Cov: Cui et al. 2025, arXiv:2505.22617).

    They are drawn from those whose log-prob and advantage vary together within bounds, over the mini-batch; see
    `ClipCov`.

    Args:
        reward_fn: scores a response; see `Reward`.
        share: how many are drawn, of all tokens.
        low, high: the bounds of the covariance.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("clip_cov", reward_fn, ClipCov(share, low, high), "token-mean", settings)


@edit_of(grpo, without=("clip",), kl_coef=0.0)
def dppo(
    reward_fn: RewardFn,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    within: float = 0.2,
    **settings: Unpack[GRPOSettings],
) -> Graph:
    """A trust region by divergence and not by ratio (DPPO: Qi et al. 2026, arXiv:2602.04879).

    A rare token may change by a large ratio, a frequent one may not; see `DPPO`.

    Args:
        reward_fn: scores a response; see `Reward`.
        divergence: total variation or KL, of the token against all others.
        within: how far is within the region.
        settings: of `grpo`, except `clip`.

    Raises:
        ParameterError: `clip` was given.
    """
    return _grpo("dppo", reward_fn, DPPO(divergence, within), "token-mean", settings)


@edit_of(grpo, without=("clip", "kl_coef"), n=2)
def online_dpo(reward_fn: RewardFn, *, beta: float = 0.1, **settings: Unpack[GRPOSettings]) -> Graph:
    """The better answer over the worse, sampled as it learns (Guo et al. 2024, arXiv:2402.04792).

    Of each prompt's answers, the best and the worst by the reward are a pair of DPO. There is no advantage, and KL is
    in the loss already.

    Args:
        reward_fn: scores a response; see `Reward`.
        beta: how strongly the reference holds.
        settings: of `grpo`, except `clip` and `kl_coef`.

    Raises:
        ParameterError: one of these was given.
    """
    changed = {
        "update_actor.loss": DPO(beta),
        "update_actor.kl": None,
        "update_actor.aggregation": "seq-mean-token-mean",
    }
    return grpo(reward_fn, **settings).edit(set=changed, name="online_dpo")
