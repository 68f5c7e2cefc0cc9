"""OPO, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.settings import refuse_lost
from flowrl.operators import OPOAdvantage


def opo(reward_fn: str | Callable[..., Any], **settings: Any) -> Graph:
    """Exactly on-policy, against the baseline of least variance (OPO: Hao et al. 2025, arXiv:2505.23585).

    The mean of the group is weighed by length. There is no KL, and one mini-batch a step, so nothing is clipped.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: those of `grpo`, except `kl_coef`.

    Raises:
        ParameterError: `kl_coef` was given.
    """
    refuse_lost("opo", settings, "kl_coef")
    return grpo(reward_fn, kl_coef=0.0, **settings).edit(replace={"group_advantage": OPOAdvantage()}, name="opo")
