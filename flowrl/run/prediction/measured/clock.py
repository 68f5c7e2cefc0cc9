"""A virtual clock on which processes that compute at once slow each other down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")

_DONE = 1e-12
"""Seconds of work that count as none, for each second on the clock: rounding errors."""


@dataclass(eq=False)
class _Running(Generic[Job]):
    """Work in progress: for each process the seconds of work that are left, if no other computed."""

    job: Job
    start: float
    left: list[float]
    slowed: bool
    end: float | None = None


class SharedClock(Generic[Job]):
    """The times at which jobs end whose processes share a machine.

    If k processes compute, each takes ``1 + (contention - 1) (k - 1)`` times as long as alone.

    Args:
        contention: how many times as long a process takes while another one computes, too; 1 is no contention.
    """

    def __init__(self, contention: float = 1.0) -> None:
        self.now = 0.0
        self._contention = contention
        self._running: list[_Running[Job]] = []

    def start(self, job: Job, start: float, seconds: Sequence[float], slowed: bool) -> None:
        """Start a job at a time that is not before now.

        Args:
            seconds: of each of its processes, if no other computed.
            slowed: whether its processes slow others, and others them.
        """
        self._running.append(_Running(job, start, list(seconds), slowed))

    def wait(self) -> list[tuple[Job, float]]:
        """The jobs that have ended, or end next, in the order of their ends, with the seconds that they took."""
        while not (ended := [one for one in self._running if one.end is not None]):
            self._advance(math.inf)
        self._running = [one for one in self._running if one.end is None]
        return [(one.job, _end(one) - one.start) for one in sorted(ended, key=_end)]

    def spend(self, seconds: float) -> None:
        """Let this time pass."""
        until = self.now + seconds
        while self.now < until:
            self._advance(until)

    def clear(self) -> None:
        """Abandon all jobs."""
        self._running.clear()

    def _advance(self, until: float) -> None:
        """Go on to the next time at which a process starts or ends, but no further than `until`."""
        running = [one for one in self._running if one.end is None]
        begun = [one for one in running if one.start <= self.now]
        busy = sum(left > 0.0 for one in begun if one.slowed for left in one.left)
        slower = 1.0 + (self._contention - 1.0) * max(busy - 1, 0)
        ends = [self.now + left * (slower if one.slowed else 1.0) for one in begun for left in one.left if left > 0.0]
        ends += [self.now for one in begun if not any(one.left)]
        now = min(*ends, *(one.start for one in running if one.start > self.now), until, math.inf)
        for one in begun:
            spent = (now - self.now) / (slower if one.slowed else 1.0)
            one.left = [left - spent if left - spent > _DONE * max(now, 1.0) else 0.0 for left in one.left]
            if not any(one.left):
                one.end = now
        self.now = now


def _end(one: _Running[Job]) -> float:
    assert one.end is not None
    return one.end
