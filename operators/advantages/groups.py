"""Group-relative advantages: the responses to one prompt are each other's baseline, so there is no critic.

A row's score is the sum of its rewards, and all its tokens have the same advantage. A fully masked row has no score and
does not count in the statistics of its group. The functions are plain PyTorch; the operators below them are the same
computations as nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import Advantages, ResponseMask, TokenLevelRewards, Uid
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.data.proto.column_math import numbers_of_groups
from flowrl.errors import DataError
from flowrl.operators.advantages.per_token import blocks_of_rewards, row_blocks, select
from flowrl.operators.explains import exact, tokens_on

Counts = Literal["spread", "nonzero"]


class Groups:
    """Scores of rows, and sums over the rows that share a `uid`.

    Args:
        token_level_rewards: float ``[batch response]``; zero off the mask.
        response_mask: bool ``[batch response]``.
        uid: ``[batch]``, the group of each row; the rows of a group need not be adjacent.

    Attributes:
        scores: float64 ``[batch]``, 0 for rows without a token on the mask. They are rounded to float32 and summed in
            float64: the sum of n equal float32 numbers is exact there, so a group of equal scores gets exactly 0, and
            not rounding noise divided by eps.
        lengths: float64 ``[batch]``, number of tokens on the mask.
        live: float64 ``[batch]``, 1 for rows with a token on the mask, else 0.
        size: float64 ``[batch]``, number of live rows in the row's group.
    """

    def __init__(self, token_level_rewards: Tensor, response_mask: Tensor, uid: np.ndarray) -> None:
        self.scores, self.lengths = _scores(token_level_rewards, response_mask)
        self.live = (self.lengths > 0).double()
        if len(uid) != len(self.scores):
            raise DataError(
                f"uid has {len(uid)} rows and token_level_rewards {len(self.scores)}. Pass one uid per row.",
                code="rows.shape-mismatch",
                expected=len(self.scores),
                found=len(uid),
            )
        if {list, dict} & set(map(type, uid.tolist())):
            row, odd = next((row, name) for row, name in enumerate(uid.tolist()) if isinstance(name, list | dict))
            raise DataError(
                f"uid of row {row} is {odd!r}, expected text. Give all rows of a prompt the same text.",
                code="rows.shape-mismatch",
                row=row,
                found=str(odd),
            )
        index, names = numbers_of_groups(uid)
        sizes = np.bincount(index, minlength=len(names))
        if (sizes == 1).any():
            lone = names[int((sizes == 1).argmax())]
            raise DataError(
                f"{int((sizes == 1).sum())} of {len(names)} groups have a single row (the first has uid "
                f"{str(lone)!r}), and the advantage of a row against itself is 0. Sample several responses per prompt, "
                f"for example with Repeat(8).",
                code="rows.small-group",
                uid=str(lone),
                expected=2,
                found=1,
            )
        self._index, self._number = torch.from_numpy(index).to(self.scores.device), len(names)
        self.size = self.sum(self.live)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over each row's group: float64 ``[batch]`` to float64 ``[batch]``."""
        return x.new_zeros(self._number).index_add_(0, self._index, x)[self._index]

    def blocks(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of complete groups with about `rows` rows each: their row numbers, and their groups counted from 0."""
        order = self._index.argsort(stable=True)
        ends = torch.bincount(self._index).cumsum(0).tolist()
        start = first = 0
        for number, end in enumerate(ends, 1):
            if end - start >= rows or number == len(ends):
                yield order[start:end], self._index[order[start:end]] - first
                start, first = end, number

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the live rows of each row's group: float64 ``[batch]``."""
        return self.sum(x) / self.size.clamp(min=1)


def _scores(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the rewards and the number of tokens of each row: float64 ``[batch]``."""
    scores, lengths = torch.zeros(2, len(rewards), dtype=torch.float64, device=rewards.device)
    for rows, given in blocks_of_rewards(rewards, mask, "token_level_rewards"):
        scores[rows], lengths[rows] = given.sum(-1), mask[rows].sum(-1, dtype=torch.int32)
    return scores, lengths


def _spread(advantage: Tensor, response_mask: Tensor) -> Tensor:
    """Broadcast one number per row to its tokens: float32 ``[batch response]``, 0 off the mask."""
    spread = torch.empty(response_mask.shape, device=response_mask.device)
    for rows in row_blocks(response_mask):
        mask = response_mask[rows]
        spread[rows] = select(advantage[rows].unsqueeze(-1).expand(mask.shape), mask)
    return spread


@torch.no_grad()
def group_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: np.ndarray,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages under outcome supervision (GRPO: Shao et al. 2024, arXiv:2402.03300, §4.1.2).

    ``(score - mean) / (std + eps)`` over the rows that share its `uid`, where std is the sample standard deviation
    (``n - 1``), as in verl. Without `normalize_std` it is ``score - mean`` (Dr. GRPO: Liu et al. 2025,
    arXiv:2503.20783).

    Args:
        token_level_rewards, response_mask, uid: see `Groups`.
        normalize_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group of equal scores.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    advantage = group.scores - group.mean(group.scores)
    if normalize_std:
        variance = group.sum(group.live * advantage.square()) / (group.size - 1).clamp(min=1)
        advantage = advantage / (variance.sqrt() + eps)
    return _spread(advantage, response_mask)


@torch.no_grad()
def rloo_advantage(token_level_rewards: Tensor, response_mask: Tensor, uid: np.ndarray) -> Tensor:
    """Leave-one-out advantages (RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    The score minus the mean score of the *other* rows of the group, ``n / (n - 1) * (score - mean)``. A row is not part
    of its own baseline, so the gradient is unbiased.

    Args:
        token_level_rewards, response_mask, uid: see `Groups`.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group of equal scores.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    advantage = (group.scores - group.mean(group.scores)) * group.size / (group.size - 1).clamp(min=1)
    return _spread(advantage, response_mask)


@torch.no_grad()
def opo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, uid: np.ndarray, leave_one_out: bool = False
) -> Tensor:
    """Advantages against the minimum-variance baseline (OPO: Hao et al. 2025, arXiv:2505.23585).

    The baseline is the mean score of the group, weighted by the length l of each row: ``sum(l * score) / sum(l)``. It
    has minimum variance if the squared gradient norm of a row is proportional to its length. As in the paper, a row is
    part of its own baseline, which biases the gradient; with `leave_one_out` it is not.

    Args:
        token_level_rewards, response_mask, uid: see `Groups`.
        leave_one_out: exclude each row from its own baseline.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group of equal scores.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    weighed, total = group.sum(group.lengths * group.scores), group.sum(group.lengths)
    if leave_one_out:
        weighed, total = weighed - group.lengths * group.scores, total - group.lengths
    advantage = group.scores - weighed / total.clamp(min=1)
    return _spread(torch.where(group.size > 1, advantage, 0.0), response_mask)


@torch.no_grad()
def gpg_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, uid: np.ndarray, counts: Counts = "spread"
) -> Tensor:
    """Group advantages rescaled for groups without a gradient (GPG: Chu et al. 2025, arXiv:2504.02546).

    ``alpha * (score - mean)`` with ``alpha = B / (B - M)``, where M of the batch's B rows are in groups of equal
    scores. The scale of the gradient then does not depend on the number of such groups.

    Args:
        token_level_rewards, response_mask, uid: see `Groups`; all rows of the batch.
        counts: ``B - M`` counts the rows of groups with a ``"spread"``; or those with a ``"nonzero"`` score, as in
            verl: the number of right answers for scores of 0 and 1, whatever their groups.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group of equal scores.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    advantage = (group.scores - group.mean(group.scores)) * group.live
    return _spread(advantage * _alpha(group, counts), response_mask)


def _alpha(group: Groups, counts: Counts) -> Tensor:
    """All rows over those that count, at least one."""
    centered = (group.scores - group.mean(group.scores)) * group.live
    counted = group.sum(centered.abs()) > 0 if counts == "spread" else group.scores != 0
    return group.live.sum() / (group.live * counted).sum().clamp(min=1)


@torch.no_grad()
def pass_at_k_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, uid: np.ndarray, k: int, passed: float = 0.5
) -> Tensor:
    """Advantages that train pass@k (Chen et al. 2025, arXiv:2508.10751, eqs. 14 and 15).

    Each subset of k rows of a group scores 1 if any of its rows passed, else 0. A row's advantage is the mean, over the
    subsets that contain it, of the subset's score minus the mean of all subsets, divided by their standard deviation.
    In closed form, with N rows of which F failed: ``mean = 1 - C(F, k) / C(N, k)``, ``std = sqrt(mean * (1 - mean))``;
    a row that passed gets ``(1 - mean) / std``, one that failed
    ``(1 - mean - C(F - 1, k - 1) / C(N - 1, k - 1)) / std``.

    Args:
        token_level_rewards, response_mask, uid: see `Groups`.
        k: rows per subset; 1 is GRPO with the population standard deviation.
        passed: a row passes if its score is above this value.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 for a group whose subsets all have the same score.
    """
    group = Groups(token_level_rewards, response_mask, uid)
    won = group.live * (group.scores > passed)
    few = (group.live > 0) & (group.size < k)
    if few.any():
        row = int(few.nonzero()[0])
        raise DataError(
            f"The group of row {row} (uid {str(uid[row])!r}) has {int(group.size[row])} rows with a token on the mask, "
            f"and pass@{k} needs {k}. Sample more responses per prompt, for example with Repeat({max(8, k)}), or lower "
            f"k.",
            code="rows.small-group",
            uid=str(uid[row]),
            expected=k,
            found=int(group.size[row]),
        )
    failed = group.size - group.sum(won)
    none = _chance(failed, group.size, k)  # that no row of a subset passed
    std = (none * (1 - none)).sqrt()
    advantage = none - (1 - won) * _chance(failed - 1, group.size - 1, k - 1)
    return _spread(torch.where(std > 0, advantage / std, 0.0), response_mask)


def _chance(some: Tensor, all_: Tensor, k: int) -> Tensor:
    """``C(some, k) / C(all, k)``: the probability that k of all rows are among `some`."""
    chance = torch.ones_like(some)
    for i in range(k):
        chance = chance * (some - i).clamp(min=0) / (all_ - i).clamp(min=1)
    return chance


class GroupBaseline:
    """Mixin of operators with a group baseline, which need several rows per prompt."""

    granularity: ClassVar[Granularity] = "group"

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline"}``."""
        return frozenset({Effect.GROUP_BASELINE})


class _OfScores(GroupBaseline):
    """Mixin of operators whose advantage of a row is a formula of the scores of its group."""

    def formula(self, group: Groups, row: int) -> str:
        """The formula of a row with its numbers."""
        raise NotImplementedError

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        mask = inputs["response_mask"]
        if not (on := tokens_on(mask, row)):
            return "no token on the mask, so it has no advantage"
        formula = self.formula(Groups(inputs["token_level_rewards"], mask, inputs["uid"]), row)
        return f"{formula} = {exact(outputs['advantages'][row, on[0]])}"


class GroupAdvantage(_OfScores, Operator):
    """Group-relative advantages, as in GRPO; see `group_advantage`.

    Args:
        normalize_std: divide by the standard deviation of the group; False is Dr. GRPO.
        eps: added to the standard deviation.
    """

    normalize_std: bool = True
    eps: float = Field(default=1e-6, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline"}``, and ``"scaled"`` with `normalize_std`."""
        return super().effects | ({Effect.SCALED} if self.normalize_std else set())

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, uid: Uid) -> Advantages:
        return group_advantage(token_level_rewards, response_mask, uid, self.normalize_std, self.eps)

    def formula(self, group: Groups, row: int) -> str:
        mean = group.mean(group.scores)
        score, center = exact(group.scores[row]), exact(mean[row])
        if not self.normalize_std:
            return f"score - mean = {score} - {center}"
        squares = group.sum(group.live * (group.scores - mean).square()) / (group.size - 1).clamp(min=1)
        return f"(score - mean) / (std + eps) = ({score} - {center}) / ({exact(squares.sqrt()[row])} + {self.eps})"


class RLOOAdvantage(_OfScores, Operator):
    """Leave-one-out advantages, as in RLOO: the score minus the mean score of the other rows; see `rloo_advantage`."""

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, uid: Uid) -> Advantages:
        return rloo_advantage(token_level_rewards, response_mask, uid)

    def formula(self, group: Groups, row: int) -> str:
        others = (group.sum(group.scores) - group.scores) / (group.size - 1).clamp(min=1)
        return f"score - mean of the others = {exact(group.scores[row])} - {exact(others[row])}"


