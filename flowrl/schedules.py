"""Schedules: numbers over time, given where an operator takes a number: ``KLShape(coef=Linear(0.1, 0.01, steps=100))``.

The number is computed for each step, before the operator runs. ``at`` is a pure function of the number of steps done
before, so a resumed run needs only that number. A learning rate is multiplied by one, too, which counts optimizer
steps: ``TorchTrainer(..., schedule=WSD(1.0, 0.0, steps=1000, decay=200, warmup=50))``. With a
warm-up the very first step has learning rate 0, as in transformers and verl.

The schedule of a learning rate may last as long as the run: ``schedule=Cosine(1.0, 0.1, warmup=0.03)``. A `Training`
counts the optimizer steps of each role, from its own steps (or epochs) and the mini-batches, before it builds engines.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from flowrl.errors import ParameterError
from flowrl.spec import Schedule, parameters

__all__ = ["WSD", "Constant", "Cosine", "Linear", "Schedule"]

_Part = Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)]
"""Steps; or a share of all steps, rounded up to steps as in transformers."""


class _Over(Schedule):
    """Base of schedules over a number of steps, or over those of the run."""

    @property
    def over_run(self) -> bool:
        parts = (part for name, part in parameters(self).items() if name in ("steps", "warmup", "decay"))
        return any(part is None or isinstance(part, float) for part in parts)

    def over(self, steps: int) -> Self:
        if not self.over_run:
            return self
        given = parameters(self)
        steps = given.get("steps") or steps
        parts = {"steps": steps, "warmup": _count(given["warmup"], steps, most=steps - ("decay" in given))}
        if "decay" in given:  # it has at least a step
            parts["decay"] = _count(given["decay"], steps, most=max(1, steps - parts["warmup"]))
        return dataclasses.replace(self, **{name: part for name, part in parts.items() if name in given})

    def _known(self, part: float | None) -> int:
        """The steps of a part; refuses those that depend on the length of the run."""
        if self.over_run:
            raise ParameterError(
                f"{self!r} lasts as long as the run, and its number of optimizer steps is not known here. It is known "
                f"for the learning rate of a role in a Training; elsewhere pass numbers of steps, such as "
                f"Cosine(1.0, 0.1, steps=1000, warmup=20).",
                code="parameter.unknown-length",
                schedule=self,
            )
        return int(part or 0)


class Constant(_Over):
    """One number, after a linear warm-up from 0.

    Args:
        value: the number.
        warmup: steps until it is reached; or their share of the run, such as 0.03.
    """

    value: float
    warmup: _Part = 0

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, self._known(self.warmup))

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before."""
        return _warm(step, self._known(self.warmup)) * self.value


class _Between(_Over):
    """From one number to another, which is reached at `steps` and remains."""

    start: float
    end: float
    steps: int | None = Field(default=None, ge=1)
    warmup: _Part = 0

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.steps is not None and self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} exceeds steps={self.steps}; shorten it")
        return self

    @property
    def turns(self) -> tuple[int, ...]:
        return (0, self._known(self.warmup), self._known(self.steps))

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before."""
        warmup, steps = self._known(self.warmup), self._known(self.steps)
        left = self._left(1.0 - min(1.0, max(0, step - warmup) / max(1, steps - warmup)))
        # exactly the start, which rounding of the sum may miss
        number = self.start if left == 1 else self.end + (self.start - self.end) * left
        return _warm(step, warmup) * number

    def _left(self, time: float) -> float:
        """The remaining fraction of the change, from 1 to 0, with a fraction `time` of the time remaining."""
        raise NotImplementedError


class Linear(_Between):
    """From one number to another in a straight line.

    Args:
        start, end: the numbers.
        steps: after which it remains at `end`; None is the length of the run.
        warmup: steps of a linear warm-up from 0 to `start`, the first of `steps`; or their share, such as 0.03.
    """

    def _left(self, time: float) -> float:
        return time


class Cosine(_Between):
    """From one number to another in half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, no restarts).

    Args:
        start, end: the numbers.
        steps: after which it remains at `end`; None is the length of the run.
        warmup: steps of a linear warm-up from 0 to `start`, the first of `steps`; or their share, such as 0.03.
    """

    def _left(self, time: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * (1 - time)))


class WSD(_Over):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395, §4): a constant number, which falls in the last steps.

    Args:
        start, end: the constant number, and the one that it changes to in a straight line.
        steps: after which it remains at `end`; None is the length of the run.
        decay: the last of these steps, in which it changes; or their share, such as 0.2.
        warmup: the first of these steps, a linear warm-up from 0; or their share.
    """

    start: float
    end: float
    steps: int | None = Field(default=None, ge=1)
    decay: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(kw_only=True)
    warmup: _Part = 0

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.steps is not None and not self.over_run and self.warmup + self.decay > self.steps:
            raise ValueError(
                f"warmup={self.warmup} and decay={self.decay} together exceed steps={self.steps}; shorten them"
            )
        return self

    @property
    def turns(self) -> tuple[int, ...]:
        steps = self._known(self.steps)
        return (0, self._known(self.warmup), steps - self._known(self.decay), steps)

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before."""
        _, warmup, first, last = self.turns
        gone = min(1.0, max(0, step - first) / (last - first))
        return _warm(step, warmup) * (self.start * (1 - gone) + self.end * gone)


def _warm(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def _count(part: float, steps: int, most: int) -> int:
    """A number of steps, or a share of `steps`, as a number of steps; that of a share is at most `most`."""
    return part if isinstance(part, int) else min(math.ceil(part * steps), most)
