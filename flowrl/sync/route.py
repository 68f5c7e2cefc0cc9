"""Which way weights take from a trainer to an engine, by where the processes of both are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """Where a process is.

    Args:
        node: the name of its machine in the cluster.
        process: its process id there.
        devices: the CUDA devices that it may use, as they are called on the node.
    """

    node: str
    process: int
    devices: tuple[str, ...] = ()


def choose(senders: Sequence[Seat], receivers: Sequence[Seat]) -> tuple[str, tuple[int, ...]]:
    """The nearest way from a trainer to an engine.

    Args:
        senders: the seats of the trainer's ranks.
        receivers: the seats of the engine's ranks.

    Returns:
        the transport, and for each rank of the engine the rank of the trainer that sends to it. ``"in process"``: every
        rank of the engine lives in the process of a trainer's rank. ``"cuda ipc"``: every rank of the engine shares its
        first GPU with a rank of the trainer, which sends to it. ``"nccl"``: each has GPUs of its own. Otherwise
        ``"object store"`` on one machine and ``"gloo"`` across machines. Rank 0 sends, except by CUDA IPC.
    """
    first = (0,) * len(receivers)
    if set(receivers) <= set(senders):
        return "in process", first
    at = {(seat.node, seat.devices): rank for rank, seat in enumerate(senders) if seat.devices}
    neighbors = tuple(at[place] for seat in receivers if (place := (seat.node, seat.devices[:1])) in at)
    if len(neighbors) == len(receivers):
        return "cuda ipc", neighbors
    seats = [senders[0], *receivers]
    devices = [(seat.node, device) for seat in seats for device in seat.devices]
    # NCCL refuses two ranks on one device.
    if all(seat.devices for seat in seats) and len(set(devices)) == len(devices):
        return "nccl", first
    return ("object store" if len({seat.node for seat in seats}) == 1 else "gloo"), first
