"""`TorchTrainer` and `TorchScorer`: a causal LM that is trained, or only scores tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from pydantic import Field, model_validator

from flowrl.backends.torch.adapter_folder import refuse_no_adapter
from flowrl.backends.torch.load import Folder, load_tokenizer
from flowrl.backends.torch.lora import LoRA, require_peft
from flowrl.backends.torch.on_mesh import MeshBackend
from flowrl.backends.torch.probes import Attention
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.backends.torch.score.engine import (
    AdapterOffEngine,
    FrozenEngine,
    LoRATrainerEngine,
    Residence,
    TorchTrainerEngine,
)
from flowrl.backends.torch.score.log_prob_cache import CachedEngine
from flowrl.backends.torch.score.model import Dtype, TorchModel
from flowrl.backends.torch.train.balancing import LoadBalancing
from flowrl.backends.torch.train.learner import Learner, TrainedSpec
from flowrl.errors import BindError, type_of
from flowrl.hub.repositories import Commits, is_repository
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.heads import HiddenStateScorer
from flowrl.protocols.protocols import BuildContext, Checkpointed, Sleeper, Trainer
from flowrl.protocols.scorers import Follower, LogitScorer, NormScorer
from flowrl.spec import non_default


class TorchScorer(MeshBackend):
    """A causal LM that scores tokens (a reference policy), which nothing trains; `SyncReference` may update it.

    Args:
        model: a Hugging Face folder; None is the model of the role ``actor`` with its adapter (`LoRA`) off, and then
            all settings are the actor's.
        dtype: the compute dtype, ``"float32"`` or ``"bfloat16"`` (autocast over float32 weights, as in `TorchTrainer`,
            so that an untrained actor and its reference agree bit for bit).
        attention: ``"sdpa"`` (fused) or ``"eager"`` (the architecture's own plain products); None is fused attention if
            it computes the same, else plain.
        max_tokens: positions that one forward pass may compute; see `TrainedSpec`.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.
        device: None is CUDA if available, else the CPU.
        memory: GiB that the role takes on a device, in place of the prediction; compared with ``memory=`` of a place.
        ranks, mesh: processes that share the weights; see `TrainedSpec`.
        offload: keep weights in CPU memory; a layer moves to the device to compute.
        cache: a folder on a disk of this machine in which the log-probs of each row are kept, so that the epochs of an
            offline algorithm, and a resumed run, do not compute them again (TRL's ``precompute_ref_log_probs``). Rows
            are found by their tokens and temperature, and by the model: weights, configuration, dtype and attention. In
            an epoch that computes nothing, log-probs are those of the first one; uncached they differ by rounding,
            since micro-batches have other rows.
    """

    serves = (LogitScorer, HiddenStateScorer, NormScorer, Sleeper, Follower, Checkpointed)
    reads_segments: ClassVar[bool] = True

    model: Folder | None = None
    dtype: Dtype = "float32"
    attention: Attention | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    logprob_chunk: int = Field(default=1024, ge=1)
    device: str | None = None
    memory: float | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)
    offload: bool = False
    cache: Folder | None = None

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        if self.model is None and (unused := ", ".join(non_default(self))):
            raise ValueError(
                f"without a folder, TorchScorer is the actor with its adapter off and has the actor's settings; drop "
                f"{unused}, or name a folder"
            )
        return self

    def refuse_follow(self) -> None:
        """See `Backend.refuse_follow`: it needs weights of its own, in one piece, and no log-probs on disk."""
        wrong = {"model": self.model is None, "cache": self.cache is not None}
        wrong["ranks" if self.mesh is None else "mesh"] = self.geometry.ranks > 1
        for name in (name for name in wrong if wrong[name]):
            raise BindError(
                f"TorchScorer({name}={getattr(self, name)!r}) cannot follow a trainer: it needs weights of its own on "
                f"one rank, and no cache of log-probs. Bind ref=TorchScorer('model').",
                code="backend.cannot-follow",
                setting=name,
            )

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        from flowrl.backends.torch.sizing.training import Engine  # here, since it runs the model

        return Engine(self, demand, self.logprob_chunk).scored(shares=self.model is None)

    def build(self, context: BuildContext) -> FrozenEngine:
        """Load the model, or share the actor's.

        Raises:
            BindError: the folder has no complete causal LM, or this process is not one of `ranks`; or no folder is
                named and the actor has no adapter.
        """
        if self.model is None:
            actor = context.engine("actor")
            if not isinstance(actor, LoRATrainerEngine):
                raise BindError(
                    f"TorchScorer() without a folder scores with the weights of the role 'actor' without its adapter, "
                    f"but the actor is {type_of(actor)} without an adapter, whose weights change. Bind "
                    f"actor=TorchTrainer(model, lora=LoRA()), or name a folder: TorchScorer(model).",
                    code="lora.no-adapter",
                    found=type(actor).__name__,
                )
            return AdapterOffEngine(actor)
        mesh = self.join(context)
        model = TorchModel(self.model, self.dtype, mesh, self.attention, gradient_checkpointing=False)
        model.module.requires_grad_(False)
        residence = Residence(mesh.device, [model.gathered.root], offload=self.offload)
        budget = model.budget(self.max_tokens)
        settings = self.model, model, budget, self.logprob_chunk, residence
        return FrozenEngine(*settings) if self.cache is None else CachedEngine(*settings, self.cache)


class TorchTrainer(TrainedSpec):
    """A trained causal LM (an actor): float32 weights, one optimizer step per mini-batch.

    Args:
        model, optimizer, schedule, grad_clip, dtype, attention, gradient_checkpointing, max_tokens, device, memory,
            ranks, mesh, offload, reshard_after_forward: see `TrainedSpec`.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.
        lora: train only an adapter; the model's own weights are frozen. Needs ``pip install 'flowrl[lora]'``.
        router_aux_loss_coef: the factor of the load-balancing loss of a mixture of experts, over all attended tokens of
            a mini-batch; 0 is without it. See `flowrl.backends.torch.train.balancing.LoadBalancing`. Reports
            ``actor/aux_loss``.
    """

    serves = (Trainer, LogitScorer, NormScorer, Checkpointed, Sleeper)
    reads_segments: ClassVar[bool] = True

    logprob_chunk: int = Field(default=1024, ge=1)
    lora: LoRA | None = None
    router_aux_loss_coef: float = Field(default=0.0, ge=0)

    @property
    def why_not_fusable(self) -> str | None:
        """None, since micro-batches and their log-probs depend only on the rows, not on whether there is a gradient;
        not verified for offloaded weights and subclasses."""
        if type(self) is not TorchTrainer:
            return super().why_not_fusable
        if self.geometry.tensor > 1:
            return "layers that are split (tensor) are computed by other kernels with a gradient"
        if self.geometry.expert > 1:
            return "experts also compute the tokens of other processes (expert), whose number may change their kernels"
        if self.offload in (True, "parameters"):
            return f"it was not verified for weights that are gathered in each pass (offload={self.offload!r})"
        return None

    @property
    def starts_from_adapter(self) -> str | None:
        """The adapter that training starts from; see `LoRA.starts_from`."""
        return None if self.lora is None else self.lora.starts_from

    def pinned(self, commits: Commits) -> Self:
        """With the commits of the repositories of model and adapter.

        Raises:
            HubError: see `FolderBackend.pinned` and `LoRA.pinned`.
        """
        found = super().pinned(commits)
        return found if found.lora is None else dataclasses.replace(found, lora=found.lora.pinned(commits))

    def local(self) -> Self:
        """With the folders of the files of model and adapter.

        Raises:
            HubError: see `FolderBackend.local` and `LoRA.local`.
        """
        found = super().local()
        return found if found.lora is None else dataclasses.replace(found, lora=found.lora.local())

    def refuse_missing(self) -> None:
        """Refuse a folder without a model or without an adapter.

        Raises:
            BindError: see `FolderBackend.refuse_missing` and `flowrl.backends.torch.adapter_folder.refuse_no_adapter`.
        """
        super().refuse_missing()
        path = None if self.lora is None else self.lora.adapter_path
        if path is not None and not is_repository(path):
            refuse_no_adapter(path)

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        return self.trained_footprint(demand, self.logprob_chunk, self.router_aux_loss_coef > 0)

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        """Load model and tokenizer, and build the optimizer.

        Raises:
            BindError: the folder has no complete causal LM or no tokenizer, this process is not one of `ranks`, or
                `lora` or its adapter does not fit the model.
        """
        self.optimizer.require_installed()
        if self.lora is not None:
            require_peft()
        mesh = self.join(context)
        tokenizer = load_tokenizer(self.model)
        model = TorchModel(
            self.model,
            self.dtype,
            mesh,
            self.attention,
            self.gradient_checkpointing,
            lora=self.lora,
            seed=context.seed,
        )
        budget = model.budget(self.max_tokens)
        balancing = None
        if self.router_aux_loss_coef:
            model.watch_routers(self.model)
            balancing = LoadBalancing(self.router_aux_loss_coef, model)
        named, blocks = model.module.named_parameters(), blocks_of(model.module)
        learner = Learner(named, self, "actor", mesh, budget, model.adapter_of, balancing, blocks=blocks)
        residence = Residence(mesh.device, [model.gathered.root], learner.optimizer, self.offload)
        engine = TorchTrainerEngine if self.lora is None else LoRATrainerEngine
        return engine(self.model, model, budget, self.logprob_chunk, residence, learner, tokenizer)
