"""`TransferGroup`: one process that sends and some that receive, in a separate gloo group."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.errors import SyncError

c10d: Any = dist  # whose annotations hide the stores and groups that it documents
_TO_STORE = timedelta(seconds=30)
"""The time that a rank has to connect to the store."""

_TO_OTHERS = timedelta(seconds=30)
"""The time that it has to connect to the others of its group, once all of them are there."""


class Interrupted(SyncError):
    """The other side of a transfer ended, or does not respond; its own error may name the cause."""


class TransferGroup:
    """One rank of a gloo group, independent of other groups of its process.

    Args:
        store: the rendezvous; see `connect`.
        sender: the name of rank 0, and of the group; several groups may share a store.
        rank: of this process in the group; rank 0 sends.
        host: of the store, at an address that all ranks can reach.
        timeout: seconds that a rank waits for the others.

    Raises:
        Interrupted: another rank was not there in time, or the store is closed.
        SyncError: all ranks are there, but some do not reach each other.
    """

    def __init__(self, store: Any, sender: str, rank: int, size: int, host: str, timeout: float) -> None:
        self._timeout, patience = timeout, timedelta(seconds=timeout)
        with interrupting(timeout):
            ready = c10d.PrefixStore(f"ready {sender}", store)
            ready.set(str(rank), "")
            ready.wait([str(other) for other in range(size)])
        limit = min(patience, _TO_OTHERS)
        try:
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address_towards(host))]
            self._group = c10d.ProcessGroupGloo(c10d.PrefixStore(sender, store), rank, size, options)
            self._group._set_default_timeout(patience)
        except (OSError, RuntimeError) as error:
            seconds, reason = limit.total_seconds(), _first_sentence(error)
            raise SyncError(
                f"{sender}, which sends weights, and the {size - 1} processes that receive them did not connect within "
                f"{seconds:g} s ({reason}). Let their machines reach each other on all ports, and sync again.",
                code="sync.not-connected",
                sender=sender,
                seconds=seconds,
                reason=reason,
            ) from error

    def broadcast(self, tensor: Tensor) -> None:
        """Send a CPU tensor from rank 0; the others receive into theirs."""
        with interrupting(self._timeout):
            self._group.broadcast([tensor], from_rank_0()).wait()

    def barrier(self) -> None:
        """Wait for all others."""
        with interrupting(self._timeout):
            self._group.barrier().wait()

    def broadcast_message(self, message: Mapping[str, Any]) -> None:
        """Rank 0 sends a message to all others."""
        self.broadcast_bytes(json.dumps(message).encode())

    def receive_message(self) -> Any:
        """The others receive the message of rank 0."""
        return json.loads(self.receive_bytes())

    def broadcast_bytes(self, raw: bytes) -> None:
        """Rank 0 sends bytes, at least one."""
        self.broadcast(torch.tensor([len(raw)]))
        self.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def receive_bytes(self) -> bytes:
        """The others receive the bytes of rank 0."""
        size = torch.zeros(1, dtype=torch.int64)
        self.broadcast(size)
        raw = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(raw)
        return raw.numpy().tobytes()

    def leave(self) -> None:
        """Close all connections, so that the others no longer wait. gloo does so once the group has no more
        references, so nothing else here may hold one, not even the traceback of an error."""
        self._group = None


def connect(host: str, port: int, timeout: float) -> Any:
    """A client of the TCPStore at an address, which must exist already; otherwise the transfer is over."""
    patience = timedelta(seconds=timeout)
    limit = min(patience, _TO_STORE)
    with interrupting(limit.total_seconds()):
        store = c10d.TCPStore(host, port, None, False, timeout=limit)
        store.set_timeout(patience)
    return store


def from_rank_0() -> Any:
    """The options of a broadcast from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


@contextmanager
def interrupting(timeout: float) -> Iterator[None]:
    """Turn the errors of c10d, which do not mention transfers, into `Interrupted`."""
    try:
        yield
    except RuntimeError as error:
        reason = _first_sentence(error)
        raise Interrupted(
            f"The other side of the transfer has ended, or was silent for {timeout:g} s ({reason}). Check its log, and "
            f"sync again.",
            code="sync.interrupted",
            timeout=timeout,
            reason=reason,
        ) from error


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


def _address_towards(host: str) -> str:
    """The address of this machine for others that can reach `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)  # sends nothing
        return str(way.getsockname()[0])
