"""Weights sharded over ranks by FSDP2 (Zhao et al. 2023, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`).

Each rank has its shard of every weight, gradient and optimizer state; weights are gathered one transformer block at a
time while that block computes. All ranks run one program with collectives, so every rank must make the same calls in
the same order.

If a rank raises during a collective, the others wait in it until the timeout of the process group, which the caller
sets (``init_process_group(timeout=...)``); then build the engines again on all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from flowrl.backends.torch.train.boxes import Cut, Place, boxes, cut_of, local_shape
from flowrl.backends.torch.train.mesh import Caller, Gathered, ProcessMesh
from flowrl.errors import BindError, RankError
from flowrl.protocols.mesh import Mesh, Position
from flowrl.protocols.protocols import BuildContext
from flowrl.sync.buckets import in_buckets

T = TypeVar("T")
_ALIGNED = 16  # bytes: gathered tensors start at multiples of it, so that they may have any dtype
# Torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Sharded(ProcessMesh):
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

    sharded = True

    def __init__(
        self,
        spec: Mesh,
        group: ProcessGroup,
        device: torch.device,
        bfloat16: bool,
        offload: bool,
        reshard: bool = True,
    ) -> None:
        super().__init__(device)
        self.spec, self.position = spec, spec.position(dist.get_rank(group))
        self.group, self.offload, self._reshard = group, offload, reshard
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
        self._peers = self._subgroup("rows") if spec.data_ranks < spec.ranks else None
        if spec.context > 1:
            self.neighbors = self._subgroup("context")
        self._narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self._bfloat16 = bfloat16

    def _device_mesh(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
        """All ranks on axes of these sizes, outer to inner."""
        groups = [self._subgroup(axis) for axis in axes]
        ranks = torch.arange(self.spec.ranks).view(sizes)
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=axes)

    def _subgroup(self, axis: str) -> ProcessGroup:
        """This process's group on an axis, with the timeout of the whole one; see `Mesh.together`."""
        patience = self.group._get_backend(self.device).options._timeout  # type: ignore[union-attr]
        found, _ = dist.new_subgroups_by_enumeration(self.spec.together(axis), patience)
        return cast(ProcessGroup, found)

    def place_of(self, cut: Cut | None, at: Position | None = None) -> Place:
        """Which of the processes that hold a tensor this one is, or the one `at` a position."""
        at = at or self.position
        if cut is not None and cut.axis == "expert":
            return Place(at.expert, self.spec.expert, at.shard, self.spec.expert_shards)
        return Place(at.tensor, self.spec.tensor, at.fsdp, self.spec.fsdp)

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

    def max_over_ranks(self, count: int) -> int:
        """The largest `count` of any rank; a collective."""
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return int(most)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all parts of the rows, in its place; a collective."""
        if not self.position.reports:  # another process has the same rows
            tensor.zero_()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def agreed(self, tensor: Tensor) -> Tensor:
        """The smallest values of a tensor, in its place, of those of all processes with the same rows; a collective."""
        if self._peers is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MIN, self._peers)
        return tensor

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """All ranks complete the block, or all raise: `RankError` if only another rank raised. A collective."""
        rank, failed = self.position.rank, torch.zeros(self.spec.ranks, device=self.device)
        try:
            yield
        except Exception:
            failed[rank] = 1
            dist.all_reduce(failed, group=self.group)
            raise
        dist.all_reduce(failed, group=self.group)
        if failed.any():
            ranks = ", ".join(map(str, failed.nonzero().flatten().tolist()))
            raise RankError(
                f"{what} failed on rank {ranks} of {self.spec.ranks}, so rank {rank} stopped too, before anything "
                f"changed. Fix the error of rank {ranks}.",
                code="trainer.rank-failed",
                call=what,
                rank=rank,
                failed=ranks,
            )

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The L2 norm of all sharded tensors together, over all ranks, on the device; a collective. Copies count
        once."""
        local = [cast(DTensor, tensor).to_local() for tensor in tensors if self.writes(tensor)]
        square = torch.nn.utils.get_total_norm(local).to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt().float()

    def writes(self, tensor: Tensor) -> bool:
        """Whether this process's part of a tensor is not a copy of another's."""
        if not isinstance(tensor, DTensor):
            return super().writes(tensor)
        at = self.position
        return at.replicate == 0 and (at.tensor == 0 or cut_of(tensor) is not None)

    def alike(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters that torch's multi-tensor kernels take together: those on one device mesh."""
        groups: dict[str, list[nn.Parameter]] = {"": [], "tensor": [], "expert": []}
        for parameter in parameters:
            cut = cut_of(cast(DTensor, parameter))
            groups["" if cut is None else cut.axis].append(parameter)
        return [group for group in groups.values() if group]

    def full(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, unsharded, in order; a collective: all ranks must iterate to the end.

        Tensors are gathered in buckets of at most `bucket_bytes` (a larger tensor gets its own bucket). At most three
        buckets exist at a time: the last one returned, the one being gathered, and its send buffer; and a tensor that
        is split on the axis ``tensor`` or ``expert``, which is copied from its parts.
        """
        for bucket in in_buckets(named, bucket_bytes):
            yield from self._gather(list(bucket))

    @torch.no_grad()
    def _gather(self, bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        shards = [tensor for _, tensor in bucket if isinstance(tensor, DTensor)]
        whole = [shard for shard in shards if cut_of(shard) is None]
        cut = [shard for shard in shards if cut_of(shard) is not None]
        rows = self._pieces(whole, self._fsdp, self.spec.fsdp)
        parts = self._pieces(cut, self._weights, self.spec.fsdp * self.spec.tensor)
        for name, tensor in bucket:
            if not isinstance(tensor, DTensor):
                yield name, tensor
            elif (how := cut_of(tensor)) is None:  # FSDP gives rank r the rows from r * ceil(rows / ranks) on
                yield name, next(rows).reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
            else:
                yield name, self._joined(next(parts), tensor.shape, how)

    def _pieces(self, shards: list[DTensor], group: ProcessGroup, count: int) -> Iterator[Tensor]:
        """Of each of `shards` those of all `count` ranks of `group`: ``[ranks numbers]``, padded to the largest."""
        if not shards:
            return
        first = self.spec.position(0)  # which has as much as any
        cuts = [cut_of(shard) for shard in shards]
        shapes = [local_shape(one.shape, cut, self.place_of(cut, first)) for one, cut in zip(shards, cuts, strict=True)]
        numbers = [math.prod(shape) for shape in shapes]
        sizes = [number * shard.itemsize for number, shard in zip(numbers, shards, strict=True)]
        rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        gathered = torch.empty(count, sum(rooms), dtype=torch.uint8, device=self.device)
        _all_gather(gathered.view(-1), self._packed(shards, rooms), group=group)
        for piece, size, shard in zip(gathered.split(rooms, dim=1), sizes, shards, strict=True):
            yield piece[:, :size].contiguous().view(shard.dtype)

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

    def _packed(self, shards: list[DTensor], rooms: list[int]) -> Tensor:
        """This rank's parts of `shards`, concatenated on the device, in `rooms` of bytes."""
        packed = torch.empty(sum(rooms), dtype=torch.uint8, device=self.device)
        for shard, piece in zip(shards, packed.split(rooms), strict=True):
            local = shard.to_local().flatten()
            piece[: local.nbytes].view(local.dtype).copy_(local)
        return packed


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
    """An engine's mesh with the axes `spec`, each process on its device `place`.

    With more than one rank, the caller has initialized `torch.distributed` (gloo for CPUs, ``cpu:gloo,cuda:nccl`` for
    GPUs, one device per rank) with the ranks of this engine as its default group.
    """
    ranks = spec.ranks
    if context.world_size == 1 and ranks > 1:
        raise BindError(
            f"A backend with ranks={ranks} needs {ranks} processes, but is built in a single one. Bind a place, "
            f"bind(..., place=Colocate(gpus={ranks})), or set ranks=1.",
            code="trainer.ranks",
            ranks=ranks,
        )
    if not dist.is_initialized() and ranks == 1:
        kind = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    found = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if (context.world_size, found) != (ranks, (context.rank, ranks)):
        raise BindError(
            f"A backend with ranks={ranks} is built as rank {context.rank} of {context.world_size}, but "
            f"torch.distributed is {'not initialized' if found is None else 'rank {} of {}'.format(*found)}. Start one "
            f"process for each of {ranks} ranks, and call torch.distributed.init_process_group(rank=..., "
            f"world_size={ranks}) in each before build.",
            code="trainer.ranks",
            ranks=ranks,
            rank=context.rank,
            found=found,
        )
    return Sharded(spec, cast(ProcessGroup, dist.group.WORLD), place, bfloat16, offload, reshard)
