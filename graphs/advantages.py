"""Variants of GRPO with another advantage estimator or scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from flowrl.core.graphs.after import After
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import GRPOSettings, RewardFn, edit_of
from flowrl.operators import (
    GDPOAdvantage,
    GPGAdvantage,
    LogitNorm,
    OPOAdvantage,
    OptimalTokenBaseline,
    PassAtKAdvantage,
    Reward,
)


@edit_of(grpo, kl_coef=0.0)
def gpg(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """Group policy gradient (GPG: Chu et al. 2025, arXiv:2504.02546): no standard deviation.

    Groups of equal scores have no gradient; the others are scaled up to compensate.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `grpo`; `kl_coef` is 0, as in the paper.
    """
    return grpo(reward_fn, **settings).edit(replace={"group_advantage": GPGAdvantage()}, name="gpg")


@edit_of(grpo, kl_coef=0.0)
def opo(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """Exactly on-policy, with the minimum-variance baseline (OPO: Hao et al. 2025, arXiv:2505.23585).

    The baseline is the length-weighted mean of the group. With one mini-batch per step, nothing is clipped.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `grpo`; `kl_coef` is 0, as in the paper.
    """
    return grpo(reward_fn, **settings).edit(replace={"group_advantage": OPOAdvantage()}, name="opo")


@edit_of(grpo, kl_coef=0.0)
def otb(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """A minimum-variance baseline at each token (OTB: Li et al. 2026, arXiv:2602.07078).

    The responses to a prompt are each other's baseline, weighted by the gradient norms of their tokens so far, which
    costs one more forward pass.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `grpo`; `kl_coef` is 0, as in the paper.
    """
    return grpo(reward_fn, **settings).edit(
        replace={"group_advantage": OptimalTokenBaseline()},
        insert={"logit_norm": After("generate", LogitNorm())},
        wire={"optimal_token_baseline.logit_norms": "logit_norm.logit_norms"},
        name="otb",
    )


@edit_of(grpo)
def pass_at_k(reward_fn: RewardFn, *, k: int = 4, **settings: Unpack[GRPOSettings]) -> Graph:
    """GRPO for the best of k responses (Chen et al. 2025, arXiv:2508.10751), which preserves diversity.

    Args:
        reward_fn: scores a response; see `Reward`. A score above 0.5 passes.
        k: responses per attempt.
        settings: settings of `grpo`; `n` must be greater than `k`, since advantages compare subsets of k responses.

    Raises:
        ParameterError: `n` is not greater than `k`.
    """
    if (n := settings["n"]) <= k:
        raise ParameterError(
            f"pass_at_k(k={k}, n={n}) compares subsets of {k} responses, which needs n > k. Pass n={2 * k}.",
            code="algorithm.too-few-responses",
            algorithm="pass_at_k",
            n=n,
            expected=k + 1,
        )
    return grpo(reward_fn, **settings).edit(replace={"group_advantage": PassAtKAdvantage(k)}, name="pass_at_k")


@edit_of(grpo, kl_coef=0.0)
def dr_grpo(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """GRPO "done right" (Liu et al. 2025, arXiv:2503.20783): without its two biases.

    It does not divide by the group's standard deviation, which favors very easy and very hard prompts, nor by the
    length of the response, which favors long wrong responses, but by a constant.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: settings of `grpo`; `max_new_tokens` is also the constant, and `kl_coef` is 0, as in the paper.
    """
    return grpo(reward_fn, **settings).edit(
        set={
            "group_advantage.normalize_std": False,
            "update_actor.aggregation": "seq-mean-token-sum-norm",
            "update_actor.norm": float(settings["max_new_tokens"]),
        },
        name="dr_grpo",
    )


Function = str | Callable[..., Any]


@edit_of(grpo, kl_coef=0.0)
def gdpo(
    reward_fn: RewardFn,
    *,
    others: Mapping[str, Function] | None = None,
    weights: Mapping[str, float] | None = None,
    **settings: Unpack[GRPOSettings],
) -> Graph:
    """Several rewards, each normalized separately in its group (GDPO: Liu et al. 2026, arXiv:2601.05242).

    Their weighted sum is normalized over the batch; see `GDPOAdvantage`.

    Args:
        reward_fn: scores a response; see `Reward`. Its node and its weight are named ``reward``.
        others: further reward functions, by the name of their node.
        weights: weights by name; 1 by default.
        settings: settings of `grpo`; `kl_coef` is 0, as in the paper.
    """
    further = dict(others or {})
    terms = dict.fromkeys(["reward", *further], 1.0) | dict(weights or {})
    rewards = {name: After("generate", Reward(fn, log=f"reward/{name}")) for name, fn in further.items()}
    return grpo(reward_fn, **settings).edit(
        insert=rewards,
        replace={"group_advantage": GDPOAdvantage(terms)},
        wire={f"gdpo_advantage.{name}": f"{name}.token_level_scores" for name in terms},
        name="gdpo",
    )
