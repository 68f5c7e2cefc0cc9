"""`MegatronTrainer`: the spec of a trainer on megatron-core."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from flowrl.backends.megatron.architecture import refuse_other
from flowrl.backends.torch.device import device_of
from flowrl.backends.torch.load import load_tokenizer
from flowrl.backends.torch.on_mesh import configuration, sizes
from flowrl.backends.torch.optimizers.specs import Muon
from flowrl.backends.torch.train.learner import Learner, TrainedSpec
from flowrl.errors import BindError, ParameterError
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.protocols import BuildContext, Checkpointed, Trainer
from flowrl.protocols.scorers import LogitScorer, NormScorer

if TYPE_CHECKING:
    from flowrl.backends.megatron.engine import MegatronTrainerEngine


class MegatronTrainer(TrainedSpec):
    """A trained causal LM (an actor) on NVIDIA's megatron-core: Llama, Qwen2 or Qwen3, without experts. Experimental,
    and never run on a GPU.

    It computes what a `TorchTrainer` does, up to rounding. Its processes are on the axes ``replicate`` (copies),
    ``pipeline`` (stages of layers) and ``tensor`` (parts of layers) of its mesh; optimizer and gradients are those of a
    `TorchTrainer`, in float32, and each process steps its own part.

    Args:
        model, optimizer, schedule, grad_clip, gradient_checkpointing, max_tokens, device, memory, mesh: see
            `TrainedSpec`. Rows of a micro-batch are padded to the longest.
        dtype: the compute dtype; with ``"bfloat16"``, layers and what passes between them are in it, as is usual in
            megatron-core, but not trained weights, gradients that add up, and log-probs.
        attention, ranks, offload, reshard_after_forward: not supported; neither are `Muon`, ``AdamW(bits=8)``, and
            ``gradient_checkpointing`` of a part of the layers.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.

    Raises:
        ParameterError: a setting or an axis that it does not support.
    """

    serves = (Trainer, LogitScorer, NormScorer, Checkpointed)
    reads_segments: ClassVar[bool] = True
    pipelined: ClassVar[bool] = True

    logprob_chunk: int = Field(default=1024, ge=1)

    def _check(self) -> None:
        super()._check()
        mesh = self.geometry
        used = {
            "attention": self.attention is not None,
            "ranks": self.ranks > 1,
            "offload": self.offload is not False,
            "reshard_after_forward": not self.reshard_after_forward,
            "gradient_checkpointing": self.gradient_checkpointing not in (False, True),
            "optimizer": isinstance(self.optimizer, Muon) or getattr(self.optimizer, "bits", 32) == 8,
            **{f"mesh.{axis}": getattr(mesh, axis) > 1 for axis in ("fsdp", "context", "expert")},
        }
        if name := next((name for name, is_used in used.items() if is_used), None):
            raise ParameterError(
                f"MegatronTrainer does not support {name}. Leave it out, with Mesh(replicate=..., pipeline=..., "
                f"tensor=...) for several processes, or use TorchTrainer.",
                code="megatron.unsupported",
                setting=name,
            )

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        from flowrl.backends.megatron.sizing import footprint_of  # here, since it runs a model

        return footprint_of(self, demand)

    def _refuse_unfit(self, folder: str) -> None:
        config = configuration(folder)
        refuse_other(config, "MegatronTrainer", folder)
        self.geometry.refuse_unfit("MegatronTrainer", folder, sizes(config))

    def build(self, context: BuildContext) -> MegatronTrainerEngine:
        """Load model and tokenizer, and build the optimizer.

        Raises:
            BindError: megatron-core or a GPU is missing; the folder has no tokenizer, or no complete causal LM that is
                supported; or this process is not one of the mesh.
        """
        if not torch.cuda.is_available():
            raise BindError(
                "MegatronTrainer needs a GPU, since megatron-core allocates by CUDA, and torch sees none here. Use "
                "TorchTrainer.",
                code="megatron.no-gpu",
            )
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise BindError(
                "MegatronTrainer needs the package megatron-core, which is not installed. Run pip install "
                "'flowrl[megatron]'.",
                code="package.not-installed",
                package="megatron-core",
                extra="megatron",
            )
        from flowrl.backends.megatron.engine import MegatronTrainerEngine  # here and below, since it imports megatron
        from flowrl.backends.megatron.mesh import MegatronMesh
        from flowrl.backends.megatron.model import MegatronModel, StagePasses
        from flowrl.backends.torch.meshes.group import joined
        from flowrl.backends.torch.score.engine import Residence

        folder = self.model
        self._refuse_unfit(folder)
        place = device_of(self, self.device)
        mesh = MegatronMesh(self.geometry, joined(context, self.geometry.ranks, place), place)
        tokenizer = load_tokenizer(folder)
        model = MegatronModel(folder, self.dtype, mesh, bool(self.gradient_checkpointing))
        budget = model.budget(self.max_tokens)
        learner = Learner(model.stage.shards.items(), self, "actor", mesh, budget, passes=StagePasses(model))
        learner.optimizer.register_step_post_hook(lambda *_: model.stage.follow())
        residence = Residence(place, [], offload=True)  # its weights stay on the device
        return MegatronTrainerEngine(folder, model, budget, self.logprob_chunk, residence, learner, tokenizer)
