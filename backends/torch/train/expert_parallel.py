"""Experts that live on several processes (GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 3): the axis
``expert`` of a mesh cuts them, and tokens travel to the processes that have the experts they chose, and back.

Routers are not cut: each process routes its own tokens. Processes that differ on ``tensor`` have the same tokens, and
each sends its part of them. Every process takes part in each exchange, also without tokens. Gradients of experts are
sums over the tokens of all processes that exchange them; FSDP adds those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import pad
from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

from flowrl.backends.torch.score.tiles import sum_gradient, summed
from flowrl.backends.torch.train.boxes import part
from flowrl.backends.torch.train.tensor_parallel import local_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DISPATCHED = "ep_dispatch_experts"
"""The style of layers of experts in transformers' plans: called with tokens, and the experts that each chose with their
weights, they compute all experts from parameters whose first axis counts them."""


def split_experts(lm: PreTrainedModel, mesh: DeviceMesh, tensor: DeviceMesh | None) -> list[nn.Module]:
    """Cut the experts of each layer over `mesh`, of the axis ``"expert"``, and dispatch tokens to them.

    Weights may be on the meta device. `tensor` are the processes that have the same tokens.

    Returns:
        the layers of experts.
    """
    found = layers_of_experts(lm)
    for module in found:
        _split(module, mesh, tensor)
    return found


def layers_of_experts(lm: PreTrainedModel) -> list[nn.Module]:
    """The layers that the axis ``"expert"`` cuts, by transformers' plan for the architecture."""
    plan = dict(lm.ep_plan)
    named = lm.named_modules()
    return [module for name, module in named if plan.get(replace_layer_number_by_wildcard(name)) == DISPATCHED]


def _split(module: nn.Module, mesh: DeviceMesh, tensor: DeviceMesh | None) -> None:
    own: Any = module
    for key, parameter in list(module.named_parameters(recurse=False)):
        split = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        module._parameters[key] = nn.Parameter(split, requires_grad=parameter.requires_grad)
    own.num_experts //= mesh.size()
    shared = None if tensor is None else (tensor.get_group(), tensor.get_local_rank(), tensor.size())
    compute, there = module.forward, Experts(own.num_experts, mesh.size(), mesh.get_group())

    def computed(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        with local_parameters(module):
            return cast(Tensor, compute(states, chosen, weights))

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if shared is None:
            return there.combined(computed, states, chosen, weights)
        (group, number, count), total = shared, len(states)
        first, end = part(total, number, count)
        states, weights = sum_gradient(states, group), sum_gradient(weights, group)
        mine = there.combined(computed, states[first:end], chosen[first:end], weights[first:end])
        return summed(pad(mine, (0, 0, first, total - end)), group)

    own.forward = forward


class Experts(NamedTuple):
    """The experts of a layer: `each` on each of as many `processes`, in the order of the ranks of `group`."""

    each: int
    processes: int
    group: ProcessGroup

    def combined(self, compute: Callable[..., Tensor], states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums of the outputs of the experts that each token chose, ``[token hidden]``; a collective.

        Args:
            compute: the layer, with the experts of this process.
            states: float ``[token hidden]``.
            chosen: int ``[token choice]``.
            weights: float ``[token choice]``.
        """
        experts, choices = chosen.flatten(), chosen.shape[1]
        order = experts.argsort(stable=True)
        numbers, sent, received = self.arriving(experts)
        tokens = self.exchanged(states[order // choices], sent, received)
        outputs = _each(compute, tokens, numbers)
        outputs = self.exchanged(outputs, received, sent)[order.argsort()]
        outputs = outputs.view(*chosen.shape, outputs.shape[-1])
        return (outputs * weights[..., None]).sum(1).to(states.dtype)

    def arriving(self, experts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Of the tokens that arrive, those of one rank after the other, the number of the expert here; and how many
        leave to each rank and arrive from it, if tokens that chose these `experts` leave. A collective."""
        leaving = experts.bincount(minlength=self.processes * self.each).view(self.processes, self.each)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sent, received = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
        numbers = torch.arange(self.each, device=experts.device).repeat(self.processes)
        return numbers.repeat_interleave(arriving.flatten(), output_size=sum(received)), sent, received

    def exchanged(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The rows that the processes send to this one, in the order of ranks; a collective, also backward.

        Args:
            x: ``[row ...]``, those to the first rank first.
            sent, received: the number of rows to and from each rank.
        """
        return cast(Tensor, _Exchange.apply(x, sent, received, self.group))  # type: ignore[no-untyped-call]


def _each(compute: Callable[..., Tensor], tokens: Tensor, experts: Tensor) -> Tensor:
    """The output of one expert for each token."""
    count = len(tokens)
    if not count:  # a token of zeros, so that weights and exchanges get gradients as on all other processes
        tokens, experts = pad(tokens, (0, 0, 0, 1)), experts.new_zeros(1)
    return compute(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))[:count]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        found = slope.new_empty(sum(ctx.sent), *slope.shape[1:])
        dist.all_to_all_single(found, slope.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return found, None, None, None
