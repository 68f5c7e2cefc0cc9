"""Layers split over the tensor axis of a mesh by transformers' plan for the architecture (Shoeybi et al. 2019,
arXiv:1909.08053), before FSDP shards what is left of them.

The embedding and a linear head are split by parts of the vocabulary (section 3): each process looks up, and scores, the
tokens of its part. Adapters are split as the layers that they adapt, so that both add up. All else is the same on each
process of the axis, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from flowrl.backends.torch.score.tiles import VocabularyPart, sum_gradient, summed
from flowrl.backends.torch.train.boxes import part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BY_INPUTS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
_SUMMED = "replicated_with_grad_allreduce"
"""The style of weights that each process uses for its own heads, so that their gradients add up."""


def split_layers(
    lm: PreTrainedModel, mesh: DeviceMesh, adapted: Collection[str], experts: Collection[nn.Module] = ()
) -> None:
    """Split the layers of a model over `mesh`, of the axis ``"tensor"``; its weights may be on the meta device.

    `adapted` are the full names of the layers with an adapter; `experts` are layers that the axis ``"expert"`` cuts.
    """
    ends = [layer for layer in (lm.get_input_embeddings(), lm.get_output_embeddings()) if _is_split(layer)]
    _split_parameters(lm, mesh, adapted, [*ends, *experts])  # first: some styles look at the parameters
    modules = dict(lm.named_modules())
    for name, style in _styles(lm, adapted).items():
        module = modules.get(name)
        if module is None or module in ends or module in experts:
            continue
        if style == _SUMMED:
            _sum_gradients(module, mesh.get_group())
        elif style in ALL_PARALLEL_STYLES:
            if style == "mla_kv_a_proj":  # it reads where the rotary part begins
                module.config = cast(Any, lm.config.get_text_config())
            ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    for layer in ends:
        _split_vocabulary(layer, mesh)
    if tied:
        ends[1].weight = ends[0].weight


def local(parameter: Tensor) -> Tensor:
    """What this process has of a parameter that is split over the tensor axis, with gradients."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _is_split(layer: nn.Module | None) -> bool:
    """Whether an embedding or a head is split by the vocabulary."""
    return isinstance(layer, nn.Embedding) or type(layer) is nn.Linear


def _styles(lm: PreTrainedModel, adapted: Collection[str]) -> dict[str, str]:
    """The style of each module that the plan names; in place of an adapted layer, of its parts."""
    plan, found = dict(lm.tp_plan), {}
    for name, _ in lm.named_modules():
        if (style := plan.get(replace_layer_number_by_wildcard(name))) is not None:
            if name not in adapted:
                found[name] = style
            else:
                found[f"{name}.base_layer"] = style
                found[f"{name}.{'lora_A' if style in _BY_INPUTS else 'lora_B'}.default"] = style
    return found


def _split_parameters(
    lm: PreTrainedModel, mesh: DeviceMesh, adapted: Collection[str], others: Collection[nn.Module]
) -> None:
    """Replace the parameters that the plan splits, except those of `others`; it names them, or their modules."""
    plan, styles = dict(lm.tp_plan), _styles(lm, adapted)
    for name, module in lm.named_modules():
        for key in [key for key, _ in module.named_parameters(recurse=False)]:
            style = plan.get(replace_layer_number_by_wildcard(f"{name}.{key}"), styles.get(name))
            if style in ALL_PARALLEL_STYLES and module not in others:
                ALL_PARALLEL_STYLES[style].shard_param(module, key, mesh)


def _split_vocabulary(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split an embedding or a head along the vocabulary; its forward still takes all ids, or gives all logits."""
    own: Any = layer
    total = len(own.weight)
    number, count = mesh.get_local_rank(), mesh.size()
    at = own.vocabulary_part = VocabularyPart(*part(total, number, count), number, count, mesh.get_group())
    for key, parameter in list(layer.named_parameters(recurse=False)):
        split = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        layer._parameters[key] = nn.Parameter(split, requires_grad=parameter.requires_grad)
    compute = layer.forward

    def look_up(ids: Tensor) -> Tensor:
        inside = (ids >= at.start) & (ids < at.end)
        with local_parameters(layer):
            found = compute((ids - at.start).where(inside, 0))
        return summed(found.masked_fill(~inside[..., None], 0), at.group)

    def score(states: Tensor) -> Tensor:
        with local_parameters(layer):
            logits = compute(sum_gradient(states, at.group))
        return join_vocabulary(logits, at, total)

    if isinstance(layer, nn.Embedding):
        if layer.padding_idx is not None:  # its gradient is 0
            own.padding_idx = layer.padding_idx - at.start if at.start <= layer.padding_idx < at.end else None
        own.forward = look_up
    else:
        own.forward = score


def join_vocabulary(logits: Tensor, at: VocabularyPart, total: int) -> Tensor:
    """All logits ``[tokens total]`` from those of the process's part; a collective."""
    return cast(Tensor, _Join.apply(logits, at, total))  # type: ignore[no-untyped-call]


def _sum_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """Sum the gradients of a module's own weights over the axis."""
    own: Any = module
    compute = module.forward

    def forward(*args: Any, **settings: Any) -> Any:
        with _replaced(module, lambda parameter: sum_gradient(parameter, group)):
            return compute(*args, **settings)

    own.forward = forward


def local_parameters(module: nn.Module) -> Any:
    """In the block, the module computes with what this process has of its parameters."""
    return _replaced(module, local)


@contextmanager
def _replaced(module: nn.Module, change: Any) -> Iterator[None]:
    """In the block, the module computes with changed parameters."""
    own = dict(module._parameters)
    module._parameters.update({key: None if x is None else change(x) for key, x in own.items()})
    try:
        yield
    finally:
        module._parameters.update(own)


class _Join(torch.autograd.Function):
    """The parts of all processes along the last axis; the gradient is that of the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: VocabularyPart, total: int) -> Tensor:
        ctx.at = at
        found = x.new_zeros(*x.shape[:-1], total)
        found[..., at.start : at.end] = x
        dist.all_reduce(found, group=at.group)  # parts may differ in size
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return slope[..., ctx.at.start : ctx.at.end], None, None
