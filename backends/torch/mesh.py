"""Where the weights of an engine are: all in this process (`Mesh`) or sharded over ranks (`Sharded`), and off the
device while the engine sleeps (`Residence`).

What can be seen beforehand (rows that are not well formed, a gradient that is not finite) ranks agree on: all of them
raise, and the engines can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flowrl.errors import AsleepError

T = TypeVar("T")

BUCKET_BYTES = 256 << 20
"""Sharded weights are gathered in buckets of at most this size, unless said otherwise."""


class GatheredCall:
    """``call(function, *args)`` runs a function while the weights of `root` are whole; here they always are."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


class Mesh:
    """All weights in this process, on `device`: there is nothing to agree on and nothing to gather."""

    rank = 0
    size = 1
    sharded = False
    group: ProcessGroup | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gathered(self, module: nn.Module, blocks: Sequence[nn.Module] = ()) -> GatheredCall:
        """What runs functions while the weights of `module` are whole."""
        return GatheredCall(module)

    def max_over_ranks(self, count: int) -> int:
        """The largest `count` of any rank."""
        return count

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """All ranks get through the block, or all raise."""
        yield

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The L2 norm of all tensors together, over all ranks."""
        return torch.nn.utils.get_total_norm(tensors)

    def full(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The whole of each tensor, in order."""
        return iter(named)


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
                for key, value in state.items():
                    if isinstance(value, Tensor) and key != "step":  # torch counts steps on the CPU
                        state[key] = value.to(device)


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
