"""`Wait`: what an operator waited for while it ran, as the trace shows it."""

from __future__ import annotations

import time
from typing import NamedTuple

SHORT = 1e-3
"""Seconds; shorter waits are dropped, and shorter gaps between two waits are closed."""


class Wait(NamedTuple):
    """An interval of waiting for something, by its name; in Unix seconds."""

    name: str
    start: float
    end: float


class WaitRecorder:
    """Records when at least one of several waits was open, such as for environments; overlapping waits are merged."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds = name, 0.0
        """Seconds of all finished waits."""
        self._open, self._since = 0, 0.0
        self._all: list[Wait] = []

    def begin(self) -> None:
        """Open a wait."""
        if not self._open:
            self._since = time.time()
        self._open += 1

    def end(self) -> None:
        """Close an open wait."""
        self._open -= 1
        if self._open:
            return
        now, last = time.time(), self._all[-1:]
        self.seconds += now - self._since
        if last and self._since - last[0].end < SHORT:
            self._all[-1] = last[0]._replace(end=now)
        else:
            self._all.append(Wait(self.name, self._since, now))

    def recorded(self) -> list[Wait]:
        """The finished waits of at least `SHORT`."""
        return [one for one in self._all if one.end - one.start >= SHORT]
