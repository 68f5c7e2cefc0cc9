"""Rules about one metric: `Above`, `Jump` and `Falls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Finding, Rule

WINDOW = 10
"""Steps that count as recent."""
FEWEST = 3
"""Steps without which nothing is usual."""


class Above(Rule):
    """The metric is above a limit.

    Args:
        metric: such as ``"kl/ref"``.
        limit: fires above it.
        times: and only above so many times the highest of the `WINDOW` steps before, of which there must be one.
        early: the limit while fewer than `FEWEST` steps were before; None is `limit`.
    """

    metric: str
    limit: float
    times: float | None = Field(default=None, gt=0)
    early: float | None = None

    def check(self, history: History) -> Finding | None:
        """The first metric of this name that is above."""
        for key in history.keys(self.metric):
            value, before = history.now(key), history.before(key, WINDOW)
            limit = self.limit if self.early is None or len(before) >= FEWEST else self.early
            if value is None or value <= limit:
                continue
            if self.times is None:
                return Finding(f"{key} is {value:.4g}, above {limit:g}", key, value, limit)
            if before and value > self.times * max(before):
                text = f"{key} is {value:.4g}; {_highest(before)} {max(before):.4g}"
                return Finding(text, key, value, max(before))
        return None


class Jump(Rule):
    """The metric is a multiple of what it was.

    Args:
        metric: such as ``"actor/grad_norm"``.
        times: fires above so many times the reference.
        of: the reference: the highest of the `WINDOW` steps before, or the first step.
        floor: never fires below it.
    """

    metric: str
    times: float = Field(gt=1)
    of: Literal["recent", "start"] = "recent"
    floor: float = 0.0

    def check(self, history: History) -> Finding | None:
        """The first metric of this name that jumped."""
        for key in history.keys(self.metric):
            value, before = history.now(key), history.before(key)
            if value is None or value <= self.floor or len(before) < (FEWEST if self.of == "recent" else 1):
                continue
            recent = before[-WINDOW:]
            usual, what = (before[0], "it started at") if self.of == "start" else (max(recent), _highest(recent))
            if value > self.times * usual > 0:
                text = f"{key} is {value:.4g}; {what} {usual:.4g} (limit: {self.times:g} times that)"
                return Finding(text, key, value, usual)
        return None


class Falls(Rule):
    """The metric has fallen to a fraction of what it was.

    Args:
        metric: such as ``"actor/entropy"``.
        to: fires below this fraction of the reference, if that is positive.
        of: the reference: the first step, or the best mean of `steps` steps before.
        steps: so many steps in a row must be below.
        spreads: and the drop must be so many standard deviations of the rows' scores, ``reward/std``.
    """

    metric: str
    to: float = Field(gt=0, lt=1)
    of: Literal["start", "best"] = "start"
    steps: int = Field(default=1, ge=1)
    spreads: float = Field(default=0.0, ge=0)

    def check(self, history: History) -> Finding | None:
        """The first metric of this name that fell."""
        for key in history.keys(self.metric):
            newest, before = history.newest(key, self.steps), history.before(key)[: -(self.steps - 1) or None]
            if newest is None or len(before) < self.steps:
                continue
            usual, what = (before[0], "it started at") if self.of == "start" else (self._best(before), "its best was")
            enough = usual - max(newest) > self.spreads * (history.now("reward/std") or 0.0)
            if usual > 0 and max(newest) < self.to * usual and enough:
                text = f"{key} is {newest[-1]:.4g}; {what} {usual:.4g} (limit: {self.to:g} times that)"
                return Finding(text, key, newest[-1], usual)
        return None

    def _best(self, before: Sequence[float]) -> float:
        windows = (before[start : start + self.steps] for start in range(len(before) - self.steps + 1))
        return max(sum(window) / self.steps for window in windows)


def _highest(before: Sequence[float]) -> str:
    return "in the step before it was" if len(before) == 1 else f"the highest of the {len(before)} steps before is"
