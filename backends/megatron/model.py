"""A causal LM on megatron-core that scores sequences: hidden states from its stages, log-probs as of a `TorchModel`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn.functional import linear

from flowrl.backends.megatron.architecture import refuse_other
from flowrl.backends.megatron.mesh import MegatronMesh
from flowrl.backends.megatron.stage import Stage
from flowrl.backends.torch.load import load_causal_lm, loading, refuse_not_finite, stored_tensors
from flowrl.backends.torch.meshes.passes import Forward, Loss, Passes, See
from flowrl.backends.torch.passthrough import untied
from flowrl.backends.torch.probes import AfterHead
from flowrl.backends.torch.score.context import Context
from flowrl.backends.torch.score.model import Dtype, TorchModel
from flowrl.backends.torch.score.rows import ShiftedRows, from_first_tokens
from flowrl.backends.torch.score.tiles import LMHead, VocabularyPart, sum_gradient
from flowrl.backends.torch.train.mesh import Gathered
from flowrl.backends.torch.train.shards import sources_of, without_storage
from flowrl.backends.torch.train.tensor_parallel import join_vocabulary
from flowrl.errors import BindError
from flowrl.records import Tokens


class MegatronModel(TorchModel):
    """A causal LM whose body is a `Stage` in each process. Its `module` is transformers' model without weights, for
    configuration and names. Scores are computed on the last stage, in a call of `run`.
    """

    mesh: MegatronMesh

    def __init__(self, folder: str, dtype: Dtype, mesh: MegatronMesh, gradient_checkpointing: bool) -> None:
        self.mesh, self.device, self.context = mesh, mesh.device, Context.of(mesh)
        self._autocast, self._checkpoints = False, gradient_checkpointing
        self.dtype = getattr(torch, dtype)
        self.adapter = self.adapter_of = None
        self.unpacked = "megatron-core's own attention computes rows of equal length"
        with mesh.all_or_none(f"loading {folder!r}"), ExitStack() as files:
            with loading(folder):
                lm = without_storage(folder, None)
                sources = None if lm is None else sources_of(lm, True, stored_tensors(folder, files))
            if lm is None or sources is None:
                lm = load_causal_lm(folder)
                sources = lm.state_dict()
            refuse_other(lm.config, "MegatronTrainer", folder)
            self.module = lm
            self.stage = Stage(lm.config, mesh, self.dtype, _frequencies(lm, folder), gradient_checkpointing)
            with loading(folder):
                self.stage.load(sources)
        self.stage.follow()
        with mesh.all_or_none(f"loading {folder!r}"):
            refuse_not_finite(cast(Any, self.stage.module), folder)
        self.gathered = Gathered(self.stage.module, operator.call)
        self.after_head, self._run, self._output, self._call_head = AfterHead(), lm, "logits", operator.call
        self._head = _head_of(self.stage, mesh, self.vocabulary)
        self._like = {name: tensor.to("meta") for name, tensor in untied(lm).items()}
        self._current: tuple[ShiftedRows, Tensor] | None = None

    def weights(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> Any:
        """As `TorchModel.weights`; see `Stage.gathered`."""
        return self.stage.gathered(self._like, bucket_bytes, dtype)

    def dealt(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> Any:
        """As `TorchModel.dealt`, with all weights in share 0: each process has them after `weights`."""
        weights = self.weights(bucket_bytes, dtype)
        yield (one for one in weights if self.mesh.position.share == 0)
        for _ in weights:  # a collective, also if the reader of the round stopped
            pass

    def run(self, micro_batches: Sequence[Tokens], see: Callable[[int], Tensor | None], backward: bool) -> None:
        """Compute micro-batches by megatron-core's schedule (1F1B: Narayanan et al. 2021, arXiv:2104.04473).

        On the last stage, `see` is called with the number of each one; its log-probs can be computed in the call.
        With `backward`, it returns the loss, whose gradients are added up.
        """

        def step(coming: Any, stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
            number, micro = next(coming)
            moved = from_first_tokens(micro)
            stage.train(self._checkpoints and backward)
            hidden = stage(moved.input_ids, moved.position_ids, _hidden_keys(moved.attention_mask))
            return hidden, partial(score, number, moved)

        def score(number: int, moved: ShiftedRows, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            self._current = moved, hidden.transpose(0, 1)
            found = see(number)
            self._current = None
            return hidden.sum() if found is None else found, torch.ones((), dtype=torch.int), {}

        if micro_batches:
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(enumerate(micro_batches)),
                model=[self.stage.module],
                num_microbatches=len(micro_batches),
                seq_length=1,  # these two are not read, as lengths vary
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _states(
        self, batch: Tokens, run: nn.Module, output: str, routed: bool = False
    ) -> tuple[Tensor, Tensor | slice, Tensor | None]:
        assert self._current is not None, "called outside of run"
        moved, hidden = self._current
        rows, tokens = batch.response_mask.nonzero(as_tuple=True)
        before = batch.input_ids.shape[1] - batch.response_mask.shape[1] - 1
        lines, places = moved.find(rows, tokens + before)
        return hidden[lines, places], slice(None), None


class _Head:
    """The part of a head that this process has; read by `LMHead` as a linear layer."""

    bias = None

    def __init__(self, stage: Stage, part: VocabularyPart | None, vocabulary: int) -> None:
        self._stage, self._part, self._vocabulary = stage, part, vocabulary

    @property
    def weight(self) -> Tensor:
        return self._stage.head

    def forward(self, states: Tensor) -> Tensor:
        """Logits of the whole vocabulary."""
        if self._part is None:
            return linear(states, self.weight)
        own = linear(sum_gradient(states, self._part.group), self.weight)
        return join_vocabulary(own, self._part, self._vocabulary)


def _head_of(stage: Stage, mesh: MegatronMesh, vocabulary: int) -> LMHead:
    number, parts = mesh.position.tensor, mesh.spec.tensor
    at = None if parts == 1 else VocabularyPart(*stage.vocabulary_part, number, parts, mesh.tensor.get_group())
    return LMHead(cast(Any, _Head(stage, at, vocabulary)), AfterHead(), at)


def _hidden_keys(attended: Tensor) -> Tensor:
    """Which keys each query does not read: bool ``[row 1 query key]``."""
    causal = torch.ones(2 * attended.shape[1:], dtype=torch.bool, device=attended.device).tril()
    return ~(causal & attended[:, None, None])


def _frequencies(lm: Any, folder: str) -> Tensor:
    """The frequencies of rotary positions, which must not depend on the length of rows."""
    rotary = lm.base_model.rotary_emb
    if rotary.attention_scaling != 1.0 or rotary.rope_type in ("dynamic", "longrope"):
        raise BindError(
            f"MegatronTrainer has no rotary positions of the type {rotary.rope_type!r}, which the model in {folder!r} "
            f"has. Use TorchTrainer.",
            code="megatron.no-architecture",
            path=folder,
            setting="rope_type",
            found=rotary.rope_type,
        )
    return cast(Tensor, rotary.inv_freq)


class StagePasses(Passes):
    """Micro-batches in the schedule of a pipeline. All processes with the same rows have the same ones, so none is
    idle."""

    def __init__(self, model: MegatronModel) -> None:
        super().__init__(model.mesh)
        self._model = model

    def evaluate(self, micro_batches: Iterable[Any], forward: Forward, see: See) -> bool:
        """See `Passes.evaluate`; calls `see` on the last stage."""
        numbered = _not_idle(micro_batches)
        self._model.run(
            [micro for _, micro in numbered], lambda i: see(numbered[i][0], *forward(numbered[i][1])), False
        )
        return True

    def descend(self, micro_batches: Iterable[Any], forward: Forward, loss: Loss) -> None:
        """See `Passes.descend`; calls `loss` on the last stage."""
        numbered = _not_idle(micro_batches)
        self._model.stage.begin()
        self._model.run(
            [micro for _, micro in numbered], lambda i: loss(numbered[i][0], *forward(numbered[i][1])), True
        )
        self._model.stage.complete()


def _not_idle(micro_batches: Iterable[Any]) -> list[tuple[int, Any]]:
    """The micro-batches with rows, with their numbers."""
    return [(number, micro) for number, micro in enumerate(micro_batches) if micro is not None]
