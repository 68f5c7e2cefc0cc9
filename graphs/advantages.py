"""GRPO with another advantage in the place of its own, or with the same one scaled in another way."""

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

    Groups whose answers are all right or all wrong teach nothing; the others are scaled up to make up for them.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `grpo`; `kl_coef` is 0, since the paper has no KL.
    """
    return grpo(reward_fn, **settings).edit(replace={"group_advantage": GPGAdvantage()}, name="gpg")


@edit_of(grpo, kl_coef=0.0)
def opo(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """Exactly on-policy, against the baseline of least variance (OPO: Hao et al. 2025, arXiv:2505.23585).

    The mean of the group is weighed by length. There is one mini-batch a step, so nothing is clipped.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `grpo`; `kl_coef` is 0, since the paper has no KL.
    """
    return grpo(reward_fn, **settings).edit(replace={"group_advantage": OPOAdvantage()}, name="opo")


@edit_of(grpo, kl_coef=0.0)
def otb(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """A baseline of least variance at each token (OTB: Li et al. 2026, arXiv:2602.07078).

    Answers to one prompt are each other's baseline, weighed by how hard their tokens so far have pulled at the policy;
    that takes another forward pass.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `grpo`; `kl_coef` is 0, since the paper has no KL.
    """
    return grpo(reward_fn, **settings).edit(
        replace={"group_advantage": OptimalTokenBaseline()},
        insert={"logit_norm": After("generate", LogitNorm())},
        wire={"optimal_token_baseline.logit_norms": "logit_norm.logit_norms"},
        name="otb",
    )


@edit_of(grpo)
def pass_at_k(reward_fn: RewardFn, *, k: int = 4, **settings: Unpack[GRPOSettings]) -> Graph:
    """GRPO for the best of k answers (Chen et al. 2025, arXiv:2508.10751), which keeps answers diverse.

    Args:
        reward_fn: scores a response; see `Reward`. A score above 0.5 passes.
        k: how many answers are tried.
        settings: of `grpo`; `n` is more than k: one set of all rows has no other set to be better than.

    Raises:
        ParameterError: `n` is not more than `k`.
    """
    if (n := settings["n"]) <= k:
        raise ParameterError(
            f"pass_at_k(k={k}, n={n}) has no two sets of answers to compare; expected n > k: n={2 * k}."
        )
    return grpo(reward_fn, **settings).edit(replace={"group_advantage": PassAtKAdvantage(k)}, name="pass_at_k")


@edit_of(grpo, kl_coef=0.0)
def dr_grpo(reward_fn: RewardFn, **settings: Unpack[GRPOSettings]) -> Graph:
    """GRPO "done right" (Liu et al. 2025, arXiv:2503.20783): without its two biases.

    Nothing is divided by the standard deviation of the group, which favours prompts that are very easy or very hard;
    nor by the length of the response, which favours long wrong answers: a constant takes its place.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `grpo`; `max_new_tokens` is also the constant, and `kl_coef` is 0, since the paper has no KL.
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
    """Several rewards, each normalised in its group by itself (GDPO: Liu et al. 2026, arXiv:2601.05242).

    They are then weighed, added up and normalised over the batch; see `gdpo_advantage`.

    Args:
        reward_fn: scores a response; see `Reward`. Its node, and its weight, are called ``reward``.
        others: further such functions, by the name of the node that each gets.
        weights: by name; 1 where there is none.
        settings: of `grpo`; `kl_coef` is 0, since the paper has no KL.
    """
    further = dict(others or {})
    every = dict.fromkeys(["reward", *further], 1.0) | dict(weights or {})
    rewards = {name: After("generate", Reward(fn, log=f"reward/{name}")) for name, fn in further.items()}
    return grpo(reward_fn, **settings).edit(
        insert=rewards,
        replace={"group_advantage": GDPOAdvantage(every)},
        wire={f"gdpo_advantage.{name}": f"{name}.token_level_scores" for name in every},
        name="gdpo",
    )
