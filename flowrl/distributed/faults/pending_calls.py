"""`PendingCalls`: who owes the driver an answer, and what is said and done about one who is silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.faults import answer, named, stuck
from flowrl.run.placement.place import ProcessSpec

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10
"""For Ray to notice that a process is gone; so long is waited between two looks at who is silent."""

_SOON = 0.1
"""Of its time, after which an answer that is still waited for is spoken of."""


@dataclass
class PendingCall:
    """An answer that is waited for.

    Args:
        host: whose; None is the general host.
        what: was asked for: a node, and when.
        kind: of question, of which some take longer than others: the node.
        since: when it was asked, by `time.monotonic`.
        seconds: that it may take.
        told: after so many seconds it is spoken of.
        ping: a call that was sent after it, since it is late.
    """

    host: ProcessSpec | None
    what: str
    kind: str
    since: float
    seconds: float
    told: float
    ping: Any = None


class PendingCalls:
    """All answers that the driver waits for.

    An answer that is late for its kind is spoken of in the log while it is waited for. Whoever is silent is asked
    whether it is there, since Ray may lose what was sent to a process that was about to die.

    Args:
        place: says how long to wait.
        actor_of: the actor of a host, None being the general one.
        hosts: those that there are.
    """

    def __init__(
        self,
        place: RayPlace,
        actor_of: Callable[[ProcessSpec | None], Any],
        hosts: Callable[[], Iterable[ProcessSpec | None]],
    ) -> None:
        self._place, self._actor_of, self._hosts = place, actor_of, hosts
        self._owed: dict[Any, PendingCall] = {}
        self._longest: dict[str, float] = {}

    def add(self, ref: Any, host: ProcessSpec | None, what: str, kind: str, seconds: float | None = None) -> None:
        """From now on, a host owes an answer.

        Args:
            ref: of the answer.
            host, what, kind: see `PendingCall`.
            seconds: that it has; the place's deadline if None.
        """
        limit = self._place.deadline if seconds is None else seconds
        late = max(_SOON * limit, 2 * self._longest.get(kind, 0.0))
        self._owed[ref] = PendingCall(host, what, kind, time.monotonic(), limit, late)

    def forget(self, refs: Iterable[Any]) -> None:
        """These are not waited for any more."""
        for ref in refs:
            self._owed.pop(ref, None)

    def next(self, refs: Iterable[Any]) -> list[Any]:
        """Wait until one of these is there; which are.

        Raises:
            HostDiedError: one will not come, since its process is gone.
            NodeError: one has not come in its time.
            RayDiedError: see `flowrl.distributed.faults.ray_processes.wait`.
        """
        waiting = list(refs)
        while True:
            left = min(self._left(ref) for ref in waiting)
            answered, _ = watch.wait(waiting, min(left, GRACE_SECONDS))
            if answered:
                for ref in answered:
                    owed = self._owed.pop(ref)
                    self._longest[owed.kind] = max(self._longest.get(owed.kind, 0.0), time.monotonic() - owed.since)
                return answered
            late = min(waiting, key=self._left)
            if self._left(late) <= 0:
                owed = self._owed[late]
                raise stuck(owed.host, owed.what, self._place, owed.seconds)
            self._tell(waiting)
            for ref in waiting:
                self._refuse_gone(self._owed[ref])

    def _left(self, ref: Any) -> float:
        owed = self._owed[ref]
        return owed.since + owed.seconds - time.monotonic()

    def _refuse_gone(self, owed: PendingCall) -> None:
        """Ask who owes it whether it is there; whoever is busy answers later.

        Raises:
            HostDiedError: it is not, and so will not answer what it was asked before.
        """
        if owed.ping is not None and ray.wait([owed.ping], timeout=0)[0]:
            answer(owed.ping, owed.host, owed.what, self._place)
            owed.ping = None
        if owed.ping is None:
            owed.ping = self._actor_of(owed.host).pid.remote()

    # ---- stragglers

    def _tell(self, waiting: Iterable[Any]) -> None:
        """Speak of those that are late, each again after twice the time."""
        now = time.monotonic()
        late: dict[str, list[PendingCall]] = {}
        for owed in (self._owed[ref] for ref in waiting):
            if now - owed.since >= owed.told:
                owed.told = 2 * (now - owed.since)
                late.setdefault(owed.what, []).append(owed)
        for what, silent in late.items():
            logger.warning("%s", self._said(what, silent, now))

    def _said(self, what: str, silent: Sequence[PendingCall], now: float) -> str:
        """Who is waited for and since when, and what the others do meanwhile."""
        others = [owed for owed in self._owed.values() if owed.what != what]
        at_work = {owed.host for owed in self._owed.values()}
        meanwhile = [f"{named(one.host)} has been at {one.what} for {now - one.since:.0f} s" for one in others]
        if idle := [named(host) for host in self._hosts() if host not in at_work]:
            meanwhile.append(f"idle are {', '.join(idle)}")
        names, first = " and ".join(named(one.host) for one in silent), silent[0]
        return (
            f"{what} is still waited for, {now - first.since:.0f} s after it began: {names} "
            f"{'has' if len(silent) == 1 else 'have'} not answered. Meanwhile: {'; '.join(meanwhile) or 'nothing'}. It "
            f"counts as stuck after {first.seconds:g} s: {type(self._place).__name__}(deadline=...)."
        )
