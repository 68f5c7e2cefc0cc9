"""Advantages of turns: in an episode, an answer is one action, and all its tokens share its advantage.

The functions are plain torch; the operators below them are the same computations as nodes of a graph. Which token is of
which turn is said by `TurnIds`, which `Interact` writes, and not read off the mask: there two answers that touch would
be one, and an answer with a hole would be two.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import Advantages, ResponseMask, TokenLevelRewards, TurnIds, Uid, Values
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.errors import DataError
from flowrl.operators.advantages.gae import GAEOutput, gae
from flowrl.operators.advantages.groups import GroupBaseline, group_advantage
from flowrl.operators.advantages.per_token import select, select_rewards


class TurnsOfRows:
    """The turns of each row, and the way from tokens to turns and back.

    Args:
        turn_ids: int64 ``[batch response]``, from 0 in each row; what it says off the mask does not count.
        response_mask: bool ``[batch response]``.

    Attributes:
        there: bool ``[batch turns]``, whether a row has that turn: a token of it on the mask.

    Raises:
        DataError: a token on the mask is of no turn, or the shapes differ.
    """

    def __init__(self, turn_ids: Tensor, response_mask: Tensor) -> None:
        if turn_ids.shape != response_mask.shape:
            raise DataError(
                f"turn_ids has shape {tuple(turn_ids.shape)} and response_mask {tuple(response_mask.shape)}; expected "
                f"those of the same tokens."
            )
        stray = response_mask & (turn_ids < 0)
        if stray.any():
            row, token = (int(i) for i in stray.nonzero()[0])
            raise DataError(
                f"turn_ids[{row}, {token}] is {int(turn_ids[row, token])} where the mask is True ({int(stray.sum())} "
                f"such tokens), so nobody knows which answer it is of; expected turns from 0, as Interact writes them."
            )
        self._mask = response_mask
        self._of = turn_ids.where(response_mask, 0)
        self._number = int(self._of.max()) + 1 if self._of.numel() else 1
        self.there = self.sum(response_mask.float()) > 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the tokens of each turn: ``[batch turns]`` from ``[batch response]`` that is 0 off the mask."""
        return x.new_zeros(len(x), self._number).scatter_add_(1, self._of, x)

    def first(self, x: Tensor) -> Tensor:
        """The number at the first token on the mask of each turn: ``[batch turns]`` from ``[batch response]``."""
        width = x.shape[1]
        place = torch.arange(width, device=x.device).expand(x.shape)
        firsts = place.new_full((len(x), self._number), width)
        firsts.scatter_reduce_(1, self._of, place.where(self._mask, width), "amin")
        return self.sum(x.where(place == firsts.gather(1, self._of), 0.0))

    def spread(self, x: Tensor) -> Tensor:
        """The number of each turn at its tokens on the mask: float32 ``[batch response]`` from ``[batch turns]``."""
        return select(x.gather(1, self._of), self._mask)


