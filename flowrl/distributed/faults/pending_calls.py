"""`PendingCalls`: pending calls to hosts: log the slow ones, fail those whose host died."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.faults import named, result_of, stuck
from flowrl.run.placement.place import ProcessSpec

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10
"""Time for Ray to notice that a process is gone, and between two checks for stragglers."""

_LATE = 0.1
"""The share of its time after which a pending call is logged."""


@dataclass
class PendingCall:
    """A call whose result is pending.

    Args:
        kind: the node or method; calls of one kind take about equally long.
        ping: a later call that checks whether the host is alive.
    """

    host: ProcessSpec | None
    what: str
    kind: str
    since: float
    seconds: float
    log_after: float
    ping: Any = None


class PendingCalls:
    """All pending calls of the driver.

    Calls that are late for their kind are logged. Hosts that do not respond are pinged, because Ray may lose calls to a
    process that is about to die.
    """

    def __init__(
        self,
        place: RayPlace,
        actor_of: Callable[[ProcessSpec | None], Any],
        hosts: Callable[[], Iterable[ProcessSpec | None]],
    ) -> None:
        self._place, self._actor_of, self._hosts = place, actor_of, hosts
        self._pending: dict[Any, PendingCall] = {}
        self._longest: dict[str, float] = {}

    def add(self, ref: Any, host: ProcessSpec | None, what: str, kind: str, seconds: float | None = None) -> None:
        """Add a call by the reference of its result; its limit is the place's deadline unless `seconds` is given."""
        limit = self._place.deadline if seconds is None else seconds
        late = max(_LATE * limit, 2 * self._longest.get(kind, 0.0))
        self._pending[ref] = PendingCall(host, what, kind, time.monotonic(), limit, late)

    def discard(self, refs: Iterable[Any]) -> None:
        """Stop watching these calls."""
        for ref in refs:
            self._pending.pop(ref, None)

    def next(self, refs: Iterable[Any]) -> list[Any]:
        """Wait until at least one of these calls is done; return those that are."""
        waiting = list(refs)
        while True:
            remaining = min(self._remaining(ref) for ref in waiting)
            done, _ = watch.wait(waiting, min(remaining, GRACE_SECONDS))
            if done:
                for ref in done:
                    call = self._pending.pop(ref)
                    self._longest[call.kind] = max(self._longest.get(call.kind, 0.0), time.monotonic() - call.since)
                return done
            late = min(waiting, key=self._remaining)
            if self._remaining(late) <= 0:
                call = self._pending[late]
                raise stuck(call.host, call.what, self._place, call.seconds)
            self._log_late(waiting)
            for ref in waiting:
                self._refuse_dead(self._pending[ref])

    def _remaining(self, ref: Any) -> float:
        call = self._pending[ref]
        return call.since + call.seconds - time.monotonic()

    def _refuse_dead(self, call: PendingCall) -> None:
        """Ping the host of a call, and raise if it is dead; a busy host responds later."""
        if call.ping is not None and ray.wait([call.ping], timeout=0)[0]:
            result_of(call.ping, call.host, call.what, self._place)
            call.ping = None
        if call.ping is None:
            call.ping = self._actor_of(call.host).pid.remote()

    # ---- stragglers

    def _log_late(self, waiting: Iterable[Any]) -> None:
        """Log late calls, each again after twice the time."""
        now = time.monotonic()
        late: dict[str, list[PendingCall]] = {}
        for call in (self._pending[ref] for ref in waiting):
            if now - call.since >= call.log_after:
                call.log_after = 2 * (now - call.since)
                late.setdefault(call.what, []).append(call)
        for what, calls in late.items():
            logger.warning("%s", self._warning(what, calls, now))

    def _warning(self, what: str, late: Sequence[PendingCall], now: float) -> str:
        """The late hosts of a task, and what the others do."""
        others = [call for call in self._pending.values() if call.what != what]
        busy = {call.host for call in self._pending.values()}
        meanwhile = [f"{named(one.host)} has run {one.what} for {now - one.since:.0f} s" for one in others]
        if idle := [named(host) for host in self._hosts() if host not in busy]:
            meanwhile.append(f"idle: {', '.join(idle)}")
        names, first = " and ".join(named(one.host) for one in late), late[0]
        return (
            f"{what} has run for {now - first.since:.0f} s without a response from {names}. Meanwhile: "
            f"{'; '.join(meanwhile) or 'nothing'}. It counts as stuck after {first.seconds:g} s "
            f"({type(self._place).__name__}(deadline=...))."
        )
