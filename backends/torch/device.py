"""Where an engine is to be: on which device, and in one process or several."""

from __future__ import annotations

import torch

from flowrl.backends.torch.train.mesh import Mesh
from flowrl.errors import BindError
from flowrl.protocols.protocols import BuildContext


def device_of(backend: object, device: str | None) -> torch.device:
    """The device that a backend asks for; None is CUDA where there is one, else the CPU.

    Raises:
        BindError: torch cannot compute there.
    """
    if device is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    try:
        place = torch.device(device or "cpu")
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        name, why = type(backend).__name__, str(error).splitlines()[0].rstrip(".")
        raise BindError(
            f"{name}(device={device!r}) asks for a device that torch does not have here ({why}); leave device out, "
            f"which takes CUDA where there is one, or bind {name}(..., device='cpu')."
        ) from error
    return place


def mesh_of(context: BuildContext, ranks: int, place: torch.device, bfloat16: bool, offload: bool) -> Mesh:
    """The mesh that a spec's `ranks`, device (`device_of`) and `offload` ask for, in this process.

    Raises:
        BindError: this process is not one of so many ranks.
    """
    if ranks == 1 and not offload:
        return Mesh(place)
    from flowrl.backends.torch.train.sharded import shard_over  # here, since FSDP takes half a second to import

    return shard_over(context, ranks, place, bfloat16, offload)