class OPOAdvantage(_OfScores, Operator):
    """The score minus the length-weighted mean of the group, as in OPO; see `opo_advantage`.

    Args:
        leave_one_out: exclude each row from its own baseline.
    """

    leave_one_out: bool = False

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, uid: Uid) -> Advantages:
        return opo_advantage(token_level_rewards, response_mask, uid, self.leave_one_out)

    def formula(self, group: Groups, row: int) -> str:
        weighed, total = group.sum(group.lengths * group.scores), group.sum(group.lengths)
        if self.leave_one_out:
            weighed, total = weighed - group.lengths * group.scores, total - group.lengths
        baseline = f"{exact(weighed[row])} / {exact(total[row])}"
        return f"score - sum(length * score) / sum(length) = {exact(group.scores[row])} - {baseline}"


class GPGAdvantage(_OfScores, Operator):
    """Group advantages rescaled for groups of equal scores, as in GPG; see `gpg_advantage`.

    Args:
        counts: the rows by which it is rescaled: those of groups with a ``"spread"``, or those with a ``"nonzero"``
            score, as in verl.
    """

    granularity: ClassVar[Granularity] = "batch"

    counts: Counts = "spread"

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, uid: Uid) -> Advantages:
        return gpg_advantage(token_level_rewards, response_mask, uid, self.counts)

    def formula(self, group: Groups, row: int) -> str:
        rows = {"nonzero": "rows with a score", "spread": "rows of groups with a spread"}[self.counts]
        centered = f"({exact(group.scores[row])} - {exact(group.mean(group.scores)[row])})"
        return f"rows / {rows} * (score - mean) = {exact(_alpha(group, self.counts))} * {centered}"


class PassAtKAdvantage(_OfScores, Operator):
    """Advantages that train pass@k; see `pass_at_k_advantage`.

    Args:
        k: rows per subset, at most the size of a group.
        passed: a row passes if its score is above this value.
    """

    k: int = Field(default=4, ge=1)
    passed: float = 0.5

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline", "scaled"}``."""
        return super().effects | {Effect.SCALED}

    def __call__(self, token_level_rewards: TokenLevelRewards, response_mask: ResponseMask, uid: Uid) -> Advantages:
        return pass_at_k_advantage(token_level_rewards, response_mask, uid, self.k, self.passed)

    def formula(self, group: Groups, row: int) -> str:
        won = group.live * (group.scores > self.passed)
        failed = group.size - group.sum(won)
        none = _chance(failed, group.size, self.k)[row]
        others = (1 - won[row]) * _chance(failed - 1, group.size - 1, self.k - 1)[row]
        std = (none * (1 - none)).sqrt()
        if not std:
            return f"all subsets of {self.k} rows have the same score"
        values = f"({exact(none)} - {exact(others)}) / {exact(std)}"
        return f"(P(no subset of {self.k} passes) - P(its subsets without another pass)) / std = {values}"
