"""Choose the transport from a trainer to an engine by the locations of their processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """Where a process is; `devices` are the CUDA devices that it may use, numbered as on the node."""

    node: str
    process: int
    devices: tuple[str, ...] = ()


def choose(senders: Sequence[Location], receivers: Sequence[Location]) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The nearest transport from a trainer's ranks to an engine's, and for each rank of the engine the sending ranks.

    - ``"in process"``: every rank of the engine is in the process of a trainer's rank.
    - ``"cuda ipc"``: every rank of the engine shares its first GPU with a rank of the trainer, which sends to it.
    - ``"nccl"``: each has separate GPUs.
    - ``"object store"`` on one machine and ``"gloo"`` across machines otherwise.

    All ranks of the trainer send to each rank of the engine, except by CUDA IPC: each its share of the weights.
    """
    every = (tuple(range(len(senders))),) * len(receivers)
    if set(receivers) <= set(senders):
        return "in process", every
    at = {(seat.node, seat.devices): rank for rank, seat in enumerate(senders) if seat.devices}
    neighbors = tuple(at[place] for seat in receivers if (place := (seat.node, seat.devices[:1])) in at)
    if len(neighbors) == len(receivers):
        return "cuda ipc", tuple((neighbor,) for neighbor in neighbors)
    locations = [*senders, *receivers]
    devices = [(seat.node, device) for seat in locations for device in seat.devices]
    # NCCL refuses two ranks on one device.
    if all(seat.devices for seat in locations) and len(set(devices)) == len(devices):
        return "nccl", every
    return ("object store" if len({seat.node for seat in locations}) == 1 else "gloo"), every
