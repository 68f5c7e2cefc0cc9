"""GRPO with another advantage in the place of its own."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.graphs.after import After
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import GRPOSettings, RewardFn, edit_of
from flowrl.operators import GPGAdvantage, LogitNorm, OPOAdvantage, OptimalTokenBaseline, PassAtKAdvantage


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
