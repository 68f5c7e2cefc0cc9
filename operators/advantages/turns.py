"""Turn-level advantages: each response of an episode is one action, and all its tokens have the same advantage.

The functions are plain PyTorch; the operators below them are the same computations as nodes of a graph. `TurnIds`,
which `Interact` writes, assign tokens to turns. The mask cannot: it would merge adjacent turns and split turns with
holes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import Advantages, ResponseMask, TokenLevelRewards, TurnIds, Uid, Values
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.errors import DataError
from flowrl.operators.advantages.gae import GAEOutput, explain_gae, gae
from flowrl.operators.advantages.groups import GroupAdvantage, GroupBaseline, Groups, group_advantage
from flowrl.operators.advantages.per_token import select, select_rewards
from flowrl.operators.explains import exact, tokens_on


class TurnsOfRows:
    """Reductions from the tokens of each row to its turns, and back.

    Args:
        turn_ids: int64 ``[batch response]``, from 0 in each row; ignored off the mask.
        response_mask: bool ``[batch response]``.

    Attributes:
        present: bool ``[batch turns]``, whether the row has a token of that turn on the mask.
    """

    def __init__(self, turn_ids: Tensor, response_mask: Tensor) -> None:
        if turn_ids.shape != response_mask.shape:
            raise DataError(
                f"turn_ids has shape {tuple(turn_ids.shape)} and response_mask {tuple(response_mask.shape)}. Pass both "
                f"for the same tokens.",
                code="rows.shape-mismatch",
                expected=tuple(response_mask.shape),
                found=tuple(turn_ids.shape),
            )
        stray = response_mask & (turn_ids < 0)
        if stray.any():
            row, token = (int(i) for i in stray.nonzero()[0])
            raise DataError(
                f"turn_ids[{row}, {token}] is {int(turn_ids[row, token])} on the mask ({int(stray.sum())} such "
                f"tokens), expected a turn from 0. Wire turn_ids from the node whose mask you use, such as Interact.",
                code="advantage.no-turn",
                row=row,
                token=token,
            )
        self._mask = response_mask
        self._turn_of = turn_ids.where(response_mask, 0)
        self._turns = int(self._turn_of.max()) + 1 if self._turn_of.numel() else 1
        self.present = self.sum(response_mask.float()) > 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the tokens of each turn: ``[batch response]`` (0 off the mask) to ``[batch turns]``."""
        return x.new_zeros(len(x), self._turns).scatter_add_(1, self._turn_of, x)

    def first(self, x: Tensor) -> Tensor:
        """The element at the first token on the mask of each turn: ``[batch response]`` to ``[batch turns]``."""
        width = x.shape[1]
        position = torch.arange(width, device=x.device).expand(x.shape)
        firsts = position.new_full((len(x), self._turns), width)
        firsts.scatter_reduce_(1, self._turn_of, position.where(self._mask, width), "amin")
        return self.sum(x.where(position == firsts.gather(1, self._turn_of), 0.0))

    def spread(self, x: Tensor) -> Tensor:
        """Broadcast turns to their tokens: ``[batch turns]`` to float32 ``[batch response]``, 0 off the mask."""
        return select(x.gather(1, self._turn_of), self._mask)


