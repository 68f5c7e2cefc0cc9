"""Weights sharded over ranks by FSDP2 (Zhao et al. 2023, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`).

Each rank has its shard of every weight, gradient and optimizer state; weights are gathered one transformer block at a
time while that block computes. All ranks run one program with collectives, so every rank must make the same calls in
the same order.

If a rank raises during a collective, the others wait in it until the timeout of the process group, which the caller
sets (``init_process_group(timeout=...)``); then build the engines again on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flowrl.backends.torch.train.mesh import Gathered, ProcessMesh
from flowrl.errors import BindError, RankError
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import BuildContext
from flowrl.sync.buckets import in_buckets

T = TypeVar("T")
# Torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Sharded(ProcessMesh):
    """Weights sharded along their first axis over the ranks of `mesh`, a device mesh of one dimension.

    Gradients are summed over ranks and never divided: the weights of a mini-batch's tokens are already global.

    With bfloat16, blocks are gathered in bfloat16 and their gradients reduced in float32, under the same autocast
    region as an unsharded model. That equals autocast over float32 weights except for the scales of norms, which
    autocast leaves in float32: sharded ones are rounded to bfloat16 to compute (master weights stay float32). Weights
    outside blocks (embedding, last norm, head) are gathered in float32, and so are blocks with an `nn.LayerNorm`, whose
    CPU kernel does not support a bfloat16 scale with float32 input.

    Args:
        bfloat16: gather blocks in bfloat16.
        offload: keep shards, gradients and optimizer state in CPU memory, where the optimizer then steps too.
    """

    sharded = True

    def __init__(self, spec: Mesh, mesh: DeviceMesh, device: torch.device, bfloat16: bool, offload: bool) -> None:
        super().__init__(device)
        self.spec, self.position = spec, spec.position(mesh.get_rank())
        self.mesh, self.offload = mesh, offload
        self.group = mesh.get_group()
        self.size = mesh.size()
        self._narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self._bfloat16 = bfloat16

    @property
    def storage(self) -> torch.device:
        """The device of the shards."""
        return torch.device("cpu") if self.offload else self.device

    def gathered(self, module: nn.Module, blocks: Sequence[nn.Module] = ()) -> Gathered:
        """Shard `module` in place; the result calls functions while its weights are gathered.

        Weights of a block are gathered while the block's forward runs, all others while the function runs. A backward
        pass gathers them again; it must start from tensors that the function returned, directly or in a tuple.
        """
        root = _Root(module)
        for block in blocks:
            narrow = self._bfloat16 and not any(isinstance(part, nn.LayerNorm) for part in block.modules())
            self._shard(block, self._narrow if narrow else MixedPrecisionPolicy())
        self._shard(root, MixedPrecisionPolicy())
        return Gathered(root, root.call)

    def rows(self, total: int) -> tuple[int, int]:
        """First row of this rank, and one past the last, of a sharded tensor of `total` rows; it may have none."""
        each = -(-total // self.size)
        first = self.position.fsdp * each
        return min(first, total), min(first + each, total)

    def _shard(self, module: nn.Module, precision: MixedPrecisionPolicy) -> None:
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        sharded = fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=offload)
        # A sum: gloo has no average, and with one rank NCCL's is not reliable.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)

    def max_over_ranks(self, count: int) -> int:
        """The largest `count` of any rank; a collective."""
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return int(most)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in its place; a collective."""
        dist.all_reduce(tensor, group=self.group)
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
        """The L2 norm of all sharded tensors together, over all ranks, on the device; a collective."""
        local = [cast(DTensor, tensor).to_local() for tensor in tensors]
        square = torch.nn.utils.get_total_norm(local).to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt().float()

    def full(self, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, unsharded, in order; a collective: all ranks must iterate to the end.

        Tensors are gathered in buckets of at most `bucket_bytes` (a larger tensor gets its own bucket). At most three
        buckets exist at a time: the last one returned, the one being gathered, and its send buffer.
        """
        for bucket in in_buckets(named, bucket_bytes):
            yield from self._gather(list(bucket))

    @torch.no_grad()
    def _gather(self, bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        shards = [tensor for _, tensor in bucket if isinstance(tensor, DTensor)]
        # FSDP gives rank r the rows from r * ceil(rows / ranks) on; the last ones may have fewer, or none.
        counts = [-(-shard.shape[0] // self.size) * shard.shape[1:].numel() for shard in shards]
        gathered = torch.empty(self.size, sum(counts), device=self.device)
        _all_gather(gathered.view(-1), self._packed(shards, counts), group=self.group)
        pieces = iter(gathered.split(counts, dim=1))
        for name, tensor in bucket:
            if isinstance(tensor, DTensor):
                yield name, next(pieces).reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
            else:
                yield name, tensor

    def _packed(self, shards: list[DTensor], counts: list[int]) -> Tensor:
        """This rank's parts of `shards`, concatenated on the device."""
        packed = torch.empty(sum(counts), device=self.device)
        for shard, piece in zip(shards, packed.split(counts), strict=True):
            local = shard.to_local().flatten()
            piece[: local.numel()].copy_(local)
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
        if not torch.is_grad_enabled():  # FSDP keeps a root gathered for a backward pass, which does not follow
            cast(FSDPModule, self).reshard()
        return cast(T, output)


def shard_over(context: BuildContext, spec: Mesh, place: torch.device, bfloat16: bool, offload: bool) -> Sharded:
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
    return Sharded(
        spec, DeviceMesh.from_group(cast(ProcessGroup, dist.group.WORLD), place.type), place, bfloat16, offload
    )
