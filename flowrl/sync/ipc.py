"""Tensors that another process of this machine opens in place, by a handle: CUDA IPC instead of bytes."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # which teaches ForkingPickler to make handles of tensors
from torch import Tensor


def can_share(tensors: Collection[Tensor]) -> bool:
    """Whether to send these as handles: all are on GPUs. CPU memory is sent faster as bytes."""
    return all(tensor.is_cuda for tensor in tensors)


def export_handles(tensors: Mapping[str, Tensor]) -> bytes:
    """Handles of `tensors`, whose memory must live until the other process has finished with it.

    For CPU memory both processes must share tensors by files (`torch.multiprocessing.set_sharing_strategy`).
    """
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()  # so that the memory is written before the handle arrives
    return bytes(ForkingPickler.dumps(dict(tensors)))


def open_handles(handles: bytes) -> dict[str, Tensor]:
    """The tensors of the handles of another process, in its memory; it must be trusted, since this is pickle."""
    tensors: dict[str, Tensor] = pickle.loads(handles)
    return tensors


def shared_device() -> torch.device:
    """The memory of processes that exchange handles."""
    return torch.device("cuda", torch.cuda.current_device())
