"""`TorchTrainer` and `TorchScorer`: a causal LM in this process that is trained, or only asked for log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.backends.optim import AdamW, Constant, Optimizer, Schedule
from flowrl.backends.torch_learner import Learner
from flowrl.backends.torch_model import (
    Dtype,
    Folder,
    Rows,
    SequenceInputs,
    TorchModel,
    check_sequences,
    load_tokenizer,
    micro_batches,
    take,
)
from flowrl.digest import named_weights
from flowrl.engines import BuildContext, Loss, MiniBatch
from flowrl.metrics import Metrics
from flowrl.records import Sequences
from flowrl.spec import Spec


class TorchScorer(Spec):
    """A frozen causal LM that scores tokens (a reference policy).

    Args:
        model: a Hugging Face folder.
        dtype: the arithmetic, ``"float32"`` or ``"bfloat16"`` (autocast over float32 weights, as in `TorchTrainer`, so
            that an untrained actor and its reference agree bit for bit).
        max_tokens: padded tokens that one forward pass may hold.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.
        device: None is CUDA where there is one, else the CPU.
    """

    model: Folder
    dtype: Dtype = "float32"
    max_tokens: int = Field(default=16384, ge=1)
    logprob_chunk: int = Field(default=1024, ge=1)
    device: str | None = None

    def build(self, context: BuildContext) -> TorchScorerEngine:
        """Load the model.

        Raises:
            BindError: the folder does not hold a whole causal LM.
        """
        model = TorchModel(self.model, self.dtype, self.device, gradient_checkpointing=False)
        model.module.requires_grad_(False)
        return TorchScorerEngine(self.model, model, self.max_tokens, self.logprob_chunk)


class TorchTrainer(Spec):
    """A causal LM that is trained (an actor): float32 weights, one optimiser step per mini-batch.

    Args:
        model: a Hugging Face folder with a tokeniser.
        optimizer: `AdamW` or `SGD`.
        schedule: `Constant`, `Linear` or `Cosine`, in optimiser steps.
        grad_clip: L2 norm that the gradient of a mini-batch is scaled down to; None leaves it.
        dtype: the arithmetic: ``"bfloat16"`` is autocast over the float32 weights.
        gradient_checkpointing: recompute each layer in the backward pass, for memory.
        max_tokens: padded tokens that a micro-batch may hold; gradients do not depend on it.
        logprob_chunk: tokens whose distribution over the vocabulary exists at a time.
        device: None is CUDA where there is one, else the CPU.
    """

    model: Folder
    optimizer: Optimizer = AdamW(lr=1e-6)
    schedule: Schedule = Constant()
    grad_clip: float | None = Field(default=1.0, gt=0)
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    max_tokens: int = Field(default=16384, ge=1)
    logprob_chunk: int = Field(default=1024, ge=1)
    device: str | None = None

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        """Load model and tokeniser, and make the optimiser.

        Raises:
            BindError: the folder does not hold a whole causal LM and its tokeniser.
        """
        tokenizer = load_tokenizer(self.model)
        model = TorchModel(self.model, self.dtype, self.device, self.gradient_checkpointing)
        learner = Learner(model.module, self.optimizer, self.schedule, self.grad_clip, self.max_tokens, "actor")
        return TorchTrainerEngine(self.model, model, self.max_tokens, self.logprob_chunk, learner, tokenizer)


class TorchScorerEngine:
    """A live `Scorer`; made by `TorchScorer.build`.

    Args:
        folder: where the model came from.
        scorer: the model at work.
        max_tokens, logprob_chunk: as in the spec.
    """

    def __init__(self, folder: str, scorer: TorchModel, max_tokens: int, logprob_chunk: int) -> None:
        self.folder = folder
        self._scorer, self._max_tokens, self._chunk = scorer, max_tokens, logprob_chunk

    @property
    def model(self) -> PreTrainedModel:
        """The causal LM itself, in evaluation mode; a rollout in this process may share it."""
        return self._scorer.module

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        """Log-probs of the response tokens at each row's temperature: float32 ``[batch response]``, 0 off the mask.

        Raises:
            DataError: a temperature is not positive, or a response token counts that nothing predicts.
        """
        inputs = SequenceInputs.of(batch)
        out = torch.zeros(inputs.response_mask.shape, device=inputs.response_mask.device)
        for rows in micro_batches(inputs.attention_mask, self._max_tokens):
            micro = take(inputs, rows, self._scorer.device)
            out[rows] = self._scorer.log_probs(micro, self._chunk, "none")[0].to(out.device)
        return out


class TorchTrainerEngine(TorchScorerEngine):
    """A live `Trainer`; made by `TorchTrainer.build`.

    Args:
        folder, scorer, max_tokens, logprob_chunk: as in `TorchScorerEngine`.
        learner: trains the weights of `scorer`.
        tokenizer: written beside the weights.
    """

    def __init__(
        self, folder: str, scorer: TorchModel, max_tokens: int, logprob_chunk: int, learner: Learner, tokenizer: Any
    ) -> None:
        super().__init__(folder, scorer, max_tokens, logprob_chunk)
        self._learner, self._tokenizer = learner, tokenizer

    @property
    def version(self) -> int:
        """How many `update` calls the weights have seen."""
        return self._learner.version

    def update(self, batch: Rows, mini_batches: Sequence[MiniBatch], loss: Loss[Rows]) -> Metrics:
        """One optimiser step per mini-batch, in order; then `version` grows by one.

        Reports what `loss` reports, and ``actor/grad_norm`` (before clipping) and ``actor/lr``, the means over
        mini-batches.

        Raises:
            DataError: as `log_probs`; or the gradient of a mini-batch is not finite.
        """
        check_sequences(batch)  # type: ignore[arg-type]

        def forward(micro: Any) -> tuple[Tensor, Tensor | None]:
            # Entropy is always reported; its gradient is only taken where the loss has a use for it.
            return self._scorer.log_probs(micro, self._chunk, "gradient" if loss.wants_entropy else "value")

        return self._learner.update(batch, mini_batches, loss, forward)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 weights under the names that `save_pretrained` writes, sorted, tied ones once.

        The tensors are the live ones; copy what must outlast the next update.
        """
        yield from named_weights(self.model)

    def state_dict(self) -> dict[str, Any]:
        """``weights``, ``optimizer``, ``steps``, ``version``; the tensors are the live ones, as in torch."""
        return self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, bit for bit.

        Raises:
            DataError: the state is of a model with other weights.
        """
        self._learner.load_state_dict(state)

    def save_pretrained(self, folder: str) -> None:
        """Write weights (float32), configuration and tokeniser as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
