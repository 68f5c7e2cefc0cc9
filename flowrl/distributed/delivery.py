"""`Delivery`: the transfer of weights between hosts in a sync, controlled by the driver."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from flowrl.distributed.export import Export
from flowrl.distributed.hosts.hosts import Hosts
from flowrl.distributed.hosts.rendezvous import LOOPBACK, store_at
from flowrl.run.placement.place import ProcessSpec, fit_together
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.route import choose
from flowrl.sync.shadow import common
from flowrl.sync.stream import Ticket
from flowrl.sync.weight_selection import Since, WeightSelection

_PATIENT = 0.8  # share of the deadline: a side that waits for the other times out before the driver does


class Delivery:
    """Transfers a trainer's weights to the hosts of an engine.

    Both sides run at the same time; their rendezvous is a store of the driver. If one fails before, the driver closes
    the store, and the others fail too. With `changed`, only the changes since the engine's last sync are sent.
    """

    def __init__(
        self, hosts: Hosts, trainer: str, engine: str, what: str, swapping: bool = False, changed: bool = False
    ) -> None:
        self._hosts, self._role, self._what, self._swapping = hosts, trainer, what, swapping
        self._changed = changed
        self._senders, self._receivers = hosts.ranks(trainer), hosts.ranks(engine)
        self._store: Any = None
        self.engine = engine
        locations = hosts.locations
        self.transport, self._by = choose(
            [locations[host] for host in self._senders], [locations[host] for host in self._receivers]
        )
        # Both sides of a stream must be awake, for which two hosts on one slot have no memory.
        pairs = ((sender, receiver) for sender in self._senders for receiver in self._receivers)
        if self.transport in ("gloo", "nccl") and any(sender.shares_slots_with(receiver) for sender, receiver in pairs):
            self.transport = "object store"
        sides = self._senders, self._receivers
        if self.transport == "cuda ipc" and not fit_together(hosts.bindings, hosts.place.memory, *sides):
            self.transport = "object store"

    @property
    def stay_awake(self) -> list[ProcessSpec]:
        """The hosts that stay awake while the receivers use the same devices."""
        return self._senders if self.transport == "cuda ipc" else []

    def prepare(self) -> Mapping[str, Export | Ticket]:
        """Wake the trainer; returns the source of its weights for the receivers, by its role."""
        hosts, started = self._hosts, time.time()
        if self.transport == "in process":
            return {}
        self._selection = self._ask()
        if self.transport == "object store":
            arguments = (self._role, self._selection, BUCKET_BYTES)
            shares = hosts.ask_role(self._role, f"{self._what}, exporting {self._role},", "export", *arguments)
            sent = Export.joined(shares)
            hosts.timeline.add(f"export {self._role}", "driver", started, time.time(), sent.nbytes, "transfer")
            return {self._role: sent}
        hosts.take_turns(self._senders, self._what)
        seconds = _PATIENT * hosts.place.deadline
        machines = {hosts.locations[host].node for host in [*self._senders, *self._receivers]}
        alone = machines == {ray.get_runtime_context().get_node_id()}
        address = LOOPBACK if alone else ray.util.get_node_ip_address()
        self._store = store_at(address, seconds)
        self._ticket = Ticket(self.transport, address, self._store.port, self._by, seconds)
        if len(self._senders) > 1:
            # Once senders gather, one that fails waits for the others, which wait for engines, which wait for it.
            hosts.ask(self._senders, f"{self._what}, connecting to the driver,", "reach", self._ticket)
        return {self._role: self._ticket}

    def _ask(self) -> WeightSelection:
        """The weights that the engine needs, from its first rank."""
        what = f"{self._what}, selecting weights for {self.engine},"
        first = self._receivers[:1]
        found = self._hosts.ask(first, what, "weight_selection", self.engine, swapping=self._swapping)
        selection: WeightSelection = found[0]
        if not self._changed or selection.part == "adapter_weights":
            return selection
        by = {rank for ranks in self._by for rank in ranks}  # by CUDA IPC, some ranks send nothing
        senders = [one for rank, one in enumerate(self._senders) if self.transport != "cuda ipc" or rank in by]
        sent = self._hosts.ask(senders, what, "last_sent", self.engine)
        held = self._hosts.ask(self._receivers, what, "last_sync", self.engine, swapping=self._swapping)
        return replace(selection, since=Since(self.engine, common([*sent, *held]), secrets.token_hex(8)))

    def start(self) -> dict[Any, ProcessSpec]:
        """Start the senders of a stream; returns them by the references of their results."""
        if self._store is None:
            return {}
        arguments = (self._role, self._selection, BUCKET_BYTES, self._ticket, self._what)
        return {self._hosts.actors[host].send.remote(*arguments): host for host in self._senders}

    def finish(self) -> None:
        """Clean up after all hosts are done."""
        self._hosts.clear(self.stay_awake, self._what)
        self.close()

    def close(self) -> None:
        """Close the store, so that hosts that wait there fail."""
        self._store = None
