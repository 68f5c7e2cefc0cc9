"""`TorchCritic`: a value function over tokens, on the body of a causal LM."""

from __future__ import annotations

import os
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.backends.torch.load import load_tokenizer
from flowrl.backends.torch.optimizers.specs import AdamW, Optimizer
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.backends.torch.score.engine import Residence, TrainedEngine
from flowrl.backends.torch.score.model import TorchModel
from flowrl.backends.torch.score.rows import Budget, Rows, TokenInputs, check_tokens, score_rows
from flowrl.backends.torch.train.learner import Learner, TrainedSpec
from flowrl.backends.torch.train.mesh import Gathered
from flowrl.errors import BindError
from flowrl.protocols.protocols import BuildContext, Checkpointed, Critic, Objective, Sleeper
from flowrl.records import Tokens
from flowrl.sync.buckets import BUCKET_BYTES

VALUE_HEAD_FILE = "value_head.safetensors"


class TorchCritic(TrainedSpec):
    """A critic: a causal LM with a scalar head, float32 weights, one optimizer step per mini-batch.

    The value head is linear, in float32, and starts at zero, so an untrained critic returns 0 everywhere; a folder that
    `TorchCriticEngine.save_pretrained` wrote has its own. Of a reward model (a sequence classifier of transformers)
    only the body is used.

    Args:
        model, optimizer, schedule, grad_clip, dtype, attention, gradient_checkpointing, max_tokens, device, memory,
            ranks, mesh, offload, reshard_after_forward: see `TrainedSpec`; the default optimizer is ``AdamW(lr=1e-5)``.
    """

    serves = (Critic, Checkpointed, Sleeper)
    reads_segments: ClassVar[bool] = True

    optimizer: Optimizer = AdamW(lr=1e-5)

    def build(self, context: BuildContext) -> TorchCriticEngine:
        """Load body and tokenizer, and build the optimizer.

        Raises:
            BindError: the folder has no complete body of a causal LM or no tokenizer, or this process is not one of
                `ranks`.
        """
        self.optimizer.require_installed()
        mesh = self.join(context)
        tokenizer = load_tokenizer(self.model)
        body = TorchModel(self.model, self.dtype, mesh, self.attention, self.gradient_checkpointing, with_head=False)
        head = _value_head(self.model, body.width()).to(mesh.device)
        gathered_head = mesh.gathered(head)
        module = nn.ModuleDict({"model": body.module, "value_head": head})
        budget = body.budget(self.max_tokens)
        learner = Learner(module.named_parameters(), self, "critic", mesh, budget, blocks=blocks_of(module))
        residence = Residence(mesh.device, [body.gathered.root, gathered_head.root], learner.optimizer, self.offload)
        return TorchCriticEngine(body, head, gathered_head, budget, residence, tokenizer, learner)


def _value_head(folder: str, width: int) -> nn.Linear:
    """The value head of `folder`, or zeros if it has none."""
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    saved = os.path.join(folder, VALUE_HEAD_FILE)
    if os.path.isfile(saved):
        try:
            head.load_state_dict(load_file(saved))
        except Exception as error:
            raise BindError(
                f"{saved} does not load as the value head of a model of width {width} ({error}). Remove it to start "
                f"from zero, or write the folder again with save_pretrained.",
                code="trainer.value-head",
                path=saved,
                width=width,
            ) from error
    return head


class TorchCriticEngine(TrainedEngine):
    """A live `Critic`; made by `TorchCritic.build`."""

    def __init__(
        self,
        body: TorchModel,
        head: nn.Linear,
        gathered_head: Gathered,
        budget: Budget,
        residence: Residence,
        tokenizer: Any,
        learner: Learner,
    ) -> None:
        self._body, self._head, self._gathered_head, self._budget = body, head, gathered_head, budget
        self.residence, self._tokenizer, self.learner = residence, tokenizer, learner

    def _values(self, batch: Tokens) -> Tensor:
        def value(states: Tensor) -> Tensor:
            return cast(Tensor, self._gathered_head.call(self._head, states.float())).squeeze(1)

        return self._body.score_states(batch, value)

    @torch.no_grad()
    def values(self, batch: Tokens) -> Tensor:
        """The value of the state before each response token: float32 ``[batch response]``, 0 off the mask.

        The value before response token ``t`` is read at sequence position ``sequence - response - 1 + t``.

        A collective: each rank passes any number of its own rows, and gets their values.
        """
        self.residence.require_awake("values")
        with self._body.mesh.all_or_none("values"):
            inputs = TokenInputs.of(batch, self._body.vocabulary)
        return score_rows(self._body.mesh, inputs, self._budget, self._values)

    def _checked(self, batch: Rows) -> Rows:
        check_tokens(batch, self._body.vocabulary)  # type: ignore[arg-type]
        return batch

    def _forward(self, micro: Any, objective: Objective[Rows]) -> tuple[Tensor, Tensor | None]:
        return self._values(micro), None  # the objective gets no entropy

    def save_pretrained(self, folder: str) -> None:
        """Write body (float32), value head, configuration and tokenizer; `TorchCritic` loads the folder.

        A collective: each rank writes some of the files.
        """
        self._body.save_pretrained(folder, BUCKET_BYTES)
        head = dict(self._body.mesh.full(self._head.state_dict().items(), BUCKET_BYTES))
        if self._body.mesh.position.leads:
            self._tokenizer.save_pretrained(folder)
            save_file(head, os.path.join(folder, VALUE_HEAD_FILE))
