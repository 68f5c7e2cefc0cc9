"""Rules about the rows of a step: rewards without spread, truncated responses, and rewards of one component."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Finding, Rule
from flowrl.run.recording.statistics import PASSED

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
    """One component makes nearly all of the reward's spread, and rises while another one does not.

    Components are the numbers that the reward function returned, if the score is their weighted sum.

    Args:
        share: fires above it.
        steps: never fires before.
    """

    share: float = Field(default=0.9, gt=0, lt=1)
    steps: int = Field(default=5, ge=2)

    def check(self, history: History) -> Finding | None:
        """The component, with its share."""
        score = np.array(history.column("score"), dtype=float)
        if len(history.steps) < self.steps or len(score) < 2 or not score.std():
            return None
        shares = self._shares(history, score)
        name = max(shares, key=lambda one: shares[one], default="")
        others = [other for other in shares if other != name and self._rise(history, other) <= 0]
        if not others or shares[name] <= self.share or self._rise(history, name) <= 0:
            return None
        share = min(1.0, shares[name])
        text = f"{name} makes {share:.0%} of the spread of the scores and rises, while {others[0]} does not"
        values = np.array(history.column(name), dtype=float)
        rows = [history.column("row_id")[row] for row in np.argsort(-values, kind="stable")[:NAMED]]
        command = f"rows {{run}} --step {{step}} --best 8 --by {name}"
        return Finding(text, name, share, self.share, rows=rows, command=command)

    def _shares(self, history: History, score: Any) -> dict[str, float]:
        """By component, its share of the variance of the scores; none if the score is not their weighted sum."""
        assert history.rows is not None
        names = [n for n in history.rows.column_names if "/" in n and not n.endswith("/score") and history.column(n)]
        parts = {name: np.array(history.column(name), dtype=float) for name in names}
        parts = {name: part - part.mean() for name, part in parts.items() if part.std()}
        if len(parts) < 2:
            return {}
        matrix, target = np.stack([*parts.values()], 1), score - score.mean()
        weights = np.linalg.lstsq(matrix, target, rcond=None)[0]
        if not np.allclose(matrix @ weights, target, atol=1e-4 * score.std()):
            return {}
        parts_of_score = zip(parts, weights * (matrix.T @ target) / (target @ target), strict=True)
        return {name: float(share) for name, share in parts_of_score if abs(share) > _NOTHING}

    def _rise(self, history: History, name: str) -> float:
        """The change of a component since the start; 0 if it is within its noise."""
        now, before = history.now(name), history.before(name)
        values = np.array(history.column(name), dtype=float)
        change = 0.0 if now is None or not before else now - before[0]
        return change if abs(change) > 2 * values.std() / len(values) ** 0.5 else 0.0


_NOTHING = 1e-6
_WORST = "rows {run} --step {step} --worst 8"


def _of(history: History, chosen: Any) -> list[str]:
    """The ids of the first of the chosen rows."""
    ids = history.column("row_id")
    return [ids[row] for row in np.flatnonzero(chosen)[:NAMED]] if len(ids) == len(chosen) else []
