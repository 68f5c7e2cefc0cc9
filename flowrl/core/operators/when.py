"""`When`: the steps in which a node runs. The nodes that read the outputs of a skipped node are skipped as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field

from flowrl.core.operators.ports import Signature
from flowrl.spec import Spec, non_default

_FAR = 1_000_000


class When(Spec):
    """The steps in which a node runs, each step `start`, `start` + `every`, ... where the first is 0.

    Args:
        every: the interval in steps; 1 is every step.
        start: steps before the first run.
    """

    schedulable = False

    every: int = Field(default=1, ge=1)
    start: int = Field(default=0, ge=0)

    def runs(self, step: int) -> bool:
        """Whether a node runs in a step, counted from 0."""
        return step >= self.start and (step - self.start) % self.every == 0

    def __str__(self) -> str:
        """``when(start=20)``; empty for every step."""
        given = ", ".join(f"{name}={value}" for name, value in non_default(self).items())
        return f"when({given})" if given else ""


ALWAYS = When()


def first_idle(sinks: Iterable[Sequence[When]]) -> int | None:
    """The first step in which none of these sinks runs, each by all that it depends on; None if there is none."""
    waits = [tuple(one for one in sink if one != ALWAYS) for sink in sinks]
    if not all(waits):
        return None
    every = [one for sink in waits for one in sink]
    # The pattern is periodic, and a start only removes runs before it.
    steps = range(min(math.lcm(*(one.every for one in every)), _FAR))
    return next((step for step in steps if not any(all(w.runs(step) for w in sink) for sink in waits)), None)


class Skipped:
    """The outputs of a skipped operator when an algorithm runs on tensors."""

    def __repr__(self) -> str:
        return "<skipped>"


SKIPPED = Skipped()


def skipped(signature: Signature) -> Any:
    """The return value of a skipped call."""
    if signature.output_record is not None:
        return signature.output_record(*[SKIPPED for _ in signature.outputs])
    return SKIPPED if signature.outputs else None
