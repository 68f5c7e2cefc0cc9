"""GRPO with another advantage in the place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.core.graphs.after import After
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import edit_of
from flowrl.operators import GPGAdvantage, LogitNorm, OPOAdvantage, OptimalTokenBaseline, PassAtKAdvantage


@edit_of(grpo)
def gpg(reward_fn: str | Callable[..., Any] | None, *, kl_coef: float = 0.0, **settings: Any) -> Graph:
    """Group policy gradient (GPG: Chu et al. 2025, arXiv:2504.02546): no standard deviation.

    Groups whose answers are all right or all wrong teach nothing; the others are scaled up to make up for them.

    Args:
        reward_fn: scores a response; see `Reward`.
        kl_coef: the weight of KL to the reference, in the loss; the paper has none.
        settings: others of `grpo`.
    """
    return grpo(reward_fn, kl_coef=kl_coef, **settings).edit(replace={"group_advantage": GPGAdvantage()}, name="gpg")


@edit_of(grpo)
def opo(reward_fn: str | Callable[..., Any] | None, *, kl_coef: float = 0.0, **settings: Any) -> Graph:
    """Exactly on-policy, against the baseline of least variance (OPO: Hao et al. 2025, arXiv:2505.23585).

    The mean of the group is weighed by length. There is one mini-batch a step, so nothing is clipped.

    Args:
        reward_fn: scores a response; see `Reward`.
        kl_coef: the weight of KL to the reference, in the loss; the paper has none.
        settings: others of `grpo`.
    """
    return grpo(reward_fn, kl_coef=kl_coef, **settings).edit(replace={"group_advantage": OPOAdvantage()}, name="opo")


@edit_of(grpo)
def otb(reward_fn: str | Callable[..., Any] | None, *, kl_coef: float = 0.0, **settings: Any) -> Graph:
    """A baseline of least variance at each token (OTB: Li et al. 2026, arXiv:2602.07078).

    Answers to one prompt are each other's baseline, weighed by how hard their tokens so far have pulled at the policy;
    that takes another forward pass.

    Args:
        reward_fn: scores a response; see `Reward`.
        kl_coef: the weight of KL to the reference, in the loss; the paper has none.
        settings: others of `grpo`.
    """
    return grpo(reward_fn, kl_coef=kl_coef, **settings).edit(
        replace={"group_advantage": OptimalTokenBaseline()},
        insert={"logit_norm": After("generate", LogitNorm())},
        wire={"optimal_token_baseline.logit_norms": "logit_norm.logit_norms"},
        name="otb",
    )


@edit_of(grpo)
def pass_at_k(reward_fn: str | Callable[..., Any] | None, *, k: int = 4, n: int = 8, **settings: Any) -> Graph:
    """GRPO for the best of k answers (Chen et al. 2025, arXiv:2508.10751), which keeps answers diverse.

    Args:
        reward_fn: scores a response; see `Reward`. A score above 0.5 passes.
        k: how many answers are tried.
        n: responses per prompt, more than k: one set of all rows has no other set to be better than.
        settings: others of `grpo`.

    Raises:
        ParameterError: `n` is not more than `k`.
    """
    if n <= k:
        raise ParameterError(
            f"pass_at_k(k={k}, n={n}) has no two sets of answers to compare; expected n > k: n={2 * k}."
        )
    return grpo(reward_fn, n=n, **settings).edit(replace={"group_advantage": PassAtKAdvantage(k)}, name="pass_at_k")
