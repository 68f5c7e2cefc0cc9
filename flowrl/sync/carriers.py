"""Three transports for the bytes of a bucket: gloo, NCCL, or a handle to memory that both processes map."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.sync import ipc
from flowrl.sync.group import TransferGroup, from_rank_0, interrupting

c10d: Any = dist  # whose annotations hide the groups that it documents


class Carrier(Protocol):
    """A transport for the bytes of a bucket, uint8 ``[size]``, from rank 0 of a `TransferGroup` to all others."""

    device: torch.device
    """Where the bytes are, on both sides."""

    def send(self, flat: Tensor) -> None:
        """Rank 0 sends; the others may still read `flat` until all of them `TransferGroup.barrier`."""
        ...

    def receive(self, flat: Tensor) -> None:
        """The others receive into newly allocated memory."""
        ...


class GlooCarrier:
    """Between CPUs, by the group itself."""

    device = torch.device("cpu")

    def __init__(self, group: TransferGroup) -> None:
        self._group = group

    def send(self, flat: Tensor) -> None:
        self._group.broadcast(flat)

    def receive(self, flat: Tensor) -> None:
        self._group.broadcast(flat)


class NCCLCarrier:
    """Between GPUs, by an NCCL group with the same store.

    Args:
        name: of the group; several groups may share a store.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout: float) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._timeout = timeout
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        self._group = c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, size, options)

    def send(self, flat: Tensor) -> None:
        with interrupting(self._timeout):  # wait on the CPU, where a timeout is detected
            self._group.broadcast([flat], from_rank_0()).wait(timedelta(seconds=self._timeout))

    def receive(self, flat: Tensor) -> None:
        self.send(flat)


class IpcCarrier:
    """Handles to the sender's memory, which the receivers map and copy; the group carries them."""

    def __init__(self, group: TransferGroup) -> None:
        self.device = ipc.shared_device()
        self._group = group

    def send(self, flat: Tensor) -> None:
        self._group.broadcast_bytes(ipc.export_handles({"bucket": flat}))

    def receive(self, flat: Tensor) -> None:
        flat.copy_(ipc.open_handles(self._group.receive_bytes())["bucket"])
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # before the sender writes there again
