"""`TorchCritic`: a value function over tokens, on the body of a causal LM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.backends.optim import AdamW, Constant, Optimizer, Schedule
from flowrl.backends.torch_learner import Learner
from flowrl.backends.torch_model import (
    Dtype,
    Folder,
    Rows,
    TokenInputs,
    TorchModel,
    check_tokens,
    load_tokenizer,
    micro_batches,
    scatter,
    take,
)
from flowrl.engines import BuildContext, Loss, MiniBatch
from flowrl.errors import BindError
from flowrl.metrics import Metrics
from flowrl.records import Tokens
from flowrl.spec import Spec

VALUE_HEAD_FILE = "value_head.safetensors"


class TorchCritic(Spec):
    """A causal LM with a scalar head in place of its own (a critic): float32 weights, one optimiser step a mini-batch.

    The value head is linear, in float32, and starts at zero, so an untrained critic says 0 everywhere; a folder that
    `TorchCriticEngine.save_pretrained` wrote brings its own.

    Args:
        model: a Hugging Face folder with a tokeniser.
        optimizer: `AdamW` or `SGD`.
        schedule: `Constant`, `Linear` or `Cosine`, in optimiser steps.
        grad_clip: L2 norm that the gradient of a mini-batch is scaled down to; None leaves it.
        dtype: the arithmetic of the body: ``"bfloat16"`` is autocast over the float32 weights.
        gradient_checkpointing: recompute each layer in the backward pass, for memory.
        max_tokens: padded tokens that a micro-batch may hold; gradients do not depend on it.
        device: None is CUDA where there is one, else the CPU.
    """

    model: Folder
    optimizer: Optimizer = AdamW(lr=1e-5)
    schedule: Schedule = Constant()
    grad_clip: float | None = Field(default=1.0, gt=0)
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    max_tokens: int = Field(default=16384, ge=1)
    device: str | None = None

    def build(self, context: BuildContext) -> TorchCriticEngine:
        """Load body and tokeniser, and make the optimiser.

        Raises:
            BindError: the folder does not hold the body of a causal LM and its tokeniser.
        """
        tokenizer = load_tokenizer(self.model)
        body = TorchModel(self.model, self.dtype, self.device, self.gradient_checkpointing, with_head=False)
        head = _value_head(self.model, body.width()).to(body.device)
        whole = nn.ModuleDict({"model": body.module, "value_head": head})
        learner = Learner(whole, self.optimizer, self.schedule, self.grad_clip, self.max_tokens, "critic")
        return TorchCriticEngine(body, head, self.max_tokens, tokenizer, learner)


def _value_head(folder: str, width: int) -> nn.Linear:
    """The value head of `folder`, or zeros where it has none."""
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    saved = os.path.join(folder, VALUE_HEAD_FILE)
    if os.path.isfile(saved):
        try:
            head.load_state_dict(load_file(saved))
        except Exception as error:
            raise BindError(
                f"{saved} does not load as the value head of a body of width {width} ({error}); "
                f"remove it to start from zero, or write the folder again with save_pretrained."
            ) from error
    return head


class TorchCriticEngine:
    """A live `Critic`; made by `TorchCritic.build`."""

    def __init__(self, body: TorchModel, head: nn.Linear, max_tokens: int, tokenizer: Any, learner: Learner) -> None:
        self._body, self._head, self._max_tokens = body, head, max_tokens
        self._tokenizer, self._learner = tokenizer, learner

    @property
    def version(self) -> int:
        """How many `update` calls the weights have seen."""
        return self._learner.version

    def _values(self, batch: Tokens) -> Tensor:
        with self._body.arithmetic():
            states = self._body.states(batch)
        return scatter(self._head(states.float()).squeeze(1), batch.response_mask)

    @torch.no_grad()
    def values(self, batch: Tokens) -> Tensor:
        """The value of the state before each response token: float32 ``[batch response]``, 0 off the mask.

        The value before response token ``t`` is read at sequence position ``sequence - response - 1 + t``.

        Raises:
            DataError: a response token counts that has no attended token before it.
        """
        inputs = TokenInputs.of(batch)
        out = torch.zeros(inputs.response_mask.shape, device=inputs.response_mask.device)
        for rows in micro_batches(inputs.attention_mask, self._max_tokens):
            out[rows] = self._values(take(inputs, rows, self._body.device)).to(out.device)
        return out

    def update(self, batch: Rows, mini_batches: Sequence[MiniBatch], loss: Loss[Rows]) -> Metrics:
        """One optimiser step per mini-batch, in order; then `version` grows by one. The loss gets no entropy.

        Reports what `loss` reports, and ``critic/grad_norm`` (before clipping) and ``critic/lr``, the means over
        mini-batches.

        Raises:
            DataError: as `values`; or the gradient of a mini-batch is not finite.
        """
        check_tokens(batch)  # type: ignore[arg-type]

        def forward(micro: Any) -> tuple[Tensor, Tensor | None]:
            return self._values(micro), None

        return self._learner.update(batch, mini_batches, loss, forward)

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
        """Write body (float32), value head, configuration and tokeniser; `TorchCritic` loads the folder again."""
        self._body.module.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        save_file(self._head.state_dict(), os.path.join(folder, VALUE_HEAD_FILE))
