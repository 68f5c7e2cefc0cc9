"""Weights sharded over ranks by FSDP2 (Zhao et al. 2023, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`).

Each rank has its shard of every weight, gradient and optimizer state; weights are gathered one transformer block at a
time while that block computes. All ranks run one program with collectives, so every rank must make the same calls in
the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from flowrl.backends.torch.meshes.group import GroupMesh, joined
from flowrl.backends.torch.train.boxes import Cut, boxes, cut_of, local_shape
from flowrl.backends.torch.train.mesh import Caller, Gathered, Sent
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import BuildContext
from flowrl.sync.buckets import aligned, in_buckets

T = TypeVar("T")
_GATHERED = ((False, "fsdp"), (True, "weights"))
"""Whether an axis besides ``fsdp`` cuts a tensor, and the axis on which the ranks differ that have its shards."""
# Torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Sharded(GroupMesh):
    """Weights sharded along their first axis by FSDP2, over the ranks of a mesh that differ on the axis ``fsdp``; on
    ``tensor``, layers are split before (`split_layers`), and on ``replicate`` there are copies (HSDP). Experts that the
    axis ``expert`` cuts are sharded over the processes that have the same ones.

    Gradients are summed over ranks and never divided: the weights of a mini-batch's tokens are already global.

    With bfloat16, blocks are gathered in bfloat16 and their gradients reduced in float32, under the same autocast
    region as an unsharded model. That equals autocast over float32 weights except for the scales of norms, which
    autocast leaves in float32: sharded ones are rounded to bfloat16 to compute (master weights stay float32). Weights
    outside blocks (embedding, last norm, head) are gathered in float32, and so are blocks with an `nn.LayerNorm`, whose
    CPU kernel does not support a bfloat16 scale with float32 input.

    Args:
        bfloat16: gather blocks in bfloat16.
        offload: keep shards and their gradients in CPU memory.
        reshard: free gathered weights after the forward pass, and gather them again in the backward pass.
    """

    def __init__(
        self,
        spec: Mesh,
        group: ProcessGroup,
        device: torch.device,
        bfloat16: bool,
        offload: bool,
        reshard: bool = True,
    ) -> None:
        super().__init__(spec, group, device)
        self.offload, self._reshard = offload, reshard
        self._fsdp = self._weights = group
        self.tensor: DeviceMesh | None = None
        """The ranks that differ on ``tensor``, if there are several."""
        if spec.ranks == spec.fsdp:
            self._data = DeviceMesh.from_group(group, device.type)
        else:
            mesh = self._device_mesh(("replicate", "fsdp", "tensor"), (spec.replicate, spec.fsdp, spec.tensor))
            self._fsdp, self._weights = mesh.get_group("fsdp"), self._subgroup("weights")
            self._data = mesh["fsdp"] if spec.replicate == 1 else mesh["replicate", "fsdp"]
            self.tensor = mesh["tensor"] if spec.tensor > 1 else None
        self.expert: DeviceMesh | None = None
        """The ranks that have the experts of a layer together, if there are several."""
        self._same_experts = self._data
        if spec.expert > 1:
            mesh = self._device_mesh(
                ("replicate", "shard", "expert"), (spec.replicate, spec.expert_shards, spec.expert)
            )
            self.expert = mesh["expert"]
            self._same_experts = mesh["shard"] if spec.replicate == 1 else mesh["replicate", "shard"]
        if spec.context > 1:
            self.neighbors = self._subgroup("context")
        self._narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self._bfloat16 = bfloat16

    def _device_mesh(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
        """All ranks on axes of these sizes, outer to inner."""
        groups = [self._subgroup(axis) for axis in axes]
        ranks = torch.arange(self.spec.ranks).view(sizes)
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=axes)

    @property
    def storage(self) -> torch.device:
        """The device of the shards."""
        return torch.device("cpu") if self.offload else self.device

    def gathered(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module] = (),
        layers: Sequence[nn.Module] = (),
        experts: Sequence[nn.Module] = (),
    ) -> Gathered:
        """Shard `module` in place; the result calls functions while its weights are gathered.

        Weights of `blocks` and `layers` are gathered while the forward of each runs (of a layer also in a call of its
        `caller`), and so are those of `experts`, parts of blocks that the axis ``expert`` cuts; all others while the
        function runs. A backward pass gathers them again; it must start from tensors that the function returned,
        directly or in a tuple.
        """
        root = _Root(module)
        for layer in layers:
            self._shard(layer, MixedPrecisionPolicy())
        for block in blocks:
            narrow = self._bfloat16 and not any(isinstance(part, nn.LayerNorm) for part in block.modules())
            precision = self._narrow if narrow else MixedPrecisionPolicy()
            for part in block.modules():
                if part in experts:
                    self._shard(part, precision, self._same_experts)
            self._shard(block, precision)
        self._shard(root, MixedPrecisionPolicy())
        return Gathered(root, root.call)

    def caller(self, layer: nn.Module) -> Caller:
        """Calls functions while the weights of one of the `layers` of `gathered` are gathered."""
        if not isinstance(layer, FSDPModule):
            return super().caller(layer)
        own: Any = layer
        own.call = operator.call
        register_fsdp_forward_method(layer, "call")
        return cast(Caller, own.call)

    def _shard(self, module: nn.Module, precision: MixedPrecisionPolicy, over: DeviceMesh | None = None) -> None:
        settings: dict[str, Any] = {"mesh": over or self._data, "mp_policy": precision}
        if self.offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        if not self._reshard:  # by default all are resharded but the root
            settings["reshard_after_forward"] = False
        sharded = fully_shard(module, **settings)
        # A sum: gloo has no average, and with one rank NCCL's is not reliable.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)

    def full(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, unsharded, in order; a collective: all ranks must iterate to the end.

        Tensors are gathered in buckets of at most `bucket_bytes` (a larger tensor gets its own bucket). At most three
        buckets exist at a time: the last one returned, the one being gathered, and its send buffer; and a tensor that
        is split on the axis ``tensor`` or ``expert``, which is copied from its parts.
        """
        for bucket in in_buckets(named, bucket_bytes):
            yield from self._gather(list(bucket))

    def _gather(self, bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        named = [Sent(name, tensor, tensor.dtype) for name, tensor in bucket]
        rows, parts = (self._of_all(_shards(named, cut), axis) for cut, axis in _GATHERED)
        return self._unsharded(named, rows, parts)

    def dealt(self, shares: Sequence[Sequence[Sent]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this rank's share (`Position.share`), unsharded, in order; a collective.

        `shares` are those of all ranks. No rank gathers a tensor of another share: it sends its shards of that one.
        """
        rows, parts = (self._of_share([_shards(one, cut) for one in shares], axis) for cut, axis in _GATHERED)
        return self._unsharded(shares[self.position.share], rows, parts)

    @torch.no_grad()
    def _unsharded(
        self, named: Sequence[Sent], rows: Iterator[Tensor], parts: Iterator[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, from its shards that differ in rows only, or its parts by another axis, too."""
        for name, tensor, _ in named:
            if not isinstance(tensor, DTensor):
                yield name, tensor
            elif (how := cut_of(tensor)) is None:  # FSDP gives rank r the rows from r * ceil(rows / ranks) on
                yield name, next(rows).reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
            else:
                yield name, self._joined(next(parts), tensor.shape, how)

    @torch.no_grad()
    def _of_all(self, shards: Sequence[Sent], axis: str) -> Iterator[Tensor]:
        """Of each of `shards` those of all ranks that differ on an axis: ``[ranks numbers]``, padded to the largest."""
        if not shards:
            return
        group, members = self._members(axis)
        rooms = [self._room(shard) for shard in shards]
        gathered = torch.empty(len(members), sum(rooms), dtype=torch.uint8, device=self.device)
        _all_gather(gathered.view(-1), self._packed(shards, rooms), group=group)
        yield from self._separated(gathered, shards, rooms)

    @torch.no_grad()
    def _of_share(self, shares: Sequence[Sequence[Sent]], axis: str) -> Iterator[Tensor]:
        """As `_of_all`, of the shards of this rank's share only; gathered in the call, also if it has none."""
        group, members = self._members(axis)
        sent, own = [shares[member] for member in members], shares[self.position.share]
        if not any(sent):
            return iter(())
        rooms = [[self._room(shard) for shard in shards] for shards in sent]
        sizes, mine = [sum(room) for room in rooms], rooms[members.index(self.position.share)]
        packed = self._packed([*chain(*sent)], [*chain(*rooms)])
        gathered = torch.empty(len(members), sum(mine), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(gathered.view(-1), packed, [sum(mine)] * len(members), sizes, group=group)
        return self._separated(gathered, own, mine)

    def _members(self, axis: str) -> tuple[ProcessGroup, tuple[int, ...]]:
        """The ranks that differ from this one on the axis ``fsdp``, or in ``weights``, and their group."""
        members = next(ranks for ranks in self.spec.together(axis) if self.position.share in ranks)
        return self._fsdp if axis == "fsdp" else self._weights, members

    def _size(self, shard: Sent) -> int:
        """The bytes of the largest shard of a tensor, in the dtype in which it is sent."""
        first = self.spec.position(0)  # which has as much as any
        cut = cut_of(cast(DTensor, shard.tensor))
        return math.prod(local_shape(shard.tensor.shape, cut, self.place_of(cut, first))) * shard.dtype.itemsize

    def _room(self, shard: Sent) -> int:
        return aligned(self._size(shard))

    def _separated(self, gathered: Tensor, shards: Sequence[Sent], rooms: list[int]) -> Iterator[Tensor]:
        """The shards of each tensor in what was gathered: ``[ranks numbers]``."""
        for piece, shard in zip(gathered.split(rooms, dim=1), shards, strict=True):
            yield piece[:, : self._size(shard)].contiguous().view(shard.dtype)

    def _joined(self, pieces: Tensor, shape: torch.Size, cut: Cut) -> Tensor:
        """A tensor that an axis cuts, from the parts of its ranks."""
        whole = pieces.new_empty(shape)
        for number, piece in enumerate(pieces):
            place = self.place_of(cut, self.spec.position(number))
            sides = local_shape(shape, cut, place)
            own = piece[: math.prod(sides)].view(sides)
            for box in boxes(shape, cut, place):
                whole[box.whole] = own[box.local]
        return whole

    def part_of(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This process's part of what `full` made of a tensor that is split as `parameter`."""
        shard = cast(DTensor, parameter)
        cut, own = cut_of(shard), whole.new_empty(shard.to_local().shape)
        for box in boxes(shard.shape, cut, self.place_of(cut)):
            own[box.local] = whole[box.whole]
        return own

    def _packed(self, shards: Sequence[Sent], rooms: list[int]) -> Tensor:
        """This rank's parts of `shards`, rounded and concatenated on the device, in `rooms` of bytes."""
        packed = torch.empty(sum(rooms), dtype=torch.uint8, device=self.device)
        for shard, piece in zip(shards, packed.split(rooms), strict=True):
            local = cast(DTensor, shard.tensor).to_local().flatten()
            piece[: local.numel() * shard.dtype.itemsize].view(shard.dtype).copy_(local)
        return packed


def _shards(named: Sequence[Sent], cut: bool) -> list[Sent]:
    """The sharded ones that an axis cuts besides FSDP, or the others."""
    sharded = (one for one in named if isinstance(one.tensor, DTensor))
    return [one for one in sharded if (cut_of(cast(DTensor, one.tensor)) is not None) == cut]


class _Root(nn.Module):
    """A module whose forward calls any function, so that FSDP's hooks surround it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    def call(self, function: Callable[..., T], /, *args: Any) -> T:
        output = self(function, *args)
        if not torch.is_grad_enabled():  # FSDP keeps some modules gathered for a backward pass, which does not follow
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return cast(T, output)


def shard_over(
    context: BuildContext, spec: Mesh, place: torch.device, bfloat16: bool, offload: bool, reshard: bool
) -> Sharded:
    """An engine's mesh with the axes `spec`, each process on its device `place`; see `joined`."""
    return Sharded(spec, joined(context, spec.ranks, place), place, bfloat16, offload, reshard)
