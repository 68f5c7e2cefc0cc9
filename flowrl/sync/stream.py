"""Weights on their way to engines in other processes, bucket by bucket, while both sides work.

Rank 0 of the trainer sends, all ranks of the engine receive; or, where each rank of the engine shares a GPU with one of
the trainer, that one sends to it. Who sends and who receives from it are a group of their own (gloo), which carries the
head of every bucket: names, dtypes, shapes and digests. Its bytes go by a *carrier*: in the same group, by NCCL, or as
a handle to memory that both processes can map. A side that gives up leaves the group; the others notice at once, and
raise `Interrupted`. Either side holds one bucket and one tensor, besides what trainer and engine keep; the next bucket
is gathered while the receivers load this one.
"""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing  # which teaches ForkingPickler to hand over tensors
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.sync.digest import tensor_digest
from flowrl.sync.source import Origin, Source, Tally, source_of

c10d: Any = dist  # whose annotations hide the stores and groups that it documents
_CONNECTED = timedelta(seconds=30)
_ALIGNED = 16  # bytes: tensors of a bucket start at multiples of it, so that it can be seen as any dtype

Entry = tuple[str, str, list[int], str]  # name, dtype, shape, digest


class Interrupted(SyncError):
    """The other side of a transfer is gone, or silent; it may know why."""


# ---- which way


@dataclass(frozen=True)
class Seat:
    """Where a process is.

    Args:
        node: of the cluster.
        process: its id there.
        devices: the CUDA devices that it may use, by the names that they have on the node.
    """

    node: str
    process: int
    devices: tuple[str, ...] = ()


def choose(senders: Sequence[Seat], receivers: Sequence[Seat]) -> tuple[str, tuple[int, ...]]:
    """The nearest way from a trainer to an engine.

    Args:
        senders: of the ranks of the trainer.
        receivers: of the ranks of the engine.

    Returns:
        the transport, and by rank of the engine the rank of the trainer that sends to it. ``"in process"``: every rank
        of the engine lives with one of the trainer. ``"cuda ipc"``: every one's first GPU is that of a rank of the
        trainer, which sends to it. ``"nccl"``: each has GPUs of its own. Else ``"object store"`` on one machine and
        ``"gloo"`` across. But for CUDA IPC rank 0 sends.
    """
    first = (0,) * len(receivers)
    if set(receivers) <= set(senders):
        return "in process", first
    at = {(seat.node, seat.devices): rank for rank, seat in enumerate(senders) if seat.devices}
    beside = tuple(at[place] for seat in receivers if (place := (seat.node, seat.devices[:1])) in at)
    if len(beside) == len(receivers):
        return "cuda ipc", beside
    seats = [senders[0], *receivers]
    devices = [(seat.node, device) for seat in seats for device in seat.devices]
    # NCCL refuses two ranks on one device.
    if all(seat.devices for seat in seats) and len(set(devices)) == len(devices):
        return "nccl", first
    return ("object store" if len({seat.node for seat in seats}) == 1 else "gloo"), first


# ---- the group


@dataclass(frozen=True)
class Ticket:
    """What both sides of a transfer need to find each other.

    Args:
        transport: ``"gloo"``, ``"nccl"`` or ``"cuda ipc"``.
        host, port: of a TCPStore. Whoever holds it can end the wait of those who have come: by letting go of it.
        senders: by rank of the engine, the rank of the trainer that sends to it.
        timeout: seconds that a side waits for the other.
    """

    transport: str
    host: str
    port: int
    senders: tuple[int, ...]
    timeout: float

    @contextmanager
    def open(self, rank: int) -> Iterator[Source]:
        """The weights for a rank of the engine, which takes them within the block, while `send` runs elsewhere.

        Raises:
            Interrupted: nobody sends.
        """
        sender = self.senders[rank]
        with Link.joined(self, sender, 1 + self.senders[:rank].count(sender)) as link:
            origin = Origin(**link.hear())
            yield source_of(origin, Stream(link, origin))


def send(
    ticket: Ticket, origin: Origin, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, sender: int = 0
) -> int:
    """Carry weights to all receivers of a rank of the trainer, which have checked them all when this returns.

    Returns:
        the bytes of all tensors.

    Raises:
        Interrupted: a receiver is gone, or silent.
    """
    with Link.joined(ticket, sender, 0) as link:
        link.tell(asdict(origin))
        digests: dict[str, str] = {}
        total = 0
        for entries, nbytes, flat in _packed(weights, bucket_bytes, link.carrier.device):
            link.tell({"version": origin.version, "tensors": entries, "size": len(flat)})
            link.carrier.send(link, flat)
            link.meet()
            del flat  # the next one may have to be larger
            digests |= {name: digest for name, _, _, digest in entries}
            total += nbytes
        link.tell({"version": origin.version, "digests": digests})
        link.meet()
    return total


