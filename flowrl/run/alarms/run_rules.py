"""Rules about a run as a whole: numbers that are not finite, weights that do not move, held-out scores, time, disk."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Finding, Rule
from flowrl.run.alarms.rules import FEWEST

_GIGABYTE = 10**9
_STILL = {"lr": "the learning rate", "grad_norm": "the gradient", "kl/ref": "KL to the reference"}
"""Metrics that are exactly 0 while no weight moves."""


class NotFinite(Rule):
    """A metric is NaN or infinite."""

    def check(self, history: History) -> Finding | None:
        """The first such metric."""
        for key, value in history.steps[-1].items():
            if value is None or not math.isfinite(value):
                usual = next(iter(history.before(key)[-1:]), None)
                return Finding(f"{key} is not finite", key, None, usual, command="rows {run} --step {step}")
        return None


class NothingUpdated(Rule):
    """The weights have not moved since the start: the learning rate or the gradient is 0, or KL is exactly 0.

    Args:
        steps: so many steps at least.
    """

    steps: int = Field(default=3, ge=1)

    def check(self, history: History) -> Finding | None:
        """The metric that says so."""
        if len(history.steps) < self.steps:
            return None
        for name, why in _STILL.items():
            for key in history.keys(name):
                values = history.newest(key, len(history.steps))
                if values is not None and not any(values):
                    text = f"nothing is updated: {why} ({key}) is exactly 0 in all {len(values)} steps"
                    return Finding(text, key, 0.0, "above 0", command="rows {run} --step {step}")
        return None


class HeldOutFalls(Rule):
    """A held-out score falls while the training reward rises: the policy learns what only the reward pays for.

    Args:
        to: fires if the mean of the two newest validations is below this fraction of the best one before.
        validations: so many at least.
    """

    to: float = Field(default=0.9, gt=0, lt=1)
    validations: int = Field(default=5, ge=3)

    def check(self, history: History) -> Finding | None:
        """The validation."""
        for key in dict.fromkeys(key for one in history.validations for key in one if key.endswith("/reward/mean")):
            known = [(int(one["step"]), one[key]) for one in history.validations if key in one]
            if len(known) < self.validations:
                continue
            when, best = max(known[:-2], key=lambda one: one[1])
            newest = (known[-1][1] + known[-2][1]) / 2
            then, now = (self._reward(history, step) for step in (when, history.step))
            if best > 0 and newest < self.to * best and now > then:
                text = (
                    f"{key} is {newest:.4g} in the two newest validations and was {best:.4g} after step {when}, while "
                    f"the training reward rose from {then:.4g} to {now:.4g}"
                )
                return Finding(text, key, newest, best, command="rows {run} --step {step} --best 8")
        return None

    def _reward(self, history: History, step: int) -> float:
        """The mean training reward of about five steps until a step."""
        near = [s["reward/mean"] for s in history.steps if "reward/mean" in s and step - 5 < s["step"] <= max(step, 5)]
        return float(np.mean(near)) if near else math.nan


class Mismatch(Rule):
    """Engine and trainer disagree beyond the threshold that the run calibrated in its first steps; see
    ``MismatchAlarm``."""

    def check(self, history: History) -> Finding | None:
        """The mean difference of the log-probs."""
        for key in history.keys("rollout/logp_diff_mean"):
            value, limit = history.now(key), history.now(key.replace("logp_diff_mean", "alarm_above"))
            if value is not None and limit is not None and value > limit:
                text = f"the log-probs of engine and trainer differ by {value:.3g} nats per token, above {limit:.3g}"
                return Finding(text, key, value, limit)
        return None


class Slow(Rule):
    """A node takes far longer than usual, or is still open.

    Args:
        times: fires above so many times the median of the steps before.
        seconds: and above so many seconds.
    """

    times: float = Field(default=6.0, gt=1)
    seconds: float = Field(default=60.0, gt=0)

    def check(self, history: History) -> Finding | None:
        """The node, with its seconds."""
        took = {key: value for key, value in history.steps[-1].items() if key.startswith("timing/")}
        for key in (key for key, seconds in took.items() if seconds > self.seconds):
            if found := self._judge(key.removeprefix("timing/"), history.now(key), history.before(key), "took"):
                return found
        node, seconds = history.facts.get("open", (None, 0.0))
        key = f"timing/{node}"
        before = [*history.before(key), *filter(None, [history.now(key)])]
        return self._judge(str(node), seconds, before, "has been running for")

    def _judge(self, node: str, seconds: float | None, before: Sequence[float], took: str) -> Finding | None:
        if seconds is None or seconds <= self.seconds or len(before) < FEWEST:
            return None
        usual = statistics.median(before)
        if seconds <= self.times * usual:
            return None
        text = f"{node} {took} {seconds:.0f} s, usually {usual:.3g} s"
        return Finding(text, f"timing/{node}", seconds, usual, node=node, rows=(), command="runs {run}")


class NoRecording(Rule):
    """The run has stopped recording its rows, or its disk is nearly full.

    Args:
        gigabytes: fires if less is free.
    """

    gigabytes: float = Field(default=1.0, gt=0)

    def check(self, history: History) -> Finding | None:
        """Why, or how much is free."""
        stopped, free = history.facts.get("stopped"), history.facts.get("free")
        if stopped is not None:
            return Finding(f"recording stopped: {stopped}", rows=())
        if free is not None and free < self.gigabytes * _GIGABYTE:
            text = f"{free / _GIGABYTE:.2f} GB are free on the disk of the run"
            return Finding(text, None, free / _GIGABYTE, self.gigabytes, rows=())
        return None
