"""Row filters: `Filter` and `Collect`, and the predicates that decide, one bool per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from flowrl.columns import ResponseMask, RowMask, TokenLevelScores, Uid, lookup
from flowrl.core.graphs.gate import Gate, pick, refuse_empty
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import Port, PortField
from flowrl.data.metrics import Metrics
from flowrl.data.now import Collected, Now
from flowrl.data.proto.column_math import numbers_of_groups, rows_of_groups
from flowrl.errors import DataError, ParameterError
from flowrl.record_types import ValueType


class Spread(Operator):
    """Select groups whose scores differ, since equal scores give no gradient (DAPO: Yu et al. 2025, arXiv:2503.14476,
    eq. 11).

    A row's score is the sum of its token-level scores. Fully masked rows have no score and do not count in their group,
    but share its result.

    Args:
        least: minimum difference between the best and the worst score of a group; a group of equal scores never passes.

    Returns:
        bool ``[batch]``, the same for all rows of a group.
    """

    granularity: ClassVar[Granularity] = "group"
    least: float = Field(default=0.0, ge=0)

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid) -> RowMask:
        numbers, names = numbers_of_groups(uid)
        group = torch.from_numpy(numbers)
        scores = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64).cpu()
        live = response_mask.any(-1).cpu()
        worst = torch.full((len(names),), torch.inf, dtype=torch.float64)
        best = -worst
        worst.scatter_reduce_(0, group[live], scores[live], "amin")
        best.scatter_reduce_(0, group[live], scores[live], "amax")
        difference = best - worst  # -inf for a group without a score
        return ((difference > 0) & (difference >= self.least))[group]


class Ranked(Operator):
    """Select the best and the worst rows of each group, by score (PF-PPO: Zhang et al. 2024, arXiv:2409.06957).

    A row's score is the sum of its token-level scores. ``Ranked(best=1)`` is best-of-n; ``Ranked(best=1, worst=1)`` is
    the filter of PF-PPO, since rewards are most reliable at both ends. Among equal scores the earlier row ranks higher.
    Fully masked rows have no score and never pass; smaller groups pass with all other rows.

    Args:
        best, worst: number of rows of a group to select from either end.

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
            raise ParameterError(
                "Ranked(best=0, worst=0) would drop all rows. Select at least one per group, such as Ranked(best=1).",
                code="rows.invalid-settings",
                best=self.best,
                worst=self.worst,
            )

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, uid: Uid) -> RowMask:
        totals = torch.where(response_mask, token_level_scores, 0.0).sum(-1, dtype=torch.float64)
        if totals.isnan().any():
            row = int(totals.isnan().nonzero()[0])
            raise DataError(
                f"The score of row {row} is NaN, so the row has no rank. Check the node that writes "
                f"token_level_scores.",
                code="reward.not-finite",
                node=self.name,
                row=row,
                found="nan",
            )
        scores, live = totals.tolist(), response_mask.any(-1).tolist()
        selected = torch.zeros(len(scores), dtype=torch.bool)
        for members in rows_of_groups(uid).values():
            ranked = sorted((row for row in members if live[row]), key=scores.__getitem__, reverse=True)
            selected[ranked[: self.best] + ranked[max(0, len(ranked) - self.worst) :]] = True
        return selected


class Length(Operator):
    """Select rows by the length of the response, in tokens on the mask.

    ``Length(most=1023)`` drops responses that were truncated at 1024 tokens.

    Args:
        least, most: bounds in tokens, both inclusive; None is no upper bound.
    """

    granularity: ClassVar[Granularity] = "row"
    least: int = Field(default=1, ge=0)
    most: int | None = Field(default=None, ge=0)

    def __call__(self, response_mask: ResponseMask) -> RowMask:
        lengths = response_mask.sum(-1)
        selected = lengths >= self.least
        return selected if self.most is None else selected & (lengths <= self.most)


