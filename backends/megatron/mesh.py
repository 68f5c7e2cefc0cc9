"""The processes of megatron-core: its groups, for the axes ``replicate``, ``pipeline`` and ``tensor`` of a mesh."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flowrl.backends.torch.meshes.group import GroupMesh
from flowrl.errors import BindError
from flowrl.protocols.mesh import Mesh
from flowrl.spec import written

T = TypeVar("T")


class MegatronMesh(GroupMesh):
    """Each process has the layers of its stage, cut on the axis ``tensor``; on ``replicate`` there are copies.

    megatron-core has one set of groups in a process, so all of its engines there have the same mesh.
    """

    def __init__(self, spec: Mesh, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(spec, group, device)
        sizes = {"tensor_model_parallel_size": spec.tensor, "pipeline_model_parallel_size": spec.pipeline}
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(**sizes, order="tp-cp-ep-pp-dp", create_gloo_process_groups=False)
        tensor, pipeline = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if (tensor, pipeline) != (spec.tensor, spec.pipeline):
            raise BindError(
                f"MegatronTrainer(mesh={written(spec)}) is built in a process in which megatron-core has "
                f"{written(Mesh(tensor=tensor, pipeline=pipeline))}. Use one mesh for all of its engines in a process.",
                code="megatron.unsupported",
                setting="mesh",
                given=spec,
            )
        initialize_rng_tracker(inference_rng_tracker=True)  # without dropout nothing is drawn
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self.tensor = DeviceMesh.from_group(self._tensor, device.type, mesh_dim_names=("tensor",))
        """The processes that differ on ``tensor``."""
        self.first, self.last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        """Whether this process has the first layers, and whether it has the last."""

    def writes(self, tensor: Tensor) -> bool:
        """Whether this process's part of a tensor is not a copy of another's. A number, such as the steps of a weight,
        is of a stage."""
        at = self.position
        return at.replicate == at.tensor == 0 if tensor.ndim == 0 else super().writes(tensor)

    def from_last(self, tensor: Tensor) -> Tensor:
        """The values of the last stage, in place; a collective of the stages."""
        if self.spec.pipeline > 1:
            found = tensor.to(self.device)
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(found, last, parallel_state.get_pipeline_model_parallel_group())
            tensor.copy_(found)
        return tensor

    def union(self, named: dict[str, T]) -> dict[str, T]:
        """What all stages have by name; a collective."""
        found: list[Any] = [None] * self.spec.pipeline
        dist.all_gather_object(found, named, parallel_state.get_pipeline_model_parallel_group())
        return {name: of for stage in found for name, of in stage.items()}

    def over_weights(self, tensor: Tensor) -> Tensor:
        """The sum over the processes with one copy of the weights, in place."""
        if self.spec.pipeline * self.spec.tensor > 1:
            dist.all_reduce(tensor, group=parallel_state.get_model_parallel_group())
        return tensor

    def over_copies(self, tensor: Tensor) -> Tensor:
        """The sum over the copies of the weights, in place."""
        if self.spec.replicate > 1:
            dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
        return tensor
