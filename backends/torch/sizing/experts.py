"""Experts of one process of the axis ``expert``, without the others: a trace runs them on the tokens that arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flowrl.backends.torch.train.expert_parallel import Experts, layers_of_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cut_experts(lm: PreTrainedModel, processes: int, tensor: int) -> None:
    """Leave the first of `processes` its experts of a model on the meta device; of those that differ on ``tensor``,
    each sends its part of the tokens."""
    for module in layers_of_experts(lm):
        own: Any = module
        for key, parameter in list(module.named_parameters(recurse=False)):
            first = parameter.detach().new_empty(len(parameter) // processes, *parameter.shape[1:])
            module._parameters[key] = nn.Parameter(first, requires_grad=parameter.requires_grad)
        own.num_experts //= processes
        own.forward = _dispatched(module.forward, _Balanced(own.num_experts, processes, cast(Any, None)), tensor)


def _dispatched(compute: Any, there: Experts, tensor: int) -> Any:
    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mine = -(-len(states) // tensor)
        found = there.combined(compute, states[:mine], chosen[:mine], weights[:mine])
        return found if tensor == 1 else pad(found, (0, 0, 0, len(states) - mine))

    return forward


class _Balanced(Experts):
    """As many tokens arrive as leave, in buffers of their own."""

    def arriving(self, experts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        return experts % self.each, [len(experts)], [len(experts)]

    def exchanged(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return cast(Tensor, _Copy.apply(x))  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.clone()
