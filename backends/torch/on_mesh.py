"""`MeshBackend`: the base of backends whose models may be split over the processes of a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

from flowrl.backends.torch.device import device_of
from flowrl.backends.torch.load import FolderBackend, loading, refuse_no_model, skeleton
from flowrl.backends.torch.score.context import refuse_uncut
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.errors import BindError, ParameterError
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import BuildContext
from flowrl.spec import written

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # architectures name their number differently
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


class MeshBackend(FolderBackend):
    """Base of backends whose models may be split over the processes of a mesh.

    Args:
        mesh: the processes on named axes, one device each; None is ``Mesh(fsdp=ranks)``.
    """

    pipelined: ClassVar[bool] = False
    """Whether `Mesh.pipeline` may be above 1."""

    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)

    def _check(self) -> None:
        super()._check()
        name = type(self).__name__
        if self.mesh is not None and self.ranks > 1:
            raise ParameterError(
                f"{name}(ranks={self.ranks}, mesh={written(self.mesh)}) has its processes twice. Leave ranks out.",
                code="mesh.ranks",
                ranks=self.ranks,
                mesh=self.mesh,
            )
        if self.geometry.pipeline > 1 and not self.pipelined:
            raise ParameterError(
                f"{name}(mesh={written(self.geometry)}) would be a pipeline, but only MegatronTrainer has one. Use the "
                f"axes fsdp and tensor.",
                code="mesh.pipeline",
                backend=name,
                given=self.geometry.pipeline,
            )

    @property
    def geometry(self) -> Mesh:
        """The mesh of the processes that form this engine."""
        return Mesh(fsdp=self.ranks) if self.mesh is None else self.mesh

    @property
    def synced_dtype(self) -> str:
        """Float32, since models on a mesh compute in bfloat16 by autocast."""
        return "float32"

    def refuse_folder(self, folder: str) -> None:
        """Refuse a folder without a model, or with one that the mesh does not fit; reads no weights.

        Raises:
            BindError: see `refuse_no_model` and `Mesh.refuse_unfit`; or the architecture has no plan for `tensor`.
        """
        refuse_no_model(folder)
        self._refuse_unfit(folder)

    def _refuse_unfit(self, folder: str) -> None:
        mesh = self.geometry
        if mesh.tensor * mesh.context * mesh.expert == 1:
            return
        with loading(folder):
            config = configuration(folder)
        from flowrl.backends.torch.train.expert_parallel import DISPATCHED  # here, since it takes seconds to import

        experts = (config.base_model_ep_plan or {}).values()
        plans = {"tensor": bool(config.base_model_tp_plan), "expert": DISPATCHED in experts}
        for axis, planned in plans.items():
            if getattr(mesh, axis) > 1 and not planned:
                raise BindError(
                    f"{type(self).__name__}(mesh={written(mesh)}) splits layers by {axis}={getattr(mesh, axis)}, but "
                    f"transformers has no {axis}-parallel plan for {config.model_type!r}, the architecture of "
                    f"{folder!r}. Use Mesh(fsdp={mesh.fsdp * mesh.tensor}).",
                    code="mesh.no-plan",
                    axis=axis,
                    architecture=config.model_type,
                    path=folder,
                )
        mesh.refuse_unfit(type(self).__name__, folder, sizes(config))
        if mesh.context > 1:
            with loading(folder):
                lm = skeleton(folder, cast(Any, self).attention)
            refuse_uncut(lm, folder, f"{type(self).__name__}(mesh={written(mesh)})")

    def join(self, context: BuildContext) -> ProcessMesh:
        """The mesh seen from this process, on its device.

        Raises:
            BindError: torch lacks the device, the model does not fit the mesh, or `context` is not one of its
                processes.
        """
        if self.model is not None:
            self._refuse_unfit(self.model)
        spec: Any = self  # device, dtype and offload are fields of the subclasses
        place = device_of(self, spec.device)
        offload = spec.offload in (True, "parameters")
        if self.geometry.ranks == 1 and not offload:
            return ProcessMesh(place)
        from flowrl.backends.torch.train.sharded import shard_over  # here, since FSDP takes half a second to import

        reshard = getattr(spec, "reshard_after_forward", True)
        return shard_over(context, self.geometry, place, spec.dtype == "bfloat16", offload, reshard)


def configuration(folder: str) -> Any:
    """The configuration of the language model of a folder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config.get_text_config(decoder=True)


def sizes(config: Any) -> dict[str, int]:
    """The sizes of a model that axes divide; those that it has."""
    heads = getattr(config, "num_attention_heads", None)
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "num_hidden_layers": getattr(config, "num_hidden_layers", None),
        "num_experts": next((size for name in _EXPERTS if (size := getattr(config, name, None))), None),
        **{name: getattr(config, name, None) for name in _WIDTHS},
    }
    return {name: size for name, size in found.items() if isinstance(size, int)}
