"""Where the weights of an engine are: all in this process (`Mesh`), or sharded over ranks (`Sharded`).

What can be seen beforehand (rows that are not well formed, a gradient that is not finite) ranks agree on: all of them
raise, and the engines can go on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

T = TypeVar("T")


class Caller(Protocol):
    """Calls a function with what it is given, and returns what that returns."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


class Gathered(NamedTuple):
    """A module whose weights may be in shards.

    Args:
        root: the module, or what it is wrapped in.
        call: runs a function while the weights are whole.
    """

    root: nn.Module
    call: Caller


class Mesh:
    """All weights in this process, on `device`: there is nothing to agree on and nothing to gather, so what ranks do
    together is here what Python and torch do alone."""

    rank = 0
    size = 1
    sharded = False
    group: ProcessGroup | None = None

    max_over_ranks: Callable[[int], int] = int
    """The largest count of any rank."""

    total: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)
    """The sum of a tensor over all ranks."""

    all_or_none: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """All ranks get through the block, or all raise; given what the block does, for the message."""

    norm: Callable[[Sequence[Tensor]], Tensor] = staticmethod(torch.nn.utils.get_total_norm)
    """The L2 norm of all tensors together, over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gathered(self, module: nn.Module, blocks: Sequence[nn.Module] = ()) -> Gathered:
        """What runs functions while the weights of `module` are whole."""
        return Gathered(module, operator.call)

    def full(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The whole of each tensor, in order."""
        return iter(named)
