"""Methods that train on a selection of the responses to each prompt, by score."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.graphs.after import After
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.grpo import grpo
from flowrl.graphs.ppo import ppo
from flowrl.graphs.variants import GRPOSettings, PPOSettings, RewardFn, edit_of
from flowrl.operators import NLL, Filter, Ranked


@edit_of(grpo, without=("clip", "kl_coef", "mini_batch"))
def raft(reward_fn: RewardFn, *, best: int = 1, **settings: Unpack[GRPOSettings]) -> Graph:
    """Supervised fine-tuning on the best of n own responses (RAFT: Dong et al. 2023, arXiv:2304.06767, alg. 1).

    It has no advantage, ratio or reference.

    Args:
        reward_fn: scores a response; see `Reward`.
        best: number of responses per prompt to train on.
        settings: settings of `grpo`, except ``clip``, ``kl_coef``, and ``mini_batch``, since a filter selects a varying
            number of rows.

    Raises:
        ParameterError: one of these was given, or `n` is not greater than `best`.
    """
    _refuse_all("raft", settings["n"], best)
    settings["kl_coef"] = 0.0
    chosen = grpo(reward_fn, **settings).edit(insert={"filter": After("reward", Filter(Ranked(best)))})
    return chosen.edit(set={"update_actor.loss": NLL()}, name="raft")


@edit_of(ppo, without=("mini_batch",), n=8)
def pf_ppo(reward_fn: RewardFn, *, best: int = 1, worst: int = 1, **settings: Unpack[PPOSettings]) -> Graph:
    """PPO on responses with reliable rewards (PF-PPO: Zhang et al. 2024, arXiv:2409.06957).

    Reward models are most reliable on the best and the worst responses to a prompt, so policy and critic train on them.

    Args:
        reward_fn: scores a response; see `Reward`.
        best, worst: number of responses per prompt to select from either end; ``worst=0`` is the paper's best-of-n.
        settings: settings of `ppo`, except ``mini_batch``, since a filter selects a varying number of rows.

    Raises:
        ParameterError: ``mini_batch`` was given, or `n` is not greater than ``best + worst``.
    """
    _refuse_all("pf_ppo", settings["n"], best + worst)
    return ppo(reward_fn, **settings).edit(
        insert={"filter": After("reward", Filter(Ranked(best, worst)))}, name="pf_ppo"
    )


def _refuse_all(algorithm: str, n: int, selected: int) -> None:
    if n <= selected:
        raise ParameterError(
            f"{algorithm}(n={n}) selects {selected} responses per prompt, expected a larger n. Pass n={4 * selected}.",
            code="algorithm.too-few-responses",
            algorithm=algorithm,
            n=n,
            expected=selected + 1,
        )
