"""Which rows go on: `Filter` and `Collect`, and operators that decide, one bool a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from flowrl.columns import Kept, ResponseMask, TokenLevelScores, Uid, lookup
from flowrl.core.graphs.gate import Gate, pick, refuse_none
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import Port, PortField
from flowrl.data.metrics import Metrics
from flowrl.data.now import Collected, Now
from flowrl.data.proto.column_math import numbers_of_groups, rows_of_groups
from flowrl.errors import DataError, ParameterError
from flowrl.record_types import ValueType


class Spread(Operator):
    """Groups whose scores differ: in the others no answer teaches anything (DAPO: Yu et al. 2025, arXiv:2503.14476,
    eq. 11).

    A row's score is the sum of its token-level scores. Rows that are masked entirely have none; they go with their
    group, and do not count in it.

    Args:
        least: how far apart the best and the worst score of a group are at least; a group whose scores are all the same
            never passes.

    Returns:
        bool ``[batch]``, the same for all rows of a group.
    """

    granularity: ClassVar[Granularity] = "group"
    least: float = Field(default=0.0, ge=0)

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid) -> Kept:
        numbers, names = numbers_of_groups(uid)
        group = torch.from_numpy(numbers)
        scores = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64).cpu()
        live = response_mask.any(-1).cpu()
        worst = torch.full((len(names),), torch.inf, dtype=torch.float64)
        best = -worst
        worst.scatter_reduce_(0, group[live], scores[live], "amin")
        best.scatter_reduce_(0, group[live], scores[live], "amax")
        apart = best - worst  # -inf for a group without a score
        return ((apart > 0) & (apart >= self.least))[group]


class Ranked(Operator):
    """The best and the worst rows of each group, by score (PF-PPO: Zhang et al. 2024, arXiv:2409.06957).

    A row's score is the sum of its token-level scores. ``Ranked(best=1)`` is best-of-n, and ``Ranked(best=1, worst=1)``
    what PF-PPO filters by: near both ends a reward can be trusted most. Of equal scores the earlier row is the better
    one. Rows that are masked entirely have no score and do not go on; of a group of fewer rows all others do.

    Args:
        best, worst: how many rows of a group go on from either end.

    Returns:
        bool ``[batch]``.

    Raises:
        ParameterError: both are 0.
        DataError: a score is NaN.
    """

    granularity: ClassVar[Granularity] = "group"
    best: int = Field(default=1, ge=0)
    worst: int = Field(default=0, ge=0)

    def __post_init__(self) -> None:
        if not self.best + self.worst:
            raise ParameterError("best=0, worst=0 keep no row of a group; expected at least one, as in Ranked(best=1)")

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid) -> Kept:
        found = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64)
        if found.isnan().any():
            raise DataError(
                f"the score of row {int(found.isnan().nonzero()[0])} is not a number, so it has no rank; expected a "
                f"number for each row: look at the reward function."
            )
        scores, live = found.tolist(), response_mask.any(-1).tolist()
        kept = torch.zeros(len(scores), dtype=torch.bool)
        for members in rows_of_groups(uid).values():
            ranked = sorted((row for row in members if live[row]), key=scores.__getitem__, reverse=True)
            kept[ranked[: self.best] + ranked[max(0, len(ranked) - self.worst) :]] = True
        return kept


class Length(Operator):
    """Rows whose response is of a length within bounds, in tokens on the mask.

    ``Length(most=1023)`` leaves out what was cut off at 1024.

    Args:
        least, most: tokens, bounds included; None is no upper bound.
    """

    granularity: ClassVar[Granularity] = "row"
    least: int = Field(default=1, ge=0)
    most: int | None = Field(default=None, ge=0)

    def __call__(self, response_mask: ResponseMask) -> Kept:
        lengths = response_mask.sum(-1)
        kept = lengths >= self.least
        return kept if self.most is None else kept & (lengths <= self.most)


class Filter(Gate):
    """Lets rows through: the same records out as in, on rows of their own.

    ``edit(insert={"filter": After("reward", Filter(Spread()))})`` leads all through it that is read behind ``reward``
    and was made before. How many rows remain is known once it has run, so ``mini_batch`` behind it is refused (FR004);
    a validation runs without it, on all rows.

    Args:
        predicate: an operator that writes one bool a row, such as `Spread` or one of your own.

    Reads:
        what `predicate` reads, and all that passes.

    Returns:
        what passes. Metrics: ``<node>/offered`` and ``<node>/kept`` in rows; ``reward/kept_mean`` where scores pass.

    Raises:
        DataError: no row is kept.
    """

    def passed(self, rows: Any, metrics: Metrics, now: Now, **given: Any) -> Any:
        """The rows that `predicate` keeps."""
        kept = self.kept(metrics, given)
        if not kept.any():
            refuse_none(self, len(kept), "rows")
        out = {name: pick(getattr(rows, name), kept) for name in self.columns}
        metrics.sum(f"{self.name}/offered", len(kept))
        metrics.sum(f"{self.name}/kept", kept.sum())
        report_scores(out, metrics)
        return self.record(**out)


class Collect(Gate):
    """Lets groups through, and refills: all that it depends on runs again, on further prompts, for what is missing.

    ``edit(insert={"collect": After("reward", Collect(Spread(), groups=32))})`` turns GRPO into dynamic sampling (Yu et
    al. 2025, arXiv:2503.14476). A group is the rows of one `uid`; it passes if `predicate` keeps all of them. Groups
    are taken in the order in which they were drawn, so none is preferred because its answers are short. The first round
    is on the prompts of the step, each later one on as many as are missing; what these draw counts for where the data
    stands, in checkpoints too.

    Args:
        predicate: an operator that writes one bool a row, such as `Spread` or one of your own.
        groups: how many are wanted in every step.
        rounds: how often it may run in a step.
        on_underfill: what to do if groups are missing after the last round: ``"error"``; ``"train"`` on the groups
            that passed; or ``"repeat"`` them, in order, under new ids.

    Reads:
        what `predicate` reads; `uid`; and all that passes.

    Returns:
        what passes. Metrics, in groups: ``<node>/offered``, ``<node>/kept``, ``<node>/surplus`` (passed, and not needed
        any more), ``<node>/repeated``; ``<node>/rounds``; and ``reward/kept_mean`` where scores pass.

    Raises:
        NodeError: groups are missing after all rounds, and `on_underfill` is ``"error"``; or there is none at all.
    """

    groups: int = Field(ge=1)
    rounds: int = Field(default=8, ge=1)
    on_underfill: Literal["error", "train", "repeat"] = "error"

    @cached_property
    def reads(self) -> Mapping[str, Port]:
        """The ports by which it decides: those of `predicate`, and `uid`."""
        own = super().reads
        uid = lookup("uid")
        assert uid is not None
        return own if "uid" in own else {**own, "uid": Port("uid", {PortField("uid"): uid})}

    @property
    def values(self) -> Mapping[str, ValueType]:
        """Which groups it took."""
        return {"collected": ValueType(Collected)}

    @property
    def target_groups(self) -> int | None:
        """`groups`; 1 where it may be fewer."""
        return 1 if self.on_underfill == "train" else self.groups

    @property
    def rounds_at_most(self) -> int:
        """`rounds`."""
        return self.rounds

    def passed(self, rows: Any, metrics: Metrics, now: Now, **given: Any) -> Any:
        """Those of this round that are wanted; or, once all are over, what was collected and its repetitions."""
        if now.round.sizes:
            return self._filled(rows, now.round.sizes, metrics)
        kept, members = self.kept(metrics, given).tolist(), rows_of_groups(given["uid"])
        good = [group for group in members.values() if all(kept[row] for row in group)]
        taken = good[: self.groups if now.round.wanted is None else now.round.wanted]
        index = torch.tensor([row for group in taken for row in group], dtype=torch.int64)
        picked = {name: pick(getattr(rows, name), index) for name in self.columns}
        sizes = tuple(map(len, taken))
        metrics.sum(f"{self.name}/offered", len(members))
        metrics.sum(f"{self.name}/kept", len(taken))
        metrics.sum(f"{self.name}/surplus", len(good) - len(taken))
        metrics.sum(f"{self.name}/rounds", 1)
        report_scores(picked, metrics)
        out = self.record(**picked, collected=Collected(sizes))
        if now.round.wanted is None and self.underfill_action(sizes) == "repeat":  # by hand: nobody runs it again
            return self._filled(out, sizes, metrics)
        return out

    def missing(self, sizes: Sequence[int]) -> int:
        """How many groups are missing of those that are wanted."""
        return self.groups - len(sizes)

    def underfill_action(self, sizes: Sequence[int]) -> str:
        """What to do about groups that are missing once the rounds are over: ``""``, ``"train"`` or ``"repeat"``.

        Raises:
            DataError: it is an error, or there is none at all.
        """
        if not self.missing(sizes):
            return ""
        if not sizes:
            refuse_none(self, self.groups, "groups that are wanted")
        if self.on_underfill == "error":
            raise DataError(
                f"{self.name} has {len(sizes)} of {self.groups} groups after all its rounds ({self.rounds}); expected "
                f"enough that {self.predicate!r} keeps: allow more rounds (rounds=), draw more prompts a step, or say "
                f"what to do then: on_underfill='train' or on_underfill='repeat'."
            )
        return self.on_underfill

    def _filled(self, rows: Any, sizes: Sequence[int], metrics: Metrics) -> Any:
        """All groups, and these again, in their order, until there are enough."""
        starts = [sum(sizes[:group]) for group in range(len(sizes))]
        order = [(again % len(sizes), again // len(sizes)) for again in range(self.groups)]
        index = torch.tensor([starts[g] + i for g, _ in order for i in range(sizes[g])], dtype=torch.int64)
        times = [time for group, time in order for _ in range(sizes[group])]
        picked = {name: pick(getattr(rows, name), index) for name in self.columns}
        for name, column in self.columns.items():
            if column in ("uid", "row_id"):  # a group of its own, which is its own baseline
                named = [f"{value}+{time}" if time else value for value, time in zip(picked[name], times, strict=True)]
                picked[name] = np.array(named, dtype=object)
        metrics.sum(f"{self.name}/repeated", self.groups - len(sizes))
        repeated = Collected(tuple(sizes[group] for group, _ in order))
        return self.record(**picked, collected=repeated)


def report_scores(rows: Mapping[str, Any], metrics: Metrics) -> None:
    """Report ``reward/kept_mean`` of what passes, where it has scores: the mean over rows with a token on the mask, as
    ``reward/mean`` is over those that were offered."""
    if {"token_level_scores", "response_mask"} <= rows.keys():
        live = rows["response_mask"].any(-1)
        metrics.mean("reward/kept_mean", rows["token_level_scores"][live].double().sum(), live.sum())
