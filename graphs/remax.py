"""ReMax, as an edit of REINFORCE++."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.graphs.reinforce_plus_plus import reinforce_plus_plus
from flowrl.graphs.variants import PPOSettings, RewardFn, edit_of
from flowrl.operators import Generate, Reward, RowScore, SubtractBaseline


@edit_of(reinforce_plus_plus, without=("lam", "critic_warmup"))
def remax(reward_fn: RewardFn, **settings: Unpack[PPOSettings]) -> Graph:
    """REINFORCE against the greedy answer (ReMax: Li et al. 2023, arXiv:2310.10505, eq. 6): no critic, no group.

    What the greedy answer to the same prompt scores is the baseline; nothing is trained on that answer. A whole
    response is one action: its tokens are summed, and not averaged.

    Args:
        reward_fn: scores a response; see `Reward`.
        settings: of `reinforce_plus_plus`; `max_new_tokens` is for the greedy answer, too. With n above 1, each copy of
            a prompt is answered greedily, too. With one mini-batch a step nothing is clipped, and the update is
            REINFORCE's.

    Raises:
        ParameterError: `lam` or `critic_warmup` was given, which are for a critic.
    """
    return reinforce_plus_plus(reward_fn, **settings).edit(
        insert={
            "greedy": After("generate", Generate(temperature=0.0, max_new_tokens=settings["max_new_tokens"])),
            "greedy_reward": After("reward", Reward(reward_fn)),
            "row_score": After("reward", RowScore()),
            "subtract_baseline": After("return_to_go", SubtractBaseline()),
        },
        wire={
            "greedy.prompts": "repeat",
            "greedy_reward.prompts": "repeat",
            "greedy_reward.rollout": "greedy",
            "row_score.token_level_scores": "greedy_reward.token_level_scores",
            "row_score.response_mask": "greedy.response_mask",
            "subtract_baseline.baseline": "row_score.row_scores",
        },
        set={"update_actor.aggregation": "seq-mean-token-sum"},
        drop=["whiten"],
        name="remax",
    )