class Stream:
    """The weights as a receiver has them, once; a `flowrl.sync.source.Cargo`.

    Args:
        link: to the sender.
        origin: whose weights they are.
    """

    def __init__(self, link: Link, origin: Origin) -> None:
        self._link, self._origin = link, origin
        self._digest: str | None = None

    @property
    def transport(self) -> str:
        """That of the ticket."""
        return self._link.transport

    @property
    def digest(self) -> str:
        """Of all weights.

        Raises:
            SyncError: they were not taken to their end.
        """
        if self._digest is None:
            raise SyncError(f"{self._origin} were not taken to their end; the engine must go through all of them.")
        return self._digest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they come, each in memory of its own.

        Raises:
            SyncError: a tensor is not what was sent, was not sent at all, or has not arrived; or a bucket is of
                another version.
            Interrupted: the sender is gone, or silent.
        """
        tally, carrier = Tally(self._origin), self._link.carrier
        bucket = torch.empty(0, dtype=torch.uint8)
        while True:
            message = self._link.hear()
            if message["version"] != self._origin.version:
                raise SyncError(
                    f"{self._origin} are stale, or mixed with others: a bucket of version {message['version']} came "
                    f"among them; sync again."
                )
            if "digests" in message:
                digest = tally.finish(message["digests"])
                self._link.meet()
                self._digest = digest
                return
            if message["size"] > len(bucket):
                bucket = torch.empty(0, dtype=torch.uint8)  # before there are two
                bucket = torch.empty(message["size"], dtype=torch.uint8, device=carrier.device)
            carrier.receive(self._link, bucket[: message["size"]])
            self._link.meet()
            yield from _taken(message["tensors"], bucket, tally)


class Link:
    """A rank in the group of one sender.

    Args:
        ticket: where the group meets.
        sender: its rank in the trainer.
        rank: in the group; 0 sends.
    """

    carrier: Carrier
    """Of the bytes of the buckets."""

    def __init__(self, ticket: Ticket, sender: int, rank: int) -> None:
        self.transport, self._timeout = ticket.transport, ticket.timeout
        patience = timedelta(seconds=ticket.timeout)
        with _listening(ticket.timeout):
            # The store is there before anybody comes; if it is not any more, the transfer is over already.
            self._store = c10d.TCPStore(ticket.host, ticket.port, None, False, timeout=min(patience, _CONNECTED))
            self._store.set_timeout(patience)
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = patience
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address_towards(ticket.host))]
            meeting = c10d.PrefixStore(f"gloo {sender}", self._store)
            self._group = c10d.ProcessGroupGloo(meeting, rank, 1 + ticket.senders.count(sender), options)

    @staticmethod
    @contextmanager
    def joined(ticket: Ticket, sender: int, rank: int) -> Iterator[Link]:
        """Within the block this rank is in the group; after it, others that still wait for it are told.

        Raises:
            Interrupted: the others do not come.
        """
        link = Link(ticket, sender, rank)
        try:
            match ticket.transport:
                case "gloo":
                    link.carrier = Gloo()
                case "nccl":
                    link.carrier = NCCL(link._store, rank, 1 + len(ticket.senders), timedelta(seconds=ticket.timeout))
                case _:
                    link.carrier = Handles(shared_device())
            yield link
        finally:
            link._group = None  # a group that nobody holds closes its connections

    def broadcast(self, tensor: Tensor) -> None:
        """Bytes on the CPU, from rank 0 into the tensors of the others."""
        with _listening(self._timeout):
            broadcast(self._group, tensor)

    def meet(self) -> None:
        """Wait for all others."""
        with _listening(self._timeout):
            self._group.barrier().wait()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Rank 0: say this to all others."""
        self.tell_bytes(json.dumps(message).encode())

    def hear(self) -> Any:
        """The others: what rank 0 says."""
        return json.loads(self.hear_bytes())

    def tell_bytes(self, raw: bytes) -> None:
        """Rank 0: send these bytes, of which there is at least one."""
        self.broadcast(torch.tensor([len(raw)]))
        self.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def hear_bytes(self) -> bytes:
        """The others: the bytes that rank 0 sends."""
        size = torch.zeros(1, dtype=torch.int64)
        self.broadcast(size)
        raw = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(raw)
        return raw.numpy().tobytes()


