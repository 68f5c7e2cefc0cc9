"""`Delivery`: the weights of one sync on their way between hosts, seen from the driver."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from flowrl.distributed.export import Export
from flowrl.distributed.hosts.hosts import Hosts
from flowrl.distributed.hosts.rendezvous import LOOPBACK, store_at
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.route import choose
from flowrl.sync.stream import Ticket
from flowrl.sync.wanted import WeightSelection

_PATIENT = 0.8  # of the deadline: a side that waits for the other gives up before the driver gives up on it


class Delivery:
    """Brings a trainer's weights to the hosts of an engine.

    Where the two share no process, and the object store is not the way, both work at the same time: the driver starts
    the senders and the receivers, which meet at a store of the driver's. If one of them fails before they have met,
    the driver lets go of the store, and the others fail too.

    Args:
        hosts: of the job.
        trainer: the role that the sync reads.
        engine: the role that it writes.
        what: the sync and its step, for errors.
        swapping: whether the engine generates meanwhile.
    """

    def __init__(self, hosts: Hosts, trainer: str, engine: str, what: str, swapping: bool = False) -> None:
        self._hosts, self._role, self._what, self._swapping = hosts, trainer, what, swapping
        self._senders, self._receivers = hosts.ranks(trainer), hosts.ranks(engine)
        self._store: Any = None
        self._engine = engine
        seats = hosts.seats
        self.transport, self._by = choose(
            [seats[host] for host in self._senders], [seats[host] for host in self._receivers]
        )
        # Both sides of a stream are awake, and two hosts that share a slot have no room for that.
        pairs = ((sender, receiver) for sender in self._senders for receiver in self._receivers)
        if self.transport in ("gloo", "nccl") and any(sender.meets(receiver) for sender, receiver in pairs):
            self.transport = "object store"
        if self.transport == "cuda ipc" and not self._fit_together():
            self.transport = "object store"

    def _fit_together(self) -> bool:
        """Whether trainer and engine have room on a slot at the same time, by the sizes that their backends state."""
        room, bindings = self._hosts.place.memory, self._hosts.bindings
        if room is None:
            return True
        size = {
            host: sum(bindings[role].memory or 0.0 for role in host.roles)
            for host in [*self._senders, *self._receivers]
        }
        pairs = [(a, b) for a in self._senders for b in self._receivers if a.meets(b)]
        return all(size[a] + size[b] <= room for a, b in pairs)

    @property
    def stay_awake(self) -> list[ProcessSpec]:
        """Hosts that stay awake while the receivers work on the same devices."""
        return self._senders if self.transport == "cuda ipc" else []

    def prepare(self) -> Mapping[str, Export | Ticket]:
        """Wake the trainer; what the receivers get in its place, by its role."""
        hosts, started = self._hosts, time.time()
        if self.transport == "in process":
            return {}
        self._wanted = self._ask()
        if self.transport == "object store":
            arguments = (self._role, self._wanted, BUCKET_BYTES)
            sent = hosts.ask_role(self._role, f"{self._what}, exporting {self._role},", "export", *arguments)[0]
            assert isinstance(sent, Export)
            hosts.timeline.add(f"export {self._role}", "driver", started, time.time(), sent.nbytes, "transfer")
            return {self._role: sent}
        hosts.take_turns(self._senders, self._what)
        seconds = _PATIENT * hosts.place.deadline
        machines = {hosts.seats[host].node for host in [*self._senders, *self._receivers]}
        alone = machines == {ray.get_runtime_context().get_node_id()}
        address = LOOPBACK if alone else ray.util.get_node_ip_address()
        self._store = store_at(address, seconds)
        self._ticket = Ticket(self.transport, address, self._store.port, self._by, seconds)
        return {self._role: self._ticket}

    def _ask(self) -> WeightSelection:
        """What the first rank of the engine wants, for all of its ranks."""
        what = f"{self._what}, asking {self._engine} what it wants,"
        first = self._receivers[:1]
        wanted: WeightSelection = self._hosts.ask(first, what, "wanted", self._engine, swapping=self._swapping)[0]
        return wanted

    def start(self) -> dict[Any, ProcessSpec]:
        """Let the trainer send, where it streams; its hosts by the references to their answers."""
        if self._store is None:
            return {}
        arguments = (self._role, self._wanted, BUCKET_BYTES, self._ticket, self._what)
        return {self._hosts.actors[host].send.remote(*arguments): host for host in self._senders}

    def finish(self) -> None:
        """Clean up once all hosts have answered."""
        self._hosts.clear(self.stay_awake, self._what)
        self.close()

    def close(self) -> None:
        """Tell whoever still waits for others that none will come."""
        self._store = None
