"""`Turns`: which processes are awake on the slots of a place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from flowrl.run.placement.place import ProcessSpec


class Turns:
    """Which processes are awake. Those that share a slot begin asleep and take turns; the others are always awake."""

    def __init__(self, processes: Sequence[ProcessSpec]) -> None:
        self._others = {one: [other for other in processes if one.shares_slots_with(other)] for one in processes}
        self.awake: set[ProcessSpec] = set()

    def shared(self, processes: Iterable[ProcessSpec]) -> bool:
        """Whether any of these shares a slot with another process."""
        return any(self._others[one] for one in processes)

    def awake_on(self, processes: Collection[ProcessSpec]) -> list[ProcessSpec]:
        """The other processes that are awake on a slot of these."""
        neighbors = {other for one in processes for other in self._others[one]}
        return [one for one in self._others if one in self.awake & neighbors]

    def needed(
        self, coming: Sequence[ProcessSpec], keep_awake: Collection[ProcessSpec] = ()
    ) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
        """What wakes these processes together on all of their slots: which ones to put to sleep, but for those
        `keep_awake`, and which ones to wake."""
        if not self.shared(coming):
            return [], []
        woken = [one for one in coming if one not in self.awake]
        return [one for one in self.awake_on(woken) if one not in keep_awake and one not in coming], woken