class Filter(Gate):
    """Drop rows by a predicate: returns the records that it reads, with the selected rows.

    ``edit(insert={"filter": After("reward", Filter(Spread()))})`` filters every column that a node downstream of
    ``reward`` reads. The number of selected rows varies, so ``mini_batch`` downstream is refused (FR004). A validation
    runs without filters, on all rows.

    Args:
        predicate: an operator that writes one bool per row, such as `Spread` or your own.
        on_underfill: what to do if no row passes: ``"error"``, or ``"skip"`` the update of the step; see `Collect`.

    Reads:
        The columns of `predicate`, and those that pass.

    Returns:
        The columns that pass. Metrics: ``<node>/offered`` and ``<node>/kept`` in rows; ``reward/kept_mean`` if scores
        pass; with ``on_underfill="skip"``, ``<node>/skipped``, 1 if it skips the step, else 0.

    Raises:
        DataError: no row passes, and `on_underfill` is ``"error"``.
    """

    on_underfill: Literal["error", "skip"] = "error"

    @property
    def values(self) -> Mapping[str, ValueType]:
        """The number of rows that passed, if it may skip a step."""
        return {"collected": ValueType(Collected)} if self.skips else {}

    @property
    def skips(self) -> bool:
        """Whether `on_underfill` is ``"skip"``."""
        return self.on_underfill == "skip"

    def underfill_action(self, sizes: Sequence[int]) -> str:
        """``"skip"`` if no row passed and it skips such steps."""
        return "skip" if self.skips and not sizes else ""

    def select(self, rows: Any, metrics: Metrics, now: Now, **given: Any) -> Any:
        """The rows that `predicate` selects."""
        selected = self.row_mask(metrics, given)
        if not selected.any() and not self.skips:
            refuse_empty(self, len(selected), "rows")
        out = {name: pick(getattr(rows, name), selected) for name in self.columns}
        metrics.sum(f"{self.name}/offered", len(selected))
        metrics.sum(f"{self.name}/kept", selected.sum())
        report_scores(out, metrics)
        if not self.skips:
            return self.record(**out)
        metrics.sum(f"{self.name}/skipped", not selected.any())
        return self.record(**out, collected=Collected((int(selected.sum()),) if selected.any() else ()))


