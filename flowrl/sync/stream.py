"""Stream weights to engines in other processes, bucket by bucket, while both sides work.

One rank of the trainer sends and all ranks of the engine receive; if each rank of the engine shares a GPU with a rank
of the trainer, that one sends to it. A sender and its receivers are a `TransferGroup`, which carries the header of
every bucket: names, dtypes, shapes and digests. A `Carrier` transfers the bytes. A side that aborts leaves the group,
and the others raise `Interrupted` at once. Each side holds one bucket and one tensor in addition to its own weights;
the next bucket is gathered while the receivers load this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.sync.buckets import packed, unpacked
from flowrl.sync.carriers import Carrier, GlooCarrier, IpcCarrier, NCCLCarrier
from flowrl.sync.group import TransferGroup, connect
from flowrl.sync.received import Manifest, Origin, ReceivedWeights, Weight, received


@dataclass(frozen=True)
class Ticket:
    """The rendezvous data that both sides of a transfer need.

    Args:
        host, port: of a TCPStore. Its owner can end the wait of those who have joined, by releasing it.
        senders: for each rank of the engine, the rank of the trainer that sends to it.
        timeout: seconds that a side waits for the other.
    """

    transport: str
    host: str
    port: int
    senders: tuple[int, ...]
    timeout: float

    @contextmanager
    def open(self, rank: int) -> Iterator[ReceivedWeights]:
        """The weights for a rank of the engine, which receives them in the block while `send` runs elsewhere."""
        sender = self.senders[rank]
        with self.join(sender, 1 + self.senders[:rank].count(sender)) as (group, carrier):
            origin = Origin.of(group.receive_message())
            yield received(origin, Stream(self.transport, group, carrier, origin))

    @contextmanager
    def join(self, sender: int, rank: int) -> Iterator[tuple[TransferGroup, Carrier]]:
        """Within the block this process is a rank of a sender's group; after it, ranks that still wait are notified.

        `sender` is the sender's rank in the trainer; `rank` is this process's rank in the group, where 0 sends.
        """
        store = connect(self.host, self.port, self.timeout)
        size = 1 + self.senders.count(sender)
        group = TransferGroup(store, f"gloo {sender}", rank, size, self.host, self.timeout)
        try:
            yield group, self._carrier(group, store, rank, size)
        finally:
            group.leave()

    def _carrier(self, group: TransferGroup, store: Any, rank: int, size: int) -> Carrier:
        match self.transport:
            case "gloo":
                return GlooCarrier(group)
            case "nccl":
                return NCCLCarrier(store, rank, size, self.timeout)
            case _:
                return IpcCarrier(group)


def send(
    ticket: Ticket, origin: Origin, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, sender: int = 0
) -> int:
    """Send weights to all receivers of a rank of the trainer, which then have them all; returns their bytes."""
    with ticket.join(sender, 0) as (group, carrier):
        group.broadcast_message(asdict(origin))
        digests: dict[str, str] = {}
        total = 0
        for entries, nbytes, flat in packed(weights, bucket_bytes, carrier.device):
            group.broadcast_message({"version": origin.version, "tensors": entries, "size": len(flat)})
            carrier.send(flat)
            group.barrier()
            del flat  # the next one may be larger
            digests |= {name: digest for name, _, _, digest in entries}
            total += nbytes
        group.broadcast_message({"version": origin.version, "digests": digests})
        group.barrier()
    return total


class Stream:
    """The weights as one receiver gets them; a `flowrl.sync.received.Shipment`."""

    def __init__(self, transport: str, group: TransferGroup, carrier: Carrier, origin: Origin) -> None:
        self.transport = transport
        self._group, self._carrier, self._origin = group, carrier, origin
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """The digest of all weights."""
        if self._digest is None:
            raise SyncError(
                f"{self._origin} were not read to the end. The engine must iterate over all of them.",
                code="sync.damaged",
                role=self._origin.role,
                version=self._origin.version,
            )
        return self._digest

    def weights(self) -> Iterator[Weight]:
        """The weights as they arrive, each in separate memory; see `flowrl.sync.received.Shipment`."""
        manifest = Manifest(self._origin)
        bucket = torch.empty(0, dtype=torch.uint8)
        while "tensors" in (head := self._head()):
            if head["size"] > len(bucket):
                bucket = torch.empty(0, dtype=torch.uint8)  # before there are two
                bucket = torch.empty(head["size"], dtype=torch.uint8, device=self._carrier.device)
            self._carrier.receive(bucket[: head["size"]])
            self._group.barrier()
            for name, tensor, digest in unpacked(head["tensors"], bucket):
                yield manifest.enter(name, tensor, digest)
        digest = manifest.finish(head["digests"])
        self._group.barrier()
        self._digest = digest

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = self._group.receive_message()
        if head["version"] != self._origin.version:
            raise SyncError(
                f"{self._origin} are mixed with others: a bucket has version {head['version']}. Sync again.",
                code="sync.damaged",
                role=self._origin.role,
                version=self._origin.version,
                found=head["version"],
            )
        return head