def broadcast(group: Any, tensor: Tensor, timeout: timedelta | None = None) -> None:
    """From rank 0 of a c10d group into the tensors of the others; with a timeout, it is waited for on the CPU."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work = group.broadcast([tensor], options)
    work.wait() if timeout is None else work.wait(timeout)


@contextmanager
def _listening(timeout: float) -> Iterator[None]:
    """What c10d raises, which says nothing of transfers, as `Interrupted`."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0].partition(". ")[0]
        raise Interrupted(
            f"the other side of the transfer is gone, or silent for {timeout:g} s ({said}); look for what happened "
            f"there, and sync again."
        ) from error


def _address_towards(host: str) -> str:
    """The address by which others that know `host` can reach this machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)  # sends nothing
        return str(way.getsockname()[0])


# ---- carriers


class Carrier(Protocol):
    """A way for the bytes of a bucket, uint8 ``[size]``."""

    device: torch.device  # where they are, on both sides

    def send(self, link: Link, flat: Tensor) -> None:
        """Rank 0: to all others; they may still read `flat` until they `Link.meet`."""
        ...

    def receive(self, link: Link, flat: Tensor) -> None:
        """The others: into their own."""
        ...


class Gloo:
    """By the group that carries the heads, between CPUs."""

    device = torch.device("cpu")

    def send(self, link: Link, flat: Tensor) -> None:
        link.broadcast(flat)

    def receive(self, link: Link, flat: Tensor) -> None:
        link.broadcast(flat)


class NCCL:
    """By a group of NCCL's, between GPUs."""

    def __init__(self, store: Any, rank: int, size: int, patience: timedelta) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._patience = patience
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = patience
        self._group = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options)

    def send(self, link: Link, flat: Tensor) -> None:
        with _listening(self._patience.total_seconds()):
            broadcast(self._group, flat, self._patience)

    def receive(self, link: Link, flat: Tensor) -> None:
        self.send(link, flat)


class Handles:
    """By handles to the sender's memory, which the receivers map and copy.

    Args:
        device: of that memory: a GPU (CUDA IPC), or the CPU, where both processes must share tensors by files
            (`torch.multiprocessing.set_sharing_strategy`).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, link: Link, flat: Tensor) -> None:
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # what it holds is there when the handle is
        link.tell_bytes(bytes(ForkingPickler.dumps(flat)))

    def receive(self, link: Link, flat: Tensor) -> None:
        flat.copy_(pickle.loads(link.hear_bytes()))
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # before the sender writes there again


def shared_device() -> torch.device:
    """Where processes that pass handles have their buckets."""
    return torch.device("cuda", torch.cuda.current_device())


# ---- buckets


def _packed(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device
) -> Iterator[tuple[list[Entry], int, Tensor]]:
    """Weights side by side in buckets: entries, the bytes of the tensors, and uint8 ``[size]``.

    The memory of a bucket is that of the next one too, so it is good for one turn of the loop.
    """
    bucket = torch.empty(0, dtype=torch.uint8)
    entries: list[Entry] = []
    used = nbytes = 0
    for name, tensor in weights:
        room = (tensor.nbytes // _ALIGNED + 1) * _ALIGNED
        if entries and used + room > max(bucket_bytes, len(bucket)):
            yield entries, nbytes, bucket[:used]
            entries, used, nbytes = [], 0, 0
        if used + room > len(bucket):
            bucket = torch.empty(0, dtype=torch.uint8)  # before there are two
            bucket = torch.empty(max(bucket_bytes, room), dtype=torch.uint8, device=device)
        packed = _view(bucket, used, tensor.dtype, tensor.shape)
        packed.copy_(tensor.detach())
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, list(tensor.shape), tensor_digest(name, packed)))
        used, nbytes = used + room, nbytes + tensor.nbytes
        del packed
    if entries:
        yield entries, nbytes, bucket[:used]


def _taken(entries: Iterable[Entry], bucket: Tensor, tally: Tally) -> Iterator[tuple[str, Tensor]]:
    """Copies of the tensors of a bucket, each once it is entered."""
    used = 0
    for name, dtype, shape, digest in entries:
        packed = _view(bucket, used, getattr(torch, dtype), torch.Size(shape))
        tally.take(name, packed, digest)
        yield name, packed.clone()
        used += (packed.nbytes // _ALIGNED + 1) * _ALIGNED


def _view(flat: Tensor, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    size = shape.numel() * dtype.itemsize
    return flat[start : start + size].view(dtype).view(shape)