class Collect(Gate):
    """Drop groups by a predicate and refill: all nodes upstream run again on further prompts for the missing groups.

    ``edit(insert={"collect": After("reward", Collect(Spread(), groups=32))})`` turns GRPO into dynamic sampling (Yu et
    al. 2025, arXiv:2503.14476). A group, the rows of one `uid`, passes if `predicate` selects all its rows. Groups are
    taken in the order of the data, so short responses are not preferred. The first round uses the prompts of the step,
    each later one as many further prompts as groups are missing. They advance the position in the data, also in
    checkpoints.

    Args:
        predicate: an operator that writes one bool per row, such as `Spread` or your own.
        groups: number of groups per step.
        rounds: maximum number of rounds per step.
        on_underfill: what to do if groups are missing after the last round: ``"error"``; ``"train"`` on the groups
            that passed; ``"repeat"`` them, in order, under new ids; or ``"skip"`` the update of the step: nothing that
            is trained changes, no weights are transferred, and no `State` changes, while data and keys advance.

    Reads:
        The columns of `predicate`, `uid`, and those that pass.

    Returns:
        The columns that pass. Metrics, in groups: ``<node>/offered``, ``<node>/kept``, ``<node>/surplus`` (passed but
        not needed), ``<node>/repeated``; ``<node>/rounds``; ``reward/kept_mean`` if scores pass; and with
        ``on_underfill="skip"``, ``<node>/skipped``, 1 if it skips the step, else 0.

    Raises:
        NodeError: groups are missing after all rounds, and `on_underfill` is ``"error"``; no group passed, and it is
            ``"train"`` or ``"repeat"``; or more than `max_skips` steps in a row are skipped.
    """

    groups: int = Field(ge=1)
    rounds: int = Field(default=8, ge=1)
    on_underfill: Literal["error", "train", "repeat", "skip"] = "error"

    @cached_property
    def reads(self) -> Mapping[str, Port]:
        """The ports of `predicate`, and `uid`."""
        own = super().reads
        uid = lookup("uid")
        assert uid is not None
        return own if "uid" in own else {**own, "uid": Port("uid", {PortField("uid"): uid})}

    @property
    def values(self) -> Mapping[str, ValueType]:
        """The sizes of the groups that passed."""
        return {"collected": ValueType(Collected)}

    @property
    def target_groups(self) -> int | None:
        """`groups`; 1 with ``on_underfill="train"``, where there may be fewer."""
        return 1 if self.on_underfill == "train" else self.groups

    @property
    def rounds_at_most(self) -> int:
        """`rounds`."""
        return self.rounds

    @property
    def skips(self) -> bool:
        """Whether `on_underfill` is ``"skip"``."""
        return self.on_underfill == "skip"

    def select(self, rows: Any, metrics: Metrics, now: Now, **given: Any) -> Any:
        """The groups of this round that are needed; after the last round, all groups with repetitions."""
        if now.round.sizes:
            return self._filled(rows, now.round.sizes, metrics)
        selected, members = self.row_mask(metrics, given).tolist(), rows_of_groups(given["uid"])
        good = [group for group in members.values() if all(selected[row] for row in group)]
        taken = good[: self.groups if now.round.missing is None else now.round.missing]
        index = torch.tensor([row for group in taken for row in group], dtype=torch.int64)
        picked = {name: pick(getattr(rows, name), index) for name in self.columns}
        sizes = tuple(map(len, taken))
        metrics.sum(f"{self.name}/offered", len(members))
        metrics.sum(f"{self.name}/kept", len(taken))
        metrics.sum(f"{self.name}/surplus", len(good) - len(taken))
        metrics.sum(f"{self.name}/rounds", 1)
        if self.skips:
            needed = self.groups if now.round.missing is None else now.round.missing
            last = now.round.missing is None or now.round.number + 1 == self.rounds
            metrics.sum(f"{self.name}/skipped", last and len(taken) < needed)
        report_scores(picked, metrics)
        out = self.record(**picked, collected=Collected(sizes))
        if now.round.missing is None and self.underfill_action(sizes) == "repeat":  # called directly: the only round
            return self._filled(out, sizes, metrics)
        return out

    def missing(self, sizes: Sequence[int]) -> int:
        """How many of the `groups` are missing."""
        return self.groups - len(sizes)

    def underfill_action(self, sizes: Sequence[int]) -> str:
        """What to do if groups are missing after the last round: ``""`` if none is, ``"train"``, ``"repeat"`` or
        ``"skip"``.

        Raises:
            DataError: groups are missing and `on_underfill` is ``"error"``, or no group passed.
        """
        if not self.missing(sizes):
            return ""
        if not sizes and not self.skips:
            refuse_empty(self, self.groups, "groups")
        if self.on_underfill == "error":
            raise DataError(
                f"{self.name} has {len(sizes)} of {self.groups} groups that {self.predicate!r} selects, after all "
                f"{self.rounds} rounds. Allow more rounds (rounds=), sample more prompts per step, or pass "
                f"on_underfill='train', 'repeat' or 'skip'.",
                code="rows.underfilled",
                node=self.name,
                expected=self.groups,
                found=len(sizes),
            )
        return self.on_underfill

    def _filled(self, rows: Any, sizes: Sequence[int], metrics: Metrics) -> Any:
        """All groups, repeated in order until there are enough."""
        starts = [sum(sizes[:group]) for group in range(len(sizes))]
        order = [(number % len(sizes), number // len(sizes)) for number in range(self.groups)]
        index = torch.tensor([starts[g] + i for g, _ in order for i in range(sizes[g])], dtype=torch.int64)
        times = [time for group, time in order for _ in range(sizes[group])]
        picked = {name: pick(getattr(rows, name), index) for name in self.columns}
        for name, column in self.columns.items():
            if column in ("uid", "row_id"):  # a repeated group is a separate group, with its own baseline
                named = [f"{value}+{time}" if time else value for value, time in zip(picked[name], times, strict=True)]
                picked[name] = np.array(named, dtype=object)
        metrics.sum(f"{self.name}/repeated", self.groups - len(sizes))
        repeated = Collected(tuple(sizes[group] for group, _ in order))
        return self.record(**picked, collected=repeated)


def report_scores(rows: Mapping[str, Any], metrics: Metrics) -> None:
    """Report ``reward/kept_mean``, the mean score of the rows that pass (``reward/mean`` is that of all rows)."""
    if {"token_level_scores", "response_mask"} <= rows.keys():
        live = rows["response_mask"].any(-1)
        if not len(live):  # a mean over nothing is NaN
            return
        metrics.mean("reward/kept_mean", rows["token_level_scores"][live].double().sum(), live.sum())
