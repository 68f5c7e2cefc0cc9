"""The processes that hold an engine's weights, seen from one: this one alone (`ProcessMesh`), or several that shard
them (`Sharded`).

Ranks agree on errors that they can detect in advance (malformed rows, a gradient that is not finite): all raise, and
the engines remain usable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flowrl.protocols.mesh import Mesh

T = TypeVar("T")


class Caller(Protocol):
    """Calls a function with its arguments."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


class Gathered(NamedTuple):
    """A module (`root`, or its wrapper) whose weights may be sharded; `call` calls a function with them gathered."""

    root: nn.Module
    call: Caller


class Sent(NamedTuple):
    """A weight that a process sends, or the process's shard of it; it is sent in `dtype`."""

    name: str
    tensor: Tensor
    dtype: torch.dtype


class ProcessMesh:
    """All weights in this process, on `device`; collectives are trivial here."""

    spec = Mesh()
    """The axes."""
    position = spec.position(0)
    """What this process is."""
    sharded = False
    group: ProcessGroup | None = None
    neighbors: ProcessGroup | None = None
    """The processes that share each row, if there are several."""

    max_over_ranks: Callable[[int], int] = int
    """The largest count of any rank."""

    total: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)
    """The sum of a tensor over all parts of the rows."""

    agreed: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)
    """The smallest values of a tensor, of those of all processes with the same rows."""

    union: Callable[[dict[str, T]], dict[str, T]] = staticmethod(lambda named: named)
    """What all processes have by names, which those with other layers have others of."""

    all_or_none: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """All ranks complete the block, or all raise; the argument is the call's name for the message."""

    norm: Callable[[Sequence[Tensor]], Tensor] = staticmethod(torch.nn.utils.get_total_norm)
    """The L2 norm of all tensors together, over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gathered(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module] = (),
        layers: Sequence[nn.Module] = (),
        experts: Sequence[nn.Module] = (),
    ) -> Gathered:
        """Access to `module` with its weights gathered."""
        return Gathered(module, operator.call)

    def caller(self, layer: nn.Module) -> Caller:
        """Calls functions with the weights of a layer gathered, in a call of `gathered`."""
        return operator.call

    def writes(self, tensor: Tensor) -> bool:
        """Whether this process writes its part of a tensor: one of those that have the same does."""
        return self.position.leads

    def alike(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters that torch's multi-tensor kernels take together."""
        return [list(parameters)]

    def part_of(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This process's part of what `full` made of a tensor that is split as `parameter`."""
        return whole

    def full(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, unsharded, in order."""
        return iter(named)

    def dealt(self, shares: Sequence[Sequence[Sent]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this process's share (`Position.share`), unsharded, in order."""
        return ((sent.name, sent.tensor) for sent in shares[self.position.share])
