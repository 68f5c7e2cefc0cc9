"""GPG, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.settings import refuse_lost
from flowrl.operators import GPGAdvantage


def gpg(reward_fn: str | Callable[..., Any], **settings: Any) -> Graph:
    """Group policy gradient (GPG: Chu et al. 2025, arXiv:2504.02546): no reference, no standard deviation.

    Groups whose answers are all right or all wrong teach nothing; the others are scaled up to make up for them.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: those of `grpo`, except `kl_coef`.

    Raises:
        ParameterError: `kl_coef` was given.
    """
    refuse_lost("gpg", settings, "kl_coef")
    return grpo(reward_fn, kl_coef=0.0, **settings).edit(replace={"group_advantage": GPGAdvantage()}, name="gpg")
