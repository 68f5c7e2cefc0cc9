"""`Delivery`: the weights of one sync on their way between hosts, seen from the driver."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist

from flowrl.distributed.export import Export
from flowrl.distributed.hosts import Hosts
from flowrl.run.place import ProcessSpec
from flowrl.sync import source
from flowrl.sync.stream import Ticket, choose

c10d: Any = dist  # whose annotations hide the stores that it documents
_PATIENT = 0.8  # of the deadline, so that a side that waits says so before nobody answers


class Delivery:
    """Brings what a sync reads to the hosts that it runs on.

    Where trainer and engine share no process, and the object store is not the way, both work at the same time: the
    driver starts the senders and the receivers, which meet at a store of the driver's. When one of them fails before
    they have met, the driver lets go of the store, and the others fail too.

    Args:
        hosts: of the job.
        trainer: the role that it reads.
        engine: the role that it writes.
        what: the sync, and when, for errors.
    """

    def __init__(self, hosts: Hosts, trainer: str, engine: str, what: str) -> None:
        self._hosts, self._role, self._what = hosts, trainer, what
        self._senders, self._receivers = hosts.ranks(trainer), hosts.ranks(engine)
        self._store: Any = None
        backend = hosts.bindings[engine]
        self._wanted = (backend.receives, backend.probes)
        seats = hosts.seats
        self.transport, self._by = choose(
            [seats[host] for host in self._senders], [seats[host] for host in self._receivers]
        )
        # While one side of a stream works, the other is awake, which two hosts of a slot have no room for.
        shared = any(sender.meets(receiver) for sender in self._senders for receiver in self._receivers)
        if shared and self.transport in ("gloo", "nccl"):
            self.transport = "object store"
        if self.transport == "cuda ipc" and not self._fit_together():
            self.transport = "object store"

    def _fit_together(self) -> bool:
        """Whether a trainer and an engine of one slot have room beside each other, by the sizes that they state."""
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
    def beside(self) -> list[ProcessSpec]:
        """Hosts that must stay awake beside the receivers, on the same device."""
        return self._senders if self.transport == "cuda ipc" else []

    def prepare(self) -> Mapping[str, Export | Ticket]:
        """Wake the trainer, and give what the receivers need in its place, by its role."""
        hosts, started = self._hosts, time.time()
        if self.transport == "in process":
            return {}
        if self.transport == "object store":
            arguments = (self._role, *self._wanted, source.BUCKET_BYTES)
            sent = hosts.ask_role(self._role, f"{self._what}, exporting {self._role},", "export", *arguments)[0]
            assert isinstance(sent, Export)
            hosts.trace.add(f"export {self._role}", "driver", started, time.time(), sent.nbytes, "transfer")
            return {self._role: sent}
        hosts.take_turns(self._senders, self._what)
        seconds = _PATIENT * hosts.place.deadline
        address = ray.util.get_node_ip_address()
        self._store = c10d.TCPStore(address, 0, None, True, timeout=timedelta(seconds=seconds), wait_for_workers=False)
        self._ticket = Ticket(self.transport, address, self._store.port, self._by, seconds)
        return {self._role: self._ticket}

    def start(self) -> dict[Any, ProcessSpec]:
        """Let the trainer send, if it is to; its hosts by the references of their answers."""
        if self._store is None:
            return {}
        arguments = (self._role, *self._wanted, source.BUCKET_BYTES, self._ticket, self._what)
        return {self._hosts.actors[host].send.remote(*arguments): host for host in self._senders}

    def finish(self) -> None:
        """All hosts have answered."""
        self._hosts.clear(self.beside, self._what)
        self.close()

    def close(self) -> None:
        """Whoever still waits for others to come is told that none will."""
        self._store = None
