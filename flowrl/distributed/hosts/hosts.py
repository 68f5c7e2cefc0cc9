"""`Hosts`: the processes of a job on the slots of a place, and which of them is awake on each slot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray

from flowrl.core.graphs.graph import Node
from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.distributed.cluster.slots import Slots
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.faults import GONE, HostDiedError, died, naming, result_of
from flowrl.distributed.faults.pending_calls import GRACE_SECONDS, PendingCalls
from flowrl.distributed.hosts.host import Host
from flowrl.distributed.hosts.remote_engine import EngineAddress
from flowrl.errors import FlowrlError, NodeError
from flowrl.protocols.protocols import Closable
from flowrl.run.engine.timeline import Timeline
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.placement.turns import Turns
from flowrl.sync.route import Location

_LOAD_SECONDS = 600  # the least deadline for loading engines
_DOWNLOAD_SECONDS = 86400.0  # that for downloading models
_GENERAL_AT_ONCE = 8
SWAPPING = "swapping"
"""The concurrency group of a host that updates weights during generation."""


class Hosts:
    """All processes of a job.

    Weights of the roles in `swapping` change while requests are in flight.
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
        self.timeline = Timeline()  # of the current `Steps`
        self._turns = Turns(processes)
        self.unsynced_hosts: set[ProcessSpec] = set()  # engines that lost their weights asleep, until a sync
        self._slots = Slots(place, processes)
        self.actors: dict[ProcessSpec, Any] = {}
        self.locations: dict[ProcessSpec, Location] = {}
        self.pending = PendingCalls(place, self.actor, lambda: [*self.actors, None])
        self.start_general()

    # ---- processes

    def start_general(self) -> None:
        """Start the process for nodes without a role; it runs several concurrently."""
        options = {"max_concurrency": _GENERAL_AT_ONCE, **self._slots.at_driver()}
        self.general: Any = ray.remote(Host).options(**options).remote(None, self.seed, _path(), os.getcwd())

    def actor(self, host: ProcessSpec | None) -> Any:
        """The actor of a host; None is the general one."""
        return self.general if host is None else self.actors[host]

    def start(self, plans: list[ProcessSpec]) -> None:
        """Start processes for `plans` and load their engines; those of one slot in turn, so that they fit."""
        swapping: Any = ray.remote(concurrency_groups={SWAPPING: 1})  # type: ignore[call-overload]  # it takes that
        for plan in plans:
            kind = swapping(Host) if set(self._swapping) & set(plan.roles) else ray.remote(Host)
            actor = kind.options(**self._slots.options(plan))
            self.actors[plan] = actor.remote(plan, self.seed, _path(), os.getcwd(), self._slots.gpus(plan))
        patience = max(self.place.deadline, _LOAD_SECONDS)
        groups: dict[tuple[str, ...], list[ProcessSpec]] = {}
        for plan in plans:
            groups.setdefault(plan.roles, []).append(plan)
        self.locations |= zip(plans, self._locate(plans, patience), strict=True)
        # All processes of the job count, because ranks of one machine may send to an engine on another.
        one_node = len({location.node for location in self.locations.values()}) == 1
        for roles, ranks in groups.items():
            loading = _loading(roles)
            bindings = {role: self.bindings[role] for role in roles}
            rendezvous, seconds = None, self.place.deadline
            if any(backend.commit for backend in bindings.values()):
                self._load(ranks, "downloading", "download", bindings, patience=_DOWNLOAD_SECONDS)
            if len(ranks) > 1 and any(backend.collective for backend in bindings.values()):
                rendezvous = self.ask(ranks[:1], loading, "rendezvous_address", one_node, seconds)[0]
            self._load(ranks, loading, "build", bindings, rendezvous, one_node, seconds, patience=patience)
            if self._turns.shared(ranks):
                self.ask(ranks, loading, "sleep")

    def method(self, plan: ProcessSpec | None, name: str, swapping: bool = False) -> Any:
        """A method of a host (None is the general one). Calls run one at a time, but `swapping` ones run concurrently
        with the others."""
        found = getattr(self.actor(plan), name)
        return found.options(concurrency_group=SWAPPING) if swapping else found

    def _load(self, ranks: Sequence[ProcessSpec], what: str, method: str, *arguments: Any, patience: float) -> None:
        """`ask`, with a backend's own errors as without Ray."""
        try:
            self.ask(ranks, what, method, *arguments, patience=patience)
        except NodeError as error:
            if isinstance(error, HostDiedError) or not isinstance(error.__cause__, FlowrlError):
                raise
            raise error.__cause__ from None

    def _locate(self, plans: Sequence[ProcessSpec], patience: float) -> list[Location]:
        """Start these processes concurrently and import what they need; returns where Ray placed them."""
        with naming("starting"):
            backends = {plan: [self.bindings[role] for role in plan.roles] for plan in plans}
            calls = {self.actors[plan].load_modules.remote(backends[plan]): plan for plan in plans}
        return self._results(calls, "starting", "load_modules", patience)

    def ask(
        self,
        plans: Iterable[ProcessSpec],
        what: str,
        method: str,
        *arguments: Any,
        patience: float | None = None,
        swapping: bool = False,
    ) -> list[Any]:
        """Call a method of these hosts concurrently, and return their results.

        The first failure is raised without waiting for the others, which may wait for the failed one. If a host fails
        because another died, the `HostDiedError` of that one is raised.

        The limit is `patience` in seconds, by default the place's deadline; for `swapping` see `method`.
        """
        with naming(what):
            calls = {self.method(plan, method, swapping).remote(*arguments): plan for plan in plans}
        return self._results(calls, what, method, patience)

    def _results(
        self, calls: Mapping[Any, ProcessSpec], what: str, method: str, patience: float | None = None
    ) -> list[Any]:
        """The results of these calls (host by reference); see `ask`."""
        for ref, plan in calls.items():
            self.pending.add(ref, plan, what, method, patience)
        results: dict[Any, Any] = {}
        try:
            while waiting := [ref for ref in calls if ref not in results]:
                for ref in self.pending.next(waiting):
                    results[ref] = self._result(ref, calls[ref], what, calls.values())
        finally:
            self.pending.discard(calls)
        return [results[ref] for ref in calls]

    def _result(self, ref: Any, plan: ProcessSpec, what: str, called: Iterable[ProcessSpec]) -> Any:
        """The result of a call; if it failed because another called host died, raises that death."""
        try:
            return result_of(ref, plan, what, self.place)
        except HostDiedError:
            raise
        except NodeError as error:
            if dead := self.dead([other for other in called if other != plan]):
                raise died(dead[0], what, self.place, error.message.partition("\n")[0]) from error
            raise

    def ranks(self, role: str | None) -> list[ProcessSpec]:
        """The hosts of a role, in order of rank; empty for None."""
        return [plan for plan in self.processes if role in plan.roles]

    def addresses(self, node: Node, rank: int) -> list[EngineAddress]:
        """The engines that a rank of a node may ask in other processes; its ranks share them in turn."""
        host, found = self.ranks(node.home)[rank], []
        for role in dict.fromkeys(use.role for use in node.uses if use.asked):
            if (ranks := self.ranks(role)) and role not in host.roles:
                actor = self.actors[ranks[rank % len(ranks)]]
                found.append(EngineAddress(role, actor, f"{node.name} on {host.name}"))
        return found

    def ask_role(self, role: str, what: str, method: str, *arguments: Any) -> list[Any]:
        """Wake all ranks of a role, and call a method."""
        self.take_turns(self.ranks(role), what)
        return self.ask(self.ranks(role), what, method, *arguments)

    def dead(self, among: Iterable[ProcessSpec | None]) -> list[ProcessSpec | None]:
        """Hosts whose process is gone, at least one if there are any; None is the general host.

        A busy host does not respond, and counts as alive after some seconds.
        """
        pings = {self.actor(plan).pid.remote(): plan for plan in among}
        gone: list[ProcessSpec | None] = []
        until = time.monotonic() + GRACE_SECONDS
        while pings and not gone:
            done, _ = watch.wait(list(pings), until - time.monotonic())
            if not done:
                break
            for ref in done:
                plan = pings.pop(ref)
                try:
                    ray.get(ref)
                except GONE as error:
                    if not getattr(error, "actor_init_failed", False):  # it never started
                        gone.append(plan)
        return gone

    def rebuild(self, host: ProcessSpec | None) -> None:
        """Restart a dead host and all others that have died, with all ranks of their roles, which wait for them."""
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
            self._kill(absent)  # so that none of them counts as started
            raise

    def _kill(self, plans: Iterable[ProcessSpec]) -> None:
        for plan in plans:
            if (actor := self.actors.pop(plan, None)) is not None:
                ray.kill(actor)
            self._turns.awake.discard(plan)
            self.unsynced_hosts.discard(plan)  # a new process is synced first

    def close(self) -> None:
        """End all processes and release the slots; `Closable` engines have some seconds for `close`."""
        if watch.is_gone():
            return  # the processes are gone with Ray
        if ending := [actor.close.remote() for plan, actor in self.actors.items() if self._closes(plan)]:
            watch.wait(ending, GRACE_SECONDS, len(ending))
        self._kill(self.processes)
        ray.kill(self.general)
        self._slots.release()

    def _closes(self, plan: ProcessSpec) -> bool:
        """Whether a host has a `Closable` engine."""
        return any(Closable in self.bindings[role].serves for role in plan.roles)

    # ---- turns

    def take_turns(self, plans: Sequence[ProcessSpec], what: str, keep_awake: Sequence[ProcessSpec] = ()) -> None:
        """Wake these hosts, after putting to sleep the idle hosts on their slots other than `keep_awake`."""
        slept, woken = self._turns.needed(plans, keep_awake)
        self._sleep(slept, what)
        if woken:
            self._turns.awake.update(woken)  # first, because one that fails to wake may use memory
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
        """Put to sleep those of these hosts that share a slot with another awake host."""
        self._sleep([plan for plan in plans if any(plan.shares_slots_with(other) for other in self._turns.awake)], what)


def _loading(roles: Sequence[str]) -> str:
    return f"loading {'+'.join(roles)}"


def _path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]
