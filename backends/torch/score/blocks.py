"""The blocks of a transformer, and their gradient checkpointing (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

Checkpointing = Literal[False, True, "offload"] | Annotated[int, Field(ge=2)]
"""Which blocks are recomputed; see `flowrl.backends.torch.train.learner.TrainedSpec`."""

_SETTINGS = {"use_reentrant": False, "preserve_rng_state": False}


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of the transformers models in a module, sharded or not, in their order."""
    parts = list(module.modules())
    names = {name for part in parts for name in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in parts if names & {kind.__name__ for kind in type(part).__mro__}]


def checkpoint_blocks(
    lm: PreTrainedModel, which: Checkpointing, offload: Callable[[Tensor], Tensor] | None = None
) -> bool:
    """Recompute blocks in backward passes in training mode; returns whether the model can recompute a part of them.

    Args:
        which: not False.
        offload: copies an input of a block to CPU memory; by default `to_cpu`.
    """
    lm.gradient_checkpointing_enable(_SETTINGS)
    layers: list[Any] = [block for block in blocks_of(lm) if hasattr(block, "gradient_checkpointing")]
    for number, layer in enumerate(layers):
        if which == "offload":
            layer._gradient_checkpointing_func = _Offloaded(layer._gradient_checkpointing_func, offload or to_cpu)
        elif which is not True and number % which:
            layer.gradient_checkpointing = False
    return len(layers) > 0


def to_cpu(tensor: Tensor) -> Tensor:
    """A copy in CPU memory, from which a GPU can read it."""
    found = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return found.copy_(tensor)


class _Offloaded:
    """Checkpoints a call of a block with its inputs in CPU memory until the backward pass."""

    def __init__(self, checkpoint: Callable[..., Any], offload: Callable[[Tensor], Tensor]) -> None:
        self._checkpoint, self._offload = checkpoint, offload

    def __call__(self, *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            return self._checkpoint(*args)

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, self._offload(tensor)


def _unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True, copy=True)
