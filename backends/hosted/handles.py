"""Tensors that another process of this machine opens where they are, by a handle: CUDA IPC in place of bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from multiprocessing.reduction import ForkingPickler

import torch.multiprocessing  # noqa: F401  (it teaches the pickler handles)
from torch import Tensor


def can_share(tensors: Collection[Tensor]) -> bool:
    """Whether there are handles of these: all are on GPUs. What is in CPU memory goes faster as bytes."""
    return all(tensor.is_cuda for tensor in tensors)


def handles(tensors: Mapping[str, Tensor]) -> bytes:
    """Handles of `tensors`, which must live until the other process is done with them."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(dict(tensors))
    return buffer.getvalue()


def opened(data: bytes) -> dict[str, Tensor]:
    """The tensors behind `handles` of a process that is trusted (this is pickle); they are that process's memory."""
    tensors: dict[str, Tensor] = pickle.loads(data)
    return tensors
