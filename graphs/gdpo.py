"""GDPO, as an edit of GRPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.variants import GRPOSettings, RewardFn, edit_of
from flowrl.operators import GDPOAdvantage, Reward

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
