"""torchao's 8-bit AdamW, and its states as numbers that a checkpoint can hold; imports torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

BLOCK = 256
"""The numbers that have one scale."""


class EightBit(AdamW8bit):  # type: ignore[misc]
    """torchao's optimizer: on a CPU its formula runs as it is, on a GPU it is compiled."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, block_size=BLOCK)

    def zeros(self, parameter: Tensor, key: str) -> Tensor:
        """The state `key` of a parameter before its first step."""
        return cast(Tensor, self._new_buffer(parameter, signed=key == "exp_avg"))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step of each parameter with a gradient."""
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            super().step(closure)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            averages = {key: self.zeros(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
            state |= {"step": torch.tensor(0.0), **averages}
        state["step"] += 1
        moments = state["step"], state["exp_avg"], state["exp_avg_sq"], None
        rates = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
        single_param_adam(parameter.detach(), parameter.grad, *moments, *rates, True, False)


def quantize(tensor: Tensor, numbers: Tensor, scale: Tensor | None) -> None:
    """Set an 8-bit tensor to float32 `numbers`.

    Args:
        scale: that of each block, from which the numbers were dequantized, so that they come back to the bit; None
            is the largest number of each.
    """
    assert isinstance(tensor, OptimState8bit)
    tensor.copy_(numbers)
    if scale is not None:
        codes = quantize_8bit_with_qmap((numbers.view(-1, BLOCK) / scale[:, None]).flatten(), tensor.qmap)
        tensor.codes.copy_(codes.view_as(tensor.codes))
        tensor.scale.copy_(scale)


@OptimState8bit.implements(torch.ops.aten.clone.default)  # type: ignore[untyped-decorator]
def _clone(func: Any, types: Any, args: Any, kwargs: Any) -> OptimState8bit:
    """torchao 0.18 has none, and copies of an optimizer's state need it."""
    x = args[0]
    return OptimState8bit(x.codes.clone(), x.scale.clone(), x.qmap.clone(), x.signed, x.dtype)
