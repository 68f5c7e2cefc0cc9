"""`TorchCritic`: a value function over tokens, on the body of a causal LM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.backends.torch.learner import Learner
from flowrl.backends.torch.load import Folder, load_tokenizer
from flowrl.backends.torch.mesh import Forward, device_of, mesh_of
from flowrl.backends.torch.model import Dtype, Rows, TokenInputs, TorchModel, check_tokens, scatter, score_rows
from flowrl.backends.torch.optim import AdamW, Constant, Optimizer, Schedule
from flowrl.backends.torch.shards import BUCKET_BYTES
from flowrl.backends.torch.sleep import Residence, Resident
from flowrl.core.backend import Backend
from flowrl.core.protocols import BuildContext, Checkpointed, Critic, Loss, MiniBatch, Sleeper
from flowrl.data.metrics import Metrics
from flowrl.errors import BindError
from flowrl.records import Tokens

VALUE_HEAD_FILE = "value_head.safetensors"


class TorchCritic(Backend):
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
        memory: GiB that the role takes on a device, as far as you know it; held against ``memory=`` of a place.
        ranks: processes that share the weights by FSDP2, one device each.
        offload: keep weights, gradients and optimiser state in CPU memory; a layer comes to the device to compute.
    """

    serves = (Critic, Checkpointed, Sleeper)

    model: Folder
    optimizer: Optimizer = AdamW(lr=1e-5)
    schedule: Schedule = Constant()
    grad_clip: float | None = Field(default=1.0, gt=0)
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    max_tokens: int = Field(default=16384, ge=1)
    device: str | None = None
    memory: float | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)
    offload: bool = False

    def build(self, context: BuildContext) -> TorchCriticEngine:
        """Load body and tokeniser, and make the optimiser.

        Raises:
            BindError: the folder does not hold the body of a causal LM and its tokeniser, or this process is not one
                of `ranks`.
        """
        mesh = mesh_of(context, self.ranks, device_of(self, self.device), self.dtype == "bfloat16", self.offload)
        tokenizer = load_tokenizer(self.model)
        body = TorchModel(self.model, self.dtype, mesh, self.gradient_checkpointing, with_head=False)
        head = _value_head(self.model, body.width()).to(mesh.device)
        under = mesh.forward(head)
        whole = nn.ModuleDict({"model": body.module, "value_head": head})
        learner = Learner(whole, self.optimizer, self.schedule, self.grad_clip, self.max_tokens, "critic", mesh)
        residence = Residence(mesh.device, [body.forward.root, under.root], learner.optimizer, self.offload)
        return TorchCriticEngine(body, head, under, self.max_tokens, residence, tokenizer, learner)


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


class TorchCriticEngine(Resident):
    """A live `Critic`; made by `TorchCritic.build`.

    Args:
        body: the model below the LM head.
        head, under: the value head, and what its weights can be had under.
        max_tokens: as in the spec.
        residence: where the weights are now.
        tokenizer: written beside the weights.
        learner: trains body and head.
    """

    def __init__(
        self,
        body: TorchModel,
        head: nn.Linear,
        under: Forward,
        max_tokens: int,
        residence: Residence,
        tokenizer: Any,
        learner: Learner,
    ) -> None:
        self._body, self._head, self._under, self._max_tokens = body, head, under, max_tokens
        self.residence, self._tokenizer, self._learner = residence, tokenizer, learner

    @property
    def version(self) -> int:
        """How many `update` calls the weights have seen."""
        return self._learner.version

    def _values(self, batch: Tokens) -> Tensor:
        values = self._under(self._head, self._body.states(batch).float())
        return scatter(values.squeeze(1), batch.response_mask)

    @torch.no_grad()
    def values(self, batch: Tokens) -> Tensor:
        """The value of the state before each response token: float32 ``[batch response]``, 0 off the mask.

        The value before response token ``t`` is read at sequence position ``sequence - response - 1 + t``.

        Each rank passes rows of its own, as many as it has, and gets their values; a collective.

        Raises:
            DataError: a response token counts that has no attended token before it.
            RankError: that is so on another rank.
            AsleepError: the engine sleeps.
        """
        self.residence.require_awake("values")
        with self._body.mesh.together("values"):
            inputs = TokenInputs.of(batch)
        return score_rows(self._body.mesh, inputs, self._max_tokens, self._values)

    def update(self, batch: Rows, mini_batches: Sequence[MiniBatch], loss: Loss[Rows]) -> Metrics:
        """One optimiser step per mini-batch, in order; then `version` grows by one. The loss gets no entropy.

        Reports what `loss` reports, and ``critic/grad_norm`` (before clipping) and ``critic/lr``, the means over
        mini-batches.

        Every rank is given all rows and the same mini-batches, and reports its part of the metrics; a collective.

        Raises:
            DataError: as `values`; or the gradient of a mini-batch is not finite (on all ranks).
            AsleepError: the engine sleeps.
        """
        self.residence.require_awake("update")
        check_tokens(batch)  # type: ignore[arg-type]

        def forward(micro: Any) -> tuple[Tensor, Tensor | None]:
            return self._values(micro), None

        return self._learner.update(batch, mini_batches, loss, forward)

    def state_dict(self) -> dict[str, Any]:
        """``weights``, ``optimizer``, ``steps``, ``version``, ``over``; the tensors are the live ones, as in torch.

        Of several ranks, each has its own shards (`torch.distributed.tensor.DTensor`).
        """
        return self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which is of as many ranks, bit for bit.

        Raises:
            DataError: the state is of a model with other weights, or of another number of ranks.
        """
        self._learner.load_state_dict(state)

    def save_checkpoint(self, folder: str) -> None:
        """Write what `state_dict` holds to a new folder, each rank its shards; a collective.

        Raises:
            DataError: the folder holds a checkpoint, or cannot be written.
        """
        self._learner.save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        """Go on from a checkpoint of any number of ranks, bit for bit where there are as many; a collective.

        Raises:
            DataError: there is none, it is of another model or optimiser, or damaged.
        """
        self._learner.load_checkpoint(folder)

    def save_pretrained(self, folder: str) -> None:
        """Write body (float32), value head, configuration and tokeniser; `TorchCritic` loads the folder again.

        A collective: rank 0 writes, and holds all weights in CPU memory meanwhile.
        """
        self._body.save_pretrained(folder, BUCKET_BYTES)
        head = dict(self._body.mesh.full(self._head.state_dict().items(), BUCKET_BYTES))
        if self._body.mesh.rank == 0:
            self._tokenizer.save_pretrained(folder)
            save_file(head, os.path.join(folder, VALUE_HEAD_FILE))
