"""`TorchTrainer` and `TorchScorer`: a causal LM that is trained, or only asked for log-probs.

It is whole in this process, or sharded over several that each hold one rank of the engine and make the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from flowrl.backends.torch.device import device_of, mesh_of
from flowrl.backends.torch.learner import Learner, TrainedEngine, TrainedSpec
from flowrl.backends.torch.load import Folder, load_tokenizer
from flowrl.backends.torch.lora import LoRA, require_peft
from flowrl.backends.torch.mesh import Residence, Resident
from flowrl.backends.torch.model import Dtype, Rows, SequenceInputs, TorchModel, check_sequences, score_rows
from flowrl.core.backend import Backend
from flowrl.core.protocols import BuildContext, Checkpointed, Loss, MiniBatch, Scorer, Sleeper, Trainer
from flowrl.data.metrics import Metrics
from flowrl.errors import BindError
from flowrl.records import Sequences
from flowrl.spec import non_default
from flowrl.sync.buckets import BUCKET_BYTES

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel


class TorchScorer(Backend):
    """A frozen causal LM that scores tokens (a reference policy).

    Args:
        model: a Hugging Face folder; None is the model of the role ``actor`` with its adapter (`LoRA`) off, and then
            all settings are the actor's.
        dtype: the arithmetic, ``"float32"`` or ``"bfloat16"`` (autocast over float32 weights, as in `TorchTrainer`, so
            that an untrained actor and its reference agree bit for bit).
        max_tokens: padded tokens that one forward pass may hold.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.
        device: None is CUDA where there is one, else the CPU.
        memory: GiB that the role takes on a device, as far as you know it; held against ``memory=`` of a place.
        ranks: processes that share the weights by FSDP2, one device each.
        offload: keep weights in CPU memory; a layer comes to the device to compute.
    """

    serves = (Scorer, Sleeper)

    model: Folder | None = None
    dtype: Dtype = "float32"
    max_tokens: int = Field(default=16384, ge=1)
    logprob_chunk: int = Field(default=1024, ge=1)
    device: str | None = None
    memory: float | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)
    offload: bool = False

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        if self.model is None and (unused := ", ".join(non_default(self))):
            raise ValueError(
                f"without a model this is the actor's with its adapter off, whose settings are the actor's; drop "
                f"{unused}, or name a folder too"
            )
        return self

    @property
    def shares(self) -> str | None:
        """The role in whose processes this engine lives, since it uses its weights."""
        return "actor" if self.model is None else None

    def build(self, context: BuildContext) -> TorchScorerEngine:
        """Load the model, or share the actor's.

        Raises:
            BindError: the folder does not hold a whole causal LM, or this process is not one of `ranks`; or no model is
                named, and the actor has no adapter to be switched off.
        """
        if self.model is None:
            actor = context.engine("actor")
            if not isinstance(actor, LoRATrainerEngine):
                raise BindError(
                    f"TorchScorer() scores with the weights of the role 'actor' as they are without its adapter, but "
                    f"that is a {type(actor).__name__} without one, whose weights move; bind "
                    f"actor=TorchTrainer(model, lora=LoRA()), or name a folder: TorchScorer(model)."
                )
            return AdapterOffEngine(actor)
        mesh = mesh_of(context, self.ranks, device_of(self, self.device), self.dtype == "bfloat16", self.offload)
        model = TorchModel(self.model, self.dtype, mesh, gradient_checkpointing=False)
        model.module.requires_grad_(False)
        residence = Residence(mesh.device, [model.gathered.root], offload=self.offload)
        return TorchScorerEngine(self.model, model, self.max_tokens, self.logprob_chunk, residence)


class TorchTrainer(TrainedSpec):
    """A causal LM that is trained (an actor): float32 weights, one optimiser step per mini-batch.

    Args:
        model, optimizer, schedule, grad_clip, dtype, gradient_checkpointing, max_tokens, device, memory, ranks,
            offload: see `TrainedSpec`.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.
        lora: train an adapter, and nothing else; the model's own weights stay. Needs ``pip install 'flowrl[lora]'``.
    """

    serves = (Trainer, Checkpointed, Sleeper)

    logprob_chunk: int = Field(default=1024, ge=1)
    lora: LoRA | None = None

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        """Load model and tokeniser, and make the optimiser.

        Raises:
            BindError: the folder does not hold a whole causal LM and its tokeniser, this process is not one of `ranks`,
                or an adapter cannot be put where `lora` says.
        """
        if self.lora is not None:
            require_peft()
        mesh = self.mesh(context)
        tokenizer = load_tokenizer(self.model)
        model = TorchModel(self.model, self.dtype, mesh, self.gradient_checkpointing, lora=self.lora, seed=context.seed)
        learner = Learner(model.module, self, "actor", mesh, over=model.adapter_of)
        residence = Residence(mesh.device, [model.gathered.root], learner.optimizer, self.offload)
        engine = TorchTrainerEngine if self.lora is None else LoRATrainerEngine
        return engine(self.model, model, self.max_tokens, self.logprob_chunk, residence, learner, tokenizer)


class TorchScorerEngine(Resident):
    """A live `Scorer`; made by `TorchScorer.build`.

    Args:
        folder: where the model came from.
        scorer: the model at work.
        max_tokens, logprob_chunk: as in the spec.
        residence: where the weights are now.
    """

    def __init__(
        self, folder: str, scorer: TorchModel, max_tokens: int, logprob_chunk: int, residence: Residence
    ) -> None:
        self.folder, self.residence = folder, residence
        self._scorer, self._max_tokens, self._chunk = scorer, max_tokens, logprob_chunk

    @property
    def model(self) -> PreTrainedModel:
        """The causal LM itself, in evaluation mode; a rollout in this process may share it."""
        return self._scorer.module

    @property
    def sharded(self) -> bool:
        """Whether the weights of `model` are in shards, and not whole."""
        return self._scorer.mesh.sharded

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        """Log-probs of the response tokens at each row's temperature: float32 ``[batch response]``, 0 off the mask.

        Each rank passes rows of its own, as many as it has, and gets their log-probs; a collective.

        Raises:
            DataError: a temperature is not positive, or a response token counts that nothing predicts.
            RankError: that is so on another rank.
            AsleepError: the engine sleeps.
        """
        self.residence.require_awake("log_probs")
        with self._scorer.mesh.all_or_none("log_probs"):
            inputs = SequenceInputs.of(batch)

        def score(micro: SequenceInputs) -> Tensor:
            return self._scorer.log_probs(micro, self._chunk, "none")[0]

        return score_rows(self._scorer.mesh, inputs, self._max_tokens, score)


class TorchTrainerEngine(TorchScorerEngine, TrainedEngine):
    """A live `Trainer`; made by `TorchTrainer.build`.

    Args:
        folder, scorer, max_tokens, logprob_chunk, residence: as in `TorchScorerEngine`.
        learner: trains the weights of `scorer`.
        tokenizer: written beside the weights.
    """

    def __init__(
        self,
        folder: str,
        scorer: TorchModel,
        max_tokens: int,
        logprob_chunk: int,
        residence: Residence,
        learner: Learner,
        tokenizer: Any,
    ) -> None:
        super().__init__(folder, scorer, max_tokens, logprob_chunk, residence)
        self.learner, self._tokenizer = learner, tokenizer

    def update(self, batch: Rows, mini_batches: Sequence[MiniBatch], loss: Loss[Rows]) -> Metrics:
        """One optimiser step per mini-batch, in order; then `version` grows by one.

        Reports what `loss` reports, and ``actor/grad_norm`` (before clipping) and ``actor/lr``, the means over
        mini-batches.

        Each rank passes its own parts of the same mini-batches, and reports its part of the metrics; a collective.

        Raises:
            DataError: as `log_probs`; or the gradient of a mini-batch is not finite (on all ranks).
            AsleepError: the engine sleeps.
        """
        self.residence.require_awake("update")
        with self._scorer.mesh.all_or_none("update"):
            check_sequences(batch)  # type: ignore[arg-type]

        def forward(micro: Any) -> tuple[Tensor, Tensor | None]:
            # Entropy is always reported; its gradient is only taken where the loss has a use for it.
            return self._scorer.log_probs(micro, self._chunk, "gradient" if loss.wants_entropy else "value")

        return self.learner.update(batch, mini_batches, loss, forward)

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """The float32 weights under the names that `save_pretrained` writes, sorted, tied ones once.

        The tensors are the live ones, except that an adapter is merged into copies; copy what must outlast the next
        update. Sharded weights are gathered, bucket by bucket of at most `bucket_bytes`, of which three exist at a
        time: a collective that all ranks must go through to the end. See `Sharded.full`.
        """
        return self._scorer.weights(bucket_bytes)

    def save_pretrained(self, folder: str) -> None:
        """Write weights (float32, an adapter merged into them), configuration and tokeniser as a Hugging Face folder.

        A collective: rank 0 writes, and holds all weights in CPU memory meanwhile.
        """
        self._scorer.save_pretrained(folder, BUCKET_BYTES)
        if self._scorer.mesh.rank == 0:
            self._tokenizer.save_pretrained(folder)


class LoRATrainerEngine(TorchTrainerEngine):
    """A `TorchTrainerEngine` whose adapter is trained and nothing else; it is `Adapted`."""

    @property
    def adapter_of(self) -> str:
        """The digest of the weights that stay, and the scaling of the adapter that is added to them."""
        assert self._scorer.adapter_of is not None
        return self._scorer.adapter_of

    def adapter_weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """The adapter's float32 weights under the names that PEFT writes, sorted; otherwise as `weights`."""
        return self._scorer.adapter_weights(bucket_bytes)


class AdapterOffEngine(TorchScorerEngine):
    """A live `Scorer` with the weights of a trainer as they are without its adapter: those that it started from."""

    def __init__(self, actor: LoRATrainerEngine) -> None:
        residence = Residence(actor.model.device, [])  # what is shared moves with the trainer
        super().__init__(actor.folder, actor._scorer, actor._max_tokens, actor._chunk, residence)
        self._actor = actor

    def log_probs(self, batch: Sequences) -> Tensor:
        """As `TorchScorerEngine.log_probs`, with the adapter off; it is on again afterwards.

        Raises:
            AsleepError: this engine sleeps, or the trainer.
        """
        self._actor.residence.require_awake("log_probs")
        with self._scorer.without_adapter():
            return super().log_probs(batch)
