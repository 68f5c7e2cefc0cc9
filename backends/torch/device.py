"""The device of an engine."""

from __future__ import annotations

import torch

from flowrl.errors import BindError


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
