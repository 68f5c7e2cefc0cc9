"""Stream weights to engines in other processes, bucket by bucket, while both sides work.

Each rank of the trainer sends its share of the weights, and all ranks of the engine receive; if each rank of the engine
shares a GPU with a rank of the trainer, that one sends it all weights. A sender and its receivers are a
`TransferGroup`, which carries the header of every bucket: names, dtypes, shapes and digests. A `Carrier` transfers the
bytes. A side that aborts leaves the group, and the others raise `Interrupted` at once. Each side holds one bucket and
one tensor in addition to its own weights; the next bucket is gathered while the receivers load this one.

Senders gather their shares together, in rounds (`flowrl.sync.weight_selection.outgoing`). Receivers take a round of
each sender in turn, all in the same order, so that no side waits for one that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.sync.buckets import packed, unpacked
from flowrl.sync.carriers import Carrier, GlooCarrier, IpcCarrier, NCCLCarrier
from flowrl.sync.group import TransferGroup, connect
from flowrl.sync.received import Manifest, Origin, ReceivedWeights, Weight
from flowrl.sync.shadow import Shadow


@dataclass(frozen=True)
class Ticket:
    """The rendezvous data that both sides of a transfer need.

    Args:
        host, port: of a TCPStore. Its owner can end the wait of those who have joined, by releasing it.
        senders: for each rank of the engine, the ranks of the trainer that send to it.
        timeout: seconds that a side waits for the other.
    """

    transport: str
    host: str
    port: int
    senders: tuple[tuple[int, ...], ...]
    timeout: float

    @property
    def shared(self) -> bool:
        """Whether several senders share the weights."""
        return any(len(senders) > 1 for senders in self.senders)

    @contextmanager
    def open(self, rank: int, shadow: Shadow | None = None) -> Iterator[ReceivedWeights]:
        """The weights for a rank of the engine, which receives them in the block while `send` runs elsewhere; `shadow`
        is its copy of the last ones."""
        with ExitStack() as stack:
            links = []
            for sender in self.senders[rank]:
                number = 1 + sum(sender in senders for senders in self.senders[:rank])
                links.append(stack.enter_context(self.join(sender, number)))
            origin, *_ = [Origin.of(group.receive_message()) for group, _ in links]
            yield (shadow or Shadow()).incoming(origin, Stream(self.transport, links, origin))

    @contextmanager
    def join(self, sender: int, rank: int) -> Iterator[tuple[TransferGroup, Carrier]]:
        """Within the block this process is a rank of a sender's group; after it, ranks that still wait are notified.

        `sender` is the sender's rank in the trainer; `rank` is this process's rank in the group, where 0 sends.
        """
        store = connect(self.host, self.port, self.timeout)
        size = 1 + sum(sender in senders for senders in self.senders)
        group = TransferGroup(store, f"Rank {sender} of the trainer", rank, size, self.host, self.timeout)
        try:
            yield group, self._carrier(group, store, sender, rank, size)
        finally:
            group.leave()

    def _carrier(self, group: TransferGroup, store: Any, sender: int, rank: int, size: int) -> Carrier:
        match self.transport:
            case "gloo":
                return GlooCarrier(group)
            case "nccl":
                return NCCLCarrier(store, f"nccl {sender}", rank, size, self.timeout)
            case _:
                return IpcCarrier(group)


def send(
    ticket: Ticket, origin: Origin, rounds: Iterable[Iterable[tuple[str, Tensor]]], bucket_bytes: int, sender: int = 0
) -> int:
    """Send a share of the weights to all receivers of a rank of the trainer, which then have all shares; returns its
    bytes. All senders have as many rounds."""
    with ticket.join(sender, 0) as (group, carrier):
        group.broadcast_message(asdict(origin))
        digests: dict[str, str] = {}
        total = 0
        for bucket in packed(rounds, bucket_bytes, carrier.device):
            if bucket is None:
                group.broadcast_message({"version": origin.version})
                continue
            entries, nbytes, flat = bucket
            group.broadcast_message({"version": origin.version, "tensors": entries, "size": len(flat)})
            carrier.send(flat)
            group.barrier()
            del bucket, flat  # the next one may be larger
            digests |= {name: digest for name, _, _, digest in entries}
            total += nbytes
        group.broadcast_message({"version": origin.version, "digests": digests})
        group.barrier()
    return total


class Stream:
    """The weights as one receiver gets them, by a link to each sender; a `flowrl.sync.received.Shipment`."""

    changes: ClassVar[None] = None

    def __init__(self, transport: str, links: Sequence[tuple[TransferGroup, Carrier]], origin: Origin) -> None:
        self.transport = transport
        self._links, self._origin = links, origin
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """The digest of all weights."""
        if self._digest is None:
            raise self._origin.incomplete()
        return self._digest

    def weights(self) -> Iterator[Weight]:
        """The weights as they arrive, each in separate memory; see `flowrl.sync.received.Shipment`."""
        manifest, sent, links = Manifest(self._origin), dict[str, str](), deque(self._links)
        bucket = torch.empty(0, dtype=torch.uint8)
        while links:
            group, carrier = links[0]
            head = self._head(group)
            if "digests" in head:
                sent |= head["digests"]
                links.popleft()
            elif "tensors" not in head:  # the end of a round
                links.rotate(-1)
            else:
                if head["size"] > len(bucket):
                    bucket = torch.empty(0, dtype=torch.uint8)  # before there are two
                    bucket = torch.empty(head["size"], dtype=torch.uint8, device=carrier.device)
                carrier.receive(bucket[: head["size"]])
                group.barrier()
                for name, tensor, digest in unpacked(head["tensors"], bucket):
                    yield manifest.enter(name, tensor, digest)
        digest = manifest.finish(sent)
        for group, _ in self._links:
            group.barrier()
        self._digest = digest

    def _head(self, group: TransferGroup) -> dict[str, Any]:
        head: dict[str, Any] = group.receive_message()
        if head["version"] != self._origin.version:
            raise SyncError(
                f"{self._origin} are mixed with others: a bucket has version {head['version']}. Sync again.",
                code="sync.damaged",
                role=self._origin.role,
                version=self._origin.version,
                found=head["version"],
            )
        return head
