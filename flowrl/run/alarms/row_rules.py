"""Rules about the rows of a step: no spread, skipped steps, truncated responses, rewards of one component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Finding, Rule
from flowrl.run.recording.statistics import PASSED, WEIGHTED

NAMED = 20
"""So many rows are named in an alarm."""


class ConstantReward(Rule):
    """All rows have had one and the same score since the start of the run.

    Args:
        steps: so many steps at least.
    """

    steps: int = Field(default=2, ge=1)

    def check(self, history: History) -> Finding | None:
        """The score of all rows."""
        low, high = (history.newest(f"reward/{end}", len(history.steps)) for end in ("min", "max"))
        if len(history.steps) < self.steps or not low or not high or min(low) != max(high):
            return None
        text = f"all rows of all {len(history.steps)} steps have the score {high[-1]:g}, so there is nothing to learn"
        return Finding(text, "reward/max", high[-1], "scores that differ", command="rows {run} --step {step}")


class GroupsAlike(Rule):
    """In more than a share of the groups all rows have the same score, so their advantages are 0.

    It fires while the run has not learned: groups that are all right are no alarm once the reward has risen.

    Args:
        share: fires above it.
        steps: so many steps in a row.
    """

    share: float = Field(default=0.5, gt=0, lt=1)
    steps: int = Field(default=3, ge=1)

    def check(self, history: History) -> Finding | None:
        """The share, all right and all wrong apart."""
        right, wrong = (history.newest(f"groups/all_{what}", self.steps) for what in ("right", "wrong"))
        if right is None or wrong is None or min(map(sum, zip(right, wrong, strict=True))) <= self.share:
            return None
        reward, spread = history.newest("reward/mean", len(history.steps)), history.now("reward/std") or 0.0
        if reward and len(reward) > self.steps and np.mean(reward[-self.steps :]) > reward[0] + spread / 2:
            return None
        text = (
            f"{right[-1] + wrong[-1]:.0%} of the groups have no spread ({right[-1]:.0%} all right, {wrong[-1]:.0%} all "
            f"wrong), for {self.steps} steps"
        )
        kind = "groups/all_wrong" if wrong[-1] >= right[-1] else "groups/all_right"
        rows = _of(history, np.array(history.column("group_spread")) == 0)
        return Finding(text, kind, right[-1] + wrong[-1], self.share, rows=rows, command="rows {run} --step {step}")


class Skips(Rule):
    """A gate skips the update of several steps in a row: ``Filter(..., on_underfill="skip")``.

    Args:
        steps: so many steps in a row.
    """

    steps: int = Field(default=5, ge=1)

    def check(self, history: History) -> Finding | None:
        """The gate."""
        for key in history.keys("skipped"):
            skipped = history.newest(key, self.steps)
            if skipped is not None and all(skipped):
                gate = key.removesuffix("/skipped")
                text = f"{gate} has skipped the update of {self.steps} steps in a row, so nothing is trained"
                return Finding(text, key, 1.0, 0.0, node=gate, rows=(), command="rows {run} --step {step}")
        return None


class Truncated(Rule):
    """More than a share of the responses reach the maximum length, and score low for it.

    Truncated responses that score like the others, or well, are no alarm: some tasks want that length.

    Args:
        share: fires above it.
    """

    share: float = Field(default=0.25, gt=0, lt=1)

    def check(self, history: History) -> Finding | None:
        """The share of truncated responses."""
        share = history.now("response_length/clip_ratio")
        if share is None or share <= self.share:
            return None
        cut, score = np.array(history.column("truncated"), dtype=bool), np.array(history.column("score"))
        if len(cut) == 0 or len(cut) != len(score) or not self._costs(cut, score):
            return None
        text = f"{share:.0%} of the responses are truncated at the maximum length, with a mean score of "
        text += f"{score[cut].mean():.3g}" + ("" if cut.all() else f" (the others: {score[~cut].mean():.3g})")
        order = np.flatnonzero(cut)[np.argsort(score[cut], kind="stable")]
        rows = [history.column("row_id")[row] for row in order[:NAMED]]
        return Finding(text, "response_length/clip_ratio", share, self.share, rows=rows, command=_WORST)

    def _costs(self, cut: Any, score: Any) -> bool:
        """Whether the truncated rows gain on average at most a tenth of what the best row gains."""
        gain = score - score.min()
        return bool(score[cut].mean() <= PASSED and gain[cut].mean() <= gain.max() / 10)


class OneComponent(Rule):
    """One component makes nearly all of the reward's spread and gains, while another one falls, or stays low.

    Components are the terms of `WeighRewards`, or else the numbers that the reward function returned, if the score is
    their weighted sum. One that stays near the highest that a row has is no alarm: there is little to gain.

    Args:
        share: fires above it.
        steps: never fires before.
    """

    share: float = Field(default=0.9, gt=0, lt=1)
    steps: int = Field(default=5, ge=2)

    def check(self, history: History) -> Finding | None:
        """The component, with its share."""
        if len(history.steps) < self.steps or (parts := _terms(history) or _returned(history)) is None:
            return None
        total = np.sum([*parts.values()], 0)
        shares = {name: float(part @ total / max(total @ total, _NOTHING)) for name, part in parts.items()}
        name = max(shares, key=lambda one: shares[one])
        others = [other for other in shares if other != name and self._left_behind(history, other, parts[other])]
        if not others or shares[name] <= self.share or self._gain(history, name, parts[name]) <= 0:
            return None
        (start, now), (other_start, other_now) = (self._ends(history, one) for one in (name, others[0]))
        text = (
            f"{name} makes {min(1.0, shares[name]):.0%} of the spread of the scores: since the first step it went from "
        )
        text += f"{start:.3g} to {now:.3g}, and {others[0]} from {other_start:.3g} to {other_now:.3g}"
        rows = [history.column("row_id")[row] for row in np.argsort(-parts[name], kind="stable")[:NAMED]]
        command = f"rows {{run}} --step {{step}} --{'best' if now > start else 'worst'} 8 --by {name}"
        return Finding(text, name, min(1.0, shares[name]), self.share, rows=rows, command=command)

    def _ends(self, history: History, name: str) -> tuple[float, float]:
        """The mean of a component in the first step and in this one."""
        before, now = history.before(name), history.now(name)
        return (before[0], now) if before and now is not None else (0.0, 0.0)

    def _gain(self, history: History, name: str, part: Any) -> float:
        """The change of a component since the start, positive if it pays; 0 if it is within its noise."""
        values, (start, now) = np.array(history.column(name), dtype=float), self._ends(history, name)
        noise = 2 * values.std() / len(values) ** 0.5
        return float(np.sign((values - values.mean()) @ part)) * (now - start) if abs(now - start) > noise else 0.0

    def _left_behind(self, history: History, name: str, part: Any) -> bool:
        """Whether a component falls, or stays where more than a tenth of its range is to gain."""
        gain, room = self._gain(history, name, part), part.max() / np.ptp(part)
        return bool(gain < 0 or (gain == 0 and room > _LITTLE))


def _terms(history: History) -> dict[str, Any] | None:
    """By term of a weighed reward, what it adds to each row, less its mean; None if fewer than two vary."""
    names = [] if history.rows is None else [n for n in history.rows.column_names if n.endswith(WEIGHTED)]
    return _varying({name.removesuffix(WEIGHTED): np.array(history.column(name), dtype=float) for name in names})


def _returned(history: History) -> dict[str, Any] | None:
    """The same of the numbers that the reward function returned; None if the score is not their weighted sum."""
    names = [] if history.rows is None else [n for n in history.rows.column_names if "/" in n and history.column(n)]
    numbers = {n: np.array(history.column(n), dtype=float) for n in names if not n.endswith("/score")}
    score = np.array(history.column("score"), dtype=float)
    if (numbers := _varying(numbers) or {}) == {} or not len(score) or not score.std():
        return None
    matrix, target = np.stack([*numbers.values()], 1), score - score.mean()
    weights = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if not np.allclose(matrix @ weights, target, atol=1e-4 * score.std()):
        return None
    return _varying({name: weight * part for (name, part), weight in zip(numbers.items(), weights, strict=True)})


def _varying(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """The columns that vary, less their mean; None if fewer than two do."""
    found = {
        name: column - column.mean() for name, column in columns.items() if len(column) and np.ptp(column) > _NOTHING
    }
    return found if len(found) > 1 else None


_NOTHING = 1e-6
_LITTLE = 0.1
_WORST = "rows {run} --step {step} --worst 8"


def _of(history: History, chosen: Any) -> list[str]:
    """The ids of the first of the chosen rows."""
    ids = history.column("row_id")
    return [ids[row] for row in np.flatnonzero(chosen)[:NAMED]] if len(ids) == len(chosen) else []
