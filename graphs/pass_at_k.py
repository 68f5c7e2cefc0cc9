"""Training for pass@k, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.operators import PassAtKAdvantage


def pass_at_k(reward_fn: str | Callable[..., Any], *, k: int = 4, n: int = 8, **settings: Any) -> Graph:
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
