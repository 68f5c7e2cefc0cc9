"""Placement of an engine: its device, and one process or several ranks."""

from __future__ import annotations

import torch

from flowrl.backends.torch.train.mesh import Mesh
from flowrl.errors import BindError
from flowrl.protocols.protocols import BuildContext


def device_of(backend: object, device: str | None) -> torch.device:
    """The device of a backend; None is CUDA if available, else the CPU. Raises `BindError` if torch lacks it."""
    if device is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    try:
        place = torch.device(device or "cpu")
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        name, why = type(backend).__name__, str(error).splitlines()[0].rstrip(".")
        raise BindError(
            f"{name}(device={device!r}) names a device that torch cannot use here ({why}). Leave `device` out, which "
            f"selects CUDA if available, or bind {name}(..., device='cpu').",
            code="backend.device",
            backend=name,
            device=device,
        ) from error
    return place


def mesh_of(context: BuildContext, ranks: int, place: torch.device, bfloat16: bool, offload: bool) -> Mesh:
    """The mesh of this process for a spec's `ranks`, device (`device_of`) and `offload`."""
    if ranks == 1 and not offload:
        return Mesh(place)
    from flowrl.backends.torch.train.sharded import shard_over  # here, since FSDP takes half a second to import

    return shard_over(context, ranks, place, bfloat16, offload)
