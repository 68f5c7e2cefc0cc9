"""`Turns`: who is awake on the slots of a place."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.run.placement.place import ProcessSpec


class Turns:
    """Who is awake. Processes that share a slot take turns on it; those that share none are always awake.

    Args:
        processes: all of a job; those that share a slot begin asleep.
    """

    def __init__(self, processes: Sequence[ProcessSpec]) -> None:
        self._processes = processes
        self._awake: set[ProcessSpec] = set()

    def take(self, coming: Sequence[ProcessSpec]) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
        """Give these their turn on all of their slots: who is put to sleep for it, and who is woken."""
        crowded = any(one.meets(other) for one in coming for other in self._processes)
        woken = [one for one in coming if crowded and one not in self._awake]
        slept = [one for one in self._processes if one in self._awake and any(one.meets(other) for other in woken)]
        self._awake.difference_update(slept)
        self._awake.update(woken)
        return slept, woken
