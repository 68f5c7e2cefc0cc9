"""Several processes that hold an engine's weights together, as one group of `torch.distributed`.

If a rank raises during a collective, the others wait in it until the timeout of the process group, which the caller
sets (``init_process_group(timeout=...)``); then build the engines again on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from flowrl.backends.torch.train.boxes import Cut, Place, cut_of
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.errors import BindError, RankError
from flowrl.protocols.mesh import Mesh, Position
from flowrl.protocols.protocols import BuildContext


class GroupMesh(ProcessMesh):
    """Parts of all weights in each process, as `DTensor`, and collectives over the processes of `group`."""

    sharded = True

    def __init__(self, spec: Mesh, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(device)
        self.spec, self.position = spec, spec.position(dist.get_rank(group))
        self.group: ProcessGroup = group
        self._peers = self._subgroup("rows") if spec.data_ranks < spec.ranks else None

    def _subgroup(self, axis: str) -> ProcessGroup:
        """This process's group on an axis, with the timeout of the whole one; see `Mesh.together`."""
        patience = self.group._get_backend(self.device).options._timeout
        found, _ = dist.new_subgroups_by_enumeration(self.spec.together(axis), patience)
        return cast(ProcessGroup, found)

    def place_of(self, cut: Cut | None, at: Position | None = None) -> Place:
        """Which of the processes that hold a tensor this one is, or the one `at` a position."""
        at = at or self.position
        if cut is not None and cut.axis == "expert":
            return Place(at.expert, self.spec.expert, at.shard, self.spec.expert_shards)
        return Place(at.tensor, self.spec.tensor, at.fsdp, self.spec.fsdp)

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


def joined(context: BuildContext, ranks: int, place: torch.device) -> ProcessGroup:
    """The default group of `torch.distributed`, of the `ranks` processes of an engine.

    With more than one rank, the caller has initialized `torch.distributed` (gloo for CPUs, ``cpu:gloo,cuda:nccl`` for
    GPUs, one device per rank) with the ranks of this engine as its default group.
    """
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
    return cast(ProcessGroup, dist.group.WORLD)