@torch.no_grad()
def turn_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over turns (Turn-PPO: Li et al. 2025, arXiv:2512.17008).

    The state of turn k is everything before it, and its action is the full response. Its value V_k is the critic's at
    the *first* token of the turn, before any of the action; at the last token, the critic has already seen most of the
    action. With R_k the sum of the rewards of the turn's tokens, ``A_k = delta_k + gamma * lam * A_{k+1}`` and
    ``delta_k = R_k + gamma * V_{k+1} - V_k``: gamma and lambda apply once per turn, whatever its length. The value
    after a row's last turn is 0.

    Args:
        token_level_rewards: float ``[batch response]``; zero off the mask.
        values: float ``[batch response]``, the value before each token; only those at the first tokens of turns count.
        response_mask: bool ``[batch response]``.
        turn_ids: int64 ``[batch response]``, the turn of each token, from 0 in each row.
        gamma: discount per turn, in [0, 1].
        lam: lambda, in [0, 1].

    Returns:
        advantages, ``A_k`` at each token of turn k, and returns, ``A_k + V_k``; both float32 ``[batch response]``, 0
        off the mask.
    """
    token_rewards = select_rewards(token_level_rewards, response_mask, "token_level_rewards")
    turns = TurnsOfRows(turn_ids, response_mask)
    rewards = turns.sum(token_rewards)
    before = turns.first(select(values, response_mask))
    advantages, returns = gae(rewards, before, turns.present, gamma, lam)
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
    """Group-relative advantages of turns: the return of each turn against the same turn of the group's other episodes.

    The return of turn k is ``G_k = sum_j gamma^j R_{k+j}``, with R the sum of the rewards of a turn's tokens; its
    advantage is ``(G_k - mean) / (std + eps)`` over the rows of the group that have a k-th turn (returns of turns in
    place of scores of rows, as in GTPO: Ding et al. 2025, arXiv:2511.14846). A turn gets no credit for earlier rewards.
    With one turn per row it equals `group_advantage`; if only the last turn is rewarded and gamma is 1, the return of
    every turn is the row's score. A row that alone has a k-th turn is its own baseline there, so its advantage is 0.

    Args:
        token_level_rewards, response_mask, uid: see `flowrl.operators.advantages.groups.Groups`.
        turn_ids: int64 ``[batch response]``, the turn of each token, from 0 in each row.
        gamma: discount per turn, in [0, 1].
        normalize_std: divide by the sample standard deviation (``n - 1``).
        eps: added to the standard deviation.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a turn of equal returns.
    """
    token_rewards = select_rewards(token_level_rewards, response_mask, "token_level_rewards")
    turns = TurnsOfRows(turn_ids, response_mask)
    rewards = turns.sum(token_rewards)
    returns, _ = gae(rewards, torch.zeros_like(rewards), turns.present, gamma, 1.0)
    of_turns = [
        group_advantage(returns[:, k : k + 1], turns.present[:, k : k + 1], uid, normalize_std, eps)
        for k in range(returns.shape[1])
    ]
    return turns.spread(torch.cat(of_turns, dim=1))


class TurnGAE(Operator):
    """Generalized advantage estimation over the turns of episodes; see `turn_gae`.

    Use it in place of `GAE` after an `Interact`: ``ppo(...).edit(replace={"gae": TurnGAE()})``.

    Args:
        gamma: discount per turn.
        lam: lambda: 0 is the one-step advantage, 1 the full return minus the value.
    """

    granularity: ClassVar[Granularity] = "row"

    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)

    def __call__(
        self, token_level_rewards: TokenLevelRewards, values: Values, response_mask: ResponseMask, turn_ids: TurnIds
    ) -> GAEOutput:
        return GAEOutput(*turn_gae(token_level_rewards, values, response_mask, turn_ids, self.gamma, self.lam))

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        mask = inputs["response_mask"]
        turns = TurnsOfRows(inputs["turn_ids"], mask)
        rewards, values = turns.sum(select(inputs["token_level_rewards"], mask)), select(inputs["values"], mask)
        of_turns = {"response_mask": turns.present, "token_level_rewards": rewards, "values": turns.first(values)}
        return explain_gae(row, of_turns, turns.first(outputs["advantages"]), self.gamma, self.lam, of="turn")


class TurnGroupAdvantage(GroupBaseline, Operator):
    """Group-relative advantages of turns by their returns; see `turn_group_advantage`.

    Use it in place of `GroupAdvantage` after an `Interact` whose environment rewards turns.

    Args:
        gamma: discount per turn.
        normalize_std: divide by the standard deviation of the turn in the group.
        eps: added to the standard deviation.
    """

    gamma: float = Field(default=1.0, ge=0, le=1)
    normalize_std: bool = True
    eps: float = Field(default=1e-6, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline"}``, and ``"scaled"`` with `normalize_std`."""
        return super().effects | ({Effect.SCALED} if self.normalize_std else set())

    def __call__(
        self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, turn_ids: TurnIds, uid: Uid
    ) -> Advantages:
        return turn_group_advantage(
            token_level_rewards, response_mask, turn_ids, uid, self.gamma, self.normalize_std, self.eps
        )

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        turns = TurnsOfRows(inputs["turn_ids"], inputs["response_mask"])
        rewards = turns.sum(select(inputs["token_level_rewards"], inputs["response_mask"]))
        returns, _ = gae(rewards, torch.zeros_like(rewards), turns.present, self.gamma, 1.0)
        of_group, after = GroupAdvantage(self.normalize_std, self.eps), turns.first(outputs["advantages"])
        lines = []
        for k in tokens_on(turns.present, row):
            group = Groups(returns[:, k : k + 1], turns.present[:, k : k + 1], inputs["uid"])
            lines.append(
                f"turn {k}: {of_group.formula(group, row).replace('score', 'return')} = {exact(after[row, k])}"
            )
        return "\n".join(lines)
