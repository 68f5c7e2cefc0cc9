"""Schedules: numbers over time, given where an operator takes a number: ``KLShape(coef=Linear(0.1, 0.01, steps=100))``.

The number is computed for each step, before the operator runs. `at` is a pure function of the number of steps done
before, so a resumed run needs only that number. A learning rate is multiplied by one, too, which counts optimizer
steps: ``TorchTrainer(..., schedule=WSD(1.0, 0.0, steps=1000, decay=200, warmup=50))``. With a
warm-up the very first step has learning rate 0, as in transformers and verl.
"""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from flowrl.spec import Schedule

__all__ = ["WSD", "Constant", "Cosine", "Linear", "Schedule"]


class Constant(Schedule):
    """One number, after a linear warm-up from 0.

    Args:
        value: the number.
        warmup: steps until it is reached.
    """

    value: float
    warmup: int = Field(default=0, ge=0)

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, self.warmup)

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before."""
        return _warm(step, self.warmup) * self.value


class _Between(Schedule):
    """From one number to another, which is reached at `steps` and remains."""

    start: float
    end: float
    steps: int = Field(ge=1)
    warmup: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} exceeds steps={self.steps}; shorten it")
        return self

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, self.warmup, self.steps)

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before."""
        left = self._left(1.0 - min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup)))
        # exactly the start, which rounding of the sum may miss
        number = self.start if left == 1 else self.end + (self.start - self.end) * left
        return _warm(step, self.warmup) * number

    def _left(self, time: float) -> float:
        """The remaining fraction of the change, from 1 to 0, with a fraction `time` of the time remaining."""
        raise NotImplementedError


class Linear(_Between):
    """From one number to another in a straight line.

    Args:
        start, end: the numbers.
        steps: after which it remains at `end`.
        warmup: steps of a linear warm-up from 0 to `start`, the first of `steps`.
    """

    def _left(self, time: float) -> float:
        return time


class Cosine(_Between):
    """From one number to another in half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, no restarts).

    Args:
        start, end: the numbers.
        steps: after which it remains at `end`.
        warmup: steps of a linear warm-up from 0 to `start`, the first of `steps`.
    """

    def _left(self, time: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * (1 - time)))


class WSD(Schedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395, §4): a constant number, which falls in the last steps.

    Args:
        start, end: the constant number, and the one that it changes to in a straight line.
        steps: after which it remains at `end`.
        decay: the last of these steps, in which it changes.
        warmup: the first of these steps, a linear warm-up from 0.
    """

    start: float
    end: float
    steps: int = Field(ge=1)
    decay: int = Field(ge=1)
    warmup: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.warmup + self.decay > self.steps:
            raise ValueError(
                f"warmup={self.warmup} and decay={self.decay} together exceed steps={self.steps}; shorten them"
            )
        return self

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, self.warmup, self.steps - self.decay, self.steps)

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before."""
        gone = min(1.0, max(0, step - self.steps + self.decay) / self.decay)
        return _warm(step, self.warmup) * (self.start * (1 - gone) + self.end * gone)


def _warm(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0
