"""`Wait`: what an operator waited for while it ran, as it tells a trace."""

from __future__ import annotations

import time
from typing import NamedTuple

SHORT = 1e-3
"""Seconds; stretches that are shorter are not told, and neither are gaps between two."""


class Wait(NamedTuple):
    """A stretch of time in which something was waited for, by its name; in Unix seconds."""

    name: str
    start: float
    end: float


class WaitRecorder:
    """When at least one of several things went on, such as waiting for an environment; what overlaps is one stretch.

    Args:
        name: of what goes on.
    """

    def __init__(self, name: str) -> None:
        self.name, self.seconds = name, 0.0
        """Seconds of all that are over."""
        self._open, self._since = 0, 0.0
        self._all: list[Wait] = []

    def begin(self) -> None:
        """One of them begins."""
        if not self._open:
            self._since = time.time()
        self._open += 1

    def end(self) -> None:
        """One of them, which had begun, ends."""
        self._open -= 1
        if self._open:
            return
        now, last = time.time(), self._all[-1:]
        self.seconds += now - self._since
        if last and self._since - last[0].end < SHORT:
            self._all[-1] = last[0]._replace(end=now)
        else:
            self._all.append(Wait(self.name, self._since, now))

    def told(self) -> list[Wait]:
        """Those that are over and not too short to tell."""
        return [one for one in self._all if one.end - one.start >= SHORT]
