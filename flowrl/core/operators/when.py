"""`When`: in which steps a node runs. What does not run leaves nothing, so what reads it does not run either."""

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
        every: of so many steps it runs in one; 1 is each.
        start: steps that go without it first.
    """

    timeless = True

    every: int = Field(default=1, ge=1)
    start: int = Field(default=0, ge=0)

    def runs(self, step: int) -> bool:
        """Whether a node runs in a step, `step` of which were done before."""
        return step >= self.start and (step - self.start) % self.every == 0

    def __str__(self) -> str:
        """``when(start=20)``; of one that is always, nothing."""
        given = ", ".join(f"{name}={value}" for name, value in non_default(self).items())
        return f"when({given})" if given else ""


ALWAYS = When()


def first_idle(sinks: Iterable[Sequence[When]]) -> int | None:
    """The first step in which none of these sinks runs, each given by what it waits for; None where there is none."""
    waits = [tuple(one for one in sink if one != ALWAYS) for sink in sinks]
    if not all(waits):
        return None
    every = [one for sink in waits for one in sink]
    # What runs repeats itself, and a start only takes away from what runs before it.
    steps = range(min(math.lcm(*(one.every for one in every)), _FAR))
    return next((step for step in steps if not any(all(w.runs(step) for w in sink) for sink in waits)), None)


class Skipped:
    """What an operator leaves in a step in which it does not run, where the lines of an algorithm run on tensors."""

    def __repr__(self) -> str:
        return "<skipped>"


SKIPPED = Skipped()


def skipped(signature: Signature) -> Any:
    """What a call that is left out returns: for every output, that there is none."""
    if signature.output_record is not None:
        return signature.output_record(*[SKIPPED for _ in signature.outputs])
    return SKIPPED if signature.outputs else None
