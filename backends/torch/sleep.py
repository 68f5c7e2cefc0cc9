"""Engines that take turns on a device: asleep, their weights and optimiser state wait in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowrl.errors import AsleepError


class Residence:
    """Moves modules and the state of their optimiser off `device` and back; on a CPU only the mark is moved.

    Args:
        device: where the modules compute.
        modules: whose parameters and buffers move; parameters stay the same objects.
        optimizer: whose state moves with them.
        offload: the weights live in CPU memory anyway, and stay there.
    """

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        offload: bool = False,
    ) -> None:
        self._device, self._modules, self._optimizer = device, modules, optimizer
        self._moves = not offload and device.type != "cpu"
        self.asleep = False

    def sleep(self) -> None:
        """Release the device; twice is as good as once."""
        if not self.asleep and self._moves:
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()
        self.asleep = True

    def wake(self) -> None:
        """Take the device back; twice is as good as once."""
        if self.asleep and self._moves:
            self._move(self._device)
        self.asleep = False

    def require_awake(self, what: str) -> None:
        """Refuse to do `what` asleep.

        Raises:
            AsleepError: the engine sleeps.
        """
        if self.asleep:
            raise AsleepError(
                f"{what} was called while the engine sleeps, its weights off {self._device}; expected an engine that "
                f"is awake: call engine.wake() first."
            )

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for slot, value in state.items():
                    if isinstance(value, Tensor) and slot != "step":  # torch counts steps on the CPU
                        state[slot] = value.to(device)


class Resident:
    """The turns of an engine that sets `residence`: `sleep` gives its device to others, `wake` takes it back.

    Of an engine of several ranks, all ranks sleep and wake together.
    """

    residence: Residence

    def sleep(self) -> None:
        """Move weights and optimiser state to CPU memory; what is computed with them is refused until `wake`."""
        self.residence.sleep()

    def wake(self) -> None:
        """Bring back what `sleep` has moved."""
        self.residence.wake()
