"""`Hosts`: the processes of a job, on the slots of a place, and whose turn it is on each slot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray

from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.distributed.cluster.slots import Slots
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.faults import GONE, HostDiedError, answer, died, naming
from flowrl.distributed.faults.pending_calls import GRACE_SECONDS, PendingCalls
from flowrl.distributed.hosts.host import Host
from flowrl.errors import FlowrlError, NodeError
from flowrl.protocols.protocols import Closable
from flowrl.run.engine.timeline import Timeline
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.placement.turns import Turns
from flowrl.sync.route import Seat

_LOAD_SECONDS = 600  # that engines have at least; nodes have the place's deadline alone
_GENERAL_AT_ONCE = 8
SWAPPING = "swapping"
"""The thread of a host that swaps weights under what another generates."""


class Hosts:
    """All processes of a job.

    Args:
        processes: those of roles.
        bindings: backends by role.
        place: where they run.
        seed: of the run.
        swapping: roles whose weights change under answers that are under way.

    Raises:
        BindError: see `Slots`.
    """

    def __init__(
        self,
        processes: list[ProcessSpec],
        bindings: Mapping[str, Any],
        place: RayPlace,
        seed: int,
        swapping: Collection[str] = (),
    ) -> None:
        self.processes, self.bindings, self.place, self.seed = processes, bindings, place, seed
        self._swapping = swapping
        self.timeline = Timeline()  # of whoever steps now
        self._turns = Turns(processes)
        self.unsynced_hosts: set[ProcessSpec] = set()  # engines that lost their weights asleep, until a sync
        self._slots = Slots(place, processes)
        self.actors: dict[ProcessSpec, Any] = {}
        self.seats: dict[ProcessSpec, Seat] = {}
        self.vigil = PendingCalls(place, self.actor, lambda: [*self.actors, None])
        self.start_general()

    # ---- processes

    def start_general(self) -> None:
        """Start the process for nodes that use no role; it runs several at once."""
        options = {"num_cpus": 0, "max_concurrency": _GENERAL_AT_ONCE}
        self.general: Any = ray.remote(Host).options(**options).remote(None, self.seed, _path(), os.getcwd())

    def actor(self, host: ProcessSpec | None) -> Any:
        """Of a host; None is the general one."""
        return self.general if host is None else self.actors[host]

    def start(self, plans: list[ProcessSpec]) -> None:
        """Start processes for `plans` and load their engines; those of one slot one after another, so that they fit.

        Raises:
            HostDiedError, NodeError: a process died or took too long.
            BindError and what else the backends raise.
        """
        swapping: Any = ray.remote(concurrency_groups={SWAPPING: 1})  # type: ignore[call-overload]  # it takes that
        for plan in plans:
            kind = swapping(Host) if set(self._swapping) & set(plan.roles) else ray.remote(Host)
            actor = kind.options(**self._slots.options(plan))
            self.actors[plan] = actor.remote(plan, self.seed, _path(), os.getcwd(), self._slots.gpus(plan))
        patience = max(self.place.deadline, _LOAD_SECONDS)
        groups: dict[tuple[str, ...], list[ProcessSpec]] = {}
        for plan in plans:
            groups.setdefault(plan.roles, []).append(plan)
        self.seats |= zip(plans, self._settle(plans, patience), strict=True)
        # Ranks of one machine may have to reach an engine on another, so all of the job counts.
        alone = len({seat.node for seat in self.seats.values()}) == 1
        for roles, ranks in groups.items():
            loading = _loading(roles)
            bindings = {role: self.bindings[role] for role in roles}
            meeting, seconds = None, self.place.deadline
            if len(ranks) > 1 and any(backend.collective for backend in bindings.values()):
                meeting = self.ask(ranks[:1], loading, "meeting_point", alone, seconds)[0]
            try:
                self.ask(ranks, loading, "build", bindings, meeting, alone, seconds, patience=patience)
            except NodeError as error:
                if isinstance(error, HostDiedError) or not isinstance(error.__cause__, FlowrlError):
                    raise
                raise error.__cause__ from None  # what a backend says of its own binding, as it is said without Ray
            if self._turns.shared(ranks):
                self.ask(ranks, loading, "sleep")

    def method(self, plan: ProcessSpec | None, name: str, swapping: bool = False) -> Any:
        """A method of a host, whose calls wait for each other; where it is `swapping`, not for those of other methods.
        None is the general host."""
        found = getattr(self.actor(plan), name)
        return found.options(concurrency_group=SWAPPING) if swapping else found

    def _settle(self, plans: Sequence[ProcessSpec], patience: float) -> list[Seat]:
        """Let these processes start and get ready to load, all at once; where they are."""
        with naming("starting"):
            backends = {plan: [self.bindings[role] for role in plan.roles] for plan in plans}
            asked = {self.actors[plan].settle.remote(backends[plan]): plan for plan in plans}
        return self._answers(asked, "starting", "settle", patience)

    def ask(
        self,
        plans: Iterable[ProcessSpec],
        what: str,
        method: str,
        *arguments: Any,
        patience: float | None = None,
        swapping: bool = False,
    ) -> list[Any]:
        """Call a method of these hosts, all at once; the first that fails ends it, since others may wait for that one.

        Args:
            what: for, which is said where one fails.
            method, arguments: of `Host`.
            patience: seconds that they have; the place's deadline if None.
            swapping: see `method`.

        Raises:
            HostDiedError: one died, also where that is only noticed by another that failed for it.
            NodeError: see `answer`.
        """
        with naming(what):
            asked = {self.method(plan, method, swapping).remote(*arguments): plan for plan in plans}
        return self._answers(asked, what, method, patience)

    def _answers(
        self, asked: Mapping[Any, ProcessSpec], what: str, method: str, patience: float | None = None
    ) -> list[Any]:
        """The answers of these hosts to calls of a method, by their references; see `ask`."""
        for ref, plan in asked.items():
            self.vigil.add(ref, plan, what, method, patience)
        answers: dict[Any, Any] = {}
        try:
            while waiting := [ref for ref in asked if ref not in answers]:
                for ref in self.vigil.next(waiting):
                    answers[ref] = self._answer(ref, asked[ref], what, asked.values())
        finally:
            self.vigil.forget(asked)
        return [answers[ref] for ref in asked]

    def _answer(self, ref: Any, plan: ProcessSpec, what: str, asked: Iterable[ProcessSpec]) -> Any:
        """What one of those that were asked has answered; where it fails for another's death, that is raised."""
        try:
            return answer(ref, plan, what, self.place)
        except HostDiedError:
            raise
        except NodeError as error:
            if dead := self.dead([other for other in asked if other != plan]):
                raise died(dead[0], what, self.place, str(error).partition("\n")[0]) from error
            raise

    def ranks(self, role: str | None) -> list[ProcessSpec]:
        """The hosts of a role, in order of their rank; none of None."""
        return [plan for plan in self.processes if role in plan.roles]

    def ask_role(self, role: str, what: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks of a role, awake."""
        self.take_turns(self.ranks(role), what)
        return self.ask(self.ranks(role), what, method, *arguments)

    def dead(self, among: Iterable[ProcessSpec | None]) -> list[ProcessSpec | None]:
        """Those hosts whose process is gone, if there are any, at least one of them; None is the general host.

        A host that is busy does not answer, and counts as alive after some seconds.
        """
        pings = {self.actor(plan).pid.remote(): plan for plan in among}
        gone: list[ProcessSpec | None] = []
        until = time.monotonic() + GRACE_SECONDS
        while pings and not gone:
            answered, _ = watch.wait(list(pings), until - time.monotonic())
            if not answered:
                break
            for ref in answered:
                plan = pings.pop(ref)
                try:
                    ray.get(ref)
                except GONE as error:
                    if not getattr(error, "actor_init_failed", False):  # it never was there, for a reason of its own
                        gone.append(plan)
        return gone

    def rebuild(self, host: ProcessSpec | None) -> None:
        """New processes for `host`, of which it is known that it died, and for whatever else has died.

        A role gets all its ranks anew, since the others wait for the dead one.
        """
        gone = [host]
        while gone:
            if None in gone:
                ray.kill(self.general)
                self.start_general()
            self._kill([plan for lost in gone if lost is not None for plan in self.ranks(lost.roles[0])])
            gone = self.dead([None, *self.actors])
        absent = [plan for plan in self.processes if plan not in self.actors]
        self._sleep(self._turns.awake_on(absent), "rebuilding")
        try:
            self.start(absent)
        except BaseException:
            self._kill(absent)  # so that none of them counts as built
            raise

    def _kill(self, plans: Iterable[ProcessSpec]) -> None:
        for plan in plans:
            if (actor := self.actors.pop(plan, None)) is not None:
                ray.kill(actor)
            self._turns.awake.discard(plan)
            self.unsynced_hosts.discard(plan)  # a new one is synced before it does anything

    def close(self) -> None:
        """End all processes, and the reservation with them; engines that have a `close` get some seconds for it."""
        if watch.is_gone():
            return  # and they with it
        if ending := [actor.close.remote() for plan, actor in self.actors.items() if self._closes(plan)]:
            watch.wait(ending, GRACE_SECONDS, len(ending))
        self._kill(self.processes)
        ray.kill(self.general)
        self._slots.release()

    def _closes(self, plan: ProcessSpec) -> bool:
        """Whether an engine of a host has something to end."""
        return any(Closable in self.bindings[role].serves for role in plan.roles)

    # ---- turns

    def take_turns(self, plans: Sequence[ProcessSpec], what: str, keep_awake: Sequence[ProcessSpec] = ()) -> None:
        """Wake these hosts, on all of their slots, after putting to sleep those that are awake on one of these, but for
        those `keep_awake`; they are idle."""
        slept, woken = self._turns.needed(plans, keep_awake)
        self._sleep(slept, what)
        if woken:
            self._turns.awake.update(woken)  # before it is known: one that fails in it may hold memory all the same
            with self.timeline.span("wake", "driver", "wait"):
                self.ask(woken, f"{what}, waking,", "wake")

    def _sleep(self, plans: list[ProcessSpec], what: str) -> None:
        if not plans:
            return
        self.unsynced_hosts |= {plan for plan in plans if self._loses_weights(plan)}
        with self.timeline.span("sleep", "driver", "wait"):
            self.ask(plans, f"{what}, putting to sleep,", "sleep")
        self._turns.awake.difference_update(plans)

    def _loses_weights(self, plan: ProcessSpec) -> bool:
        return any(self.bindings[role].loses_weights_asleep for role in plan.roles)

    def clear(self, plans: Sequence[ProcessSpec], what: str) -> None:
        """Put to sleep those of these hosts whose slots others have taken beside them."""
        self._sleep([plan for plan in plans if any(plan.meets(other) for other in self._turns.awake)], what)


def _loading(roles: Sequence[str]) -> str:
    return f"loading {'+'.join(roles)}"


def _path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]
