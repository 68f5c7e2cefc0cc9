"""Stream weights repeatedly to another process on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from flowrl.sync import ipc, stream
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.received import Origin

PATIENCE = 120.0  # seconds


def _share(device: str) -> None:
    """Send handles to memory of this device."""
    if device == "cpu":
        mp.set_sharing_strategy("file_system")
    ipc.shared_device = lambda: torch.device(device)


def _receive(tickets: Connection, device: str) -> None:
    _share(device)
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
    while (ticket := tickets.recv()) is not None:
        with ticket.open(0) as source:
            for _ in source.weights():
                pass
        tickets.send("received")


class Receiver:
    """A process that receives and drops weights; `send` returns the seconds until all are checked.

    Args:
        transport: as in `flowrl.sync.stream.Ticket`.
        device: device of the handles and of the process.
    """

    def __init__(self, transport: str, device: str) -> None:
        _share(device)
        self._transport = transport
        self._tickets, theirs = mp.get_context("spawn").Pipe()
        self._process = mp.get_context("spawn").Process(target=_receive, args=(theirs, device))
        self._process.start()

    def send(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> float:
        """Transfer once; return the seconds."""
        store: Any = dist.TCPStore(
            "127.0.0.1", 0, None, True, timeout=timedelta(seconds=PATIENCE), wait_for_workers=False
        )
        begun = time.perf_counter()
        ticket = stream.Ticket(self._transport, "127.0.0.1", store.port, ((0,),), PATIENCE)
        self._tickets.send(ticket)
        stream.send(ticket, Origin("actor", 0), [weights()], BUCKET_BYTES)
        assert self._tickets.recv() == "received"
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the process."""
        self._tickets.send(None)
        self._process.join()
