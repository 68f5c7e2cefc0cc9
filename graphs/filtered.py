"""Methods that train on some of the answers to each prompt, chosen by their scores."""

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
    """Supervised fine-tuning on the best of n own answers (RAFT: Dong et al. 2023, arXiv:2304.06767, alg. 1).

    There is no advantage, no ratio and no reference.

    Args:
        reward_fn: scores a response; see `Reward`.
        best: how many of a prompt's answers are imitated.
        settings: of `grpo`, except `clip`, `kl_coef`, and `mini_batch`, since a filter does not promise how many
            rows go on.

    Raises:
        ParameterError: one of these was given, or `n` is not more than `best`.
    """
    _refuse_all("raft", settings["n"], best)
    settings["kl_coef"] = 0.0
    chosen = grpo(reward_fn, **settings).edit(insert={"filter": After("reward", Filter(Ranked(best)))})
    return chosen.edit(set={"update_actor.loss": NLL()}, name="raft")


@edit_of(ppo, without=("mini_batch",), n=8)
def pf_ppo(reward_fn: RewardFn, *, best: int = 1, worst: int = 1, **settings: Unpack[PPOSettings]) -> Graph:
    """PPO on answers whose reward can be trusted (PF-PPO: Zhang et al. 2024, arXiv:2409.06957).

    A reward model is surest of the best and the worst answers to a prompt, so policy and critic learn from these.

    Args:
        reward_fn: scores a response; see `Reward`.
        best, worst: how many of a prompt's answers go on from either end; ``worst=0`` is the paper's best-of-n.
        settings: of `ppo`, except `mini_batch`, since a filter does not promise how many rows go on.

    Raises:
        ParameterError: `mini_batch` was given, or `n` is not more than `best` and `worst`.
    """
    _refuse_all("pf_ppo", settings["n"], best + worst)
    return ppo(reward_fn, **settings).edit(
        insert={"filter": After("reward", Filter(Ranked(best, worst)))}, name="pf_ppo"
    )


def _refuse_all(algorithm: str, n: int, kept: int) -> None:
    if n <= kept:
        raise ParameterError(
            f"{algorithm}(n={n}) keeps {kept} of a prompt's answers, and so leaves none out; expected more than are "
            f"kept: n={4 * kept}."
        )