@torch.no_grad()
def turn_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over turns (Turn-PPO: Li et al. 2025, arXiv:2512.17008).

    The state of turn k is all that stands before it, and its action is the whole answer. So its value V_k is the
    critic's at its *first* token, where nothing of the answer is there yet; at the last one, the critic has seen nearly
    all of the action that it is to be the baseline of. With R_k the sum of the rewards of the turn's tokens,
    ``A_k = delta_k + gamma * lam * A_{k+1}`` and ``delta_k = R_k + gamma * V_{k+1} - V_k``: gamma and lambda count
    turns, however long they are. The value after a row's last turn is 0.

    Args:
        token_level_rewards: float ``[batch response]``; zero off the mask.
        values: float ``[batch response]``, the value before each token; those at the first tokens of turns are used.
        response_mask: bool ``[batch response]``.
        turn_ids: int64 ``[batch response]``, which turn of its row a token is of, from 0.
        gamma: discount of a turn, in [0, 1].
        lam: lambda, in [0, 1].

    Returns:
        advantages, ``A_k`` at each token of turn k, and returns, ``A_k + V_k`` there; both float32
        ``[batch response]``, 0 off the mask.

    Raises:
        DataError: a reward off the mask, a token on it that is of no turn, or shapes that differ.
    """
    paid = select_rewards(token_level_rewards, response_mask, "token_level_rewards")
    turns = TurnsOfRows(turn_ids, response_mask)
    rewards = turns.sum(paid)
    before = turns.first(select(values, response_mask))
    advantages, returns = gae(rewards, before, turns.there, gamma, lam)
    return turns.spread(advantages), turns.spread(returns)


@torch.no_grad()
def turn_group_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    uid: np.ndarray,
    gamma: float = 1.0,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """What a turn and all after it were paid, against the same turn of the other episodes of the group.

    The return of turn k is ``G_k = sum_j gamma^j R_{k+j}``, with R the sum of the rewards of a turn's tokens; its
    advantage is ``(G_k - mean) / (std + eps)`` over the rows of the group that have a k-th turn (returns of turns in
    the place of scores of rows, as in GTPO: Ding et al. 2025, arXiv:2511.14846). So what was paid before a turn is no
    merit of it. With one turn a row it is `group_advantage`; where only the last turn is paid and gamma is 1, all turns
    of a row have the return that is its score. A row that alone has a k-th turn is its own baseline there, so its
    advantage is 0.

    Args:
        token_level_rewards, response_mask, uid: see `flowrl.operators.advantages.groups.Groups`.
        turn_ids: int64 ``[batch response]``, which turn of its row a token is of, from 0.
        gamma: discount of a turn, in [0, 1].
        normalize_std: divide by the sample standard deviation (``n - 1``).
        eps: added to the standard deviation.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a turn of equal returns.

    Raises:
        DataError: a group of one row, a reward off the mask, a token on it that is of no turn, or shapes that differ.
    """
    paid = select_rewards(token_level_rewards, response_mask, "token_level_rewards")
    turns = TurnsOfRows(turn_ids, response_mask)
    rewards = turns.sum(paid)
    returns, _ = gae(rewards, torch.zeros_like(rewards), turns.there, gamma, 1.0)
    of_turns = [
        group_advantage(returns[:, k : k + 1], turns.there[:, k : k + 1], uid, normalize_std, eps)
        for k in range(returns.shape[1])
    ]
    return turns.spread(torch.cat(of_turns, dim=1))


class TurnGAE(Operator):
    """Generalised advantage estimation in which an answer of an episode is one action; see `turn_gae`.

    It stands in the place of `GAE` behind an `Interact`: ``ppo(...).edit(replace={"gae": TurnGAE()})``.

    Args:
        gamma: discount of a turn.
        lam: lambda: 0 is the one-step advantage, 1 the whole return less the value.
    """

    granularity: ClassVar[Granularity] = "row"

    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)

    def __call__(
        self, token_level_rewards: TokenLevelRewards, values: Values, response_mask: ResponseMask, turn_ids: TurnIds
    ) -> GAEOutput:
        return GAEOutput(*turn_gae(token_level_rewards, values, response_mask, turn_ids, self.gamma, self.lam))


class TurnGroupAdvantage(GroupBaseline, Operator):
    """Group-relative advantages of turns by what was still paid from each on; see `turn_group_advantage`.

    It stands in the place of `GroupAdvantage` behind an `Interact` whose environment rewards turns.

    Args:
        gamma: discount of a turn.
        normalize_std: divide by the standard deviation of the turn in the group.
        eps: added to the standard deviation.
    """

    gamma: float = Field(default=1.0, ge=0, le=1)
    normalize_std: bool = True
    eps: float = Field(default=1e-6, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``"scaled"``, too, where it is divided by the standard deviation."""
        return super().effects | ({Effect.SCALED} if self.normalize_std else set())

    def __call__(
        self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, turn_ids: TurnIds, uid: Uid
    ) -> Advantages:
        return turn_group_advantage(
            token_level_rewards, response_mask, turn_ids, uid, self.gamma, self.normalize_std, self.eps
        )
