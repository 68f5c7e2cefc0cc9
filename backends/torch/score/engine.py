"""Live engines on a torch model, which score and train, and their sleep and wake.

The model is in this process, or sharded over several ranks that make the same calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.backends.hosted.arrival import weights_for
from flowrl.backends.torch.load import mix_weights
from flowrl.backends.torch.optimizers.streamed import Offload
from flowrl.backends.torch.passthrough import Passthrough
from flowrl.backends.torch.score.head import FolderHead
from flowrl.backends.torch.score.model import TorchModel
from flowrl.backends.torch.score.rows import Budget, Rows, SequenceInputs, check_sequences, fill_rows
from flowrl.backends.torch.score.tiles import Entropy
from flowrl.backends.torch.train.learner import Learner
from flowrl.data.metrics import Metrics
from flowrl.errors import AsleepError, BindError, ParameterError, SyncError
from flowrl.protocols.heads import Head, HiddenStates
from flowrl.protocols.protocols import MiniBatch, Objective, Trainer
from flowrl.protocols.scorers import Top
from flowrl.records import Receipt, Sequences
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.digest import combine, named_weights
from flowrl.sync.weight_selection import GatheredWeights

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

_Score = Callable[[SequenceInputs], Sequence[Tensor]]


class Residence:
    """Moves modules and the state of their optimizer to `device` and off it; on a CPU it only sets `asleep`.

    Args:
        offload: what is always in CPU memory; see `TrainedSpec`.
    """

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        offload: Offload = False,
    ) -> None:
        self._device, self._modules = device, [] if offload == "parameters" else modules
        self._optimizer = None if offload == "optimizer" else optimizer
        self.extra_modules: Sequence[nn.Module] = ()
        """Further modules that move with them."""
        self._moves = offload is not True and device.type != "cpu"
        self.asleep = False

    def sleep(self) -> None:
        """Release the device; idempotent."""
        if not self.asleep and self._moves:
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()
        self.asleep = True

    def wake(self) -> None:
        """Move back to the device; idempotent."""
        if self.asleep and self._moves:
            self._move(self._device)
        self.asleep = False

    def require_awake(self, what: str) -> None:
        """Raise `AsleepError` if the engine sleeps."""
        if self.asleep:
            raise AsleepError(
                f"{what} was called while the engine sleeps, with its weights off {self._device}. Call engine.wake() "
                f"first.",
                code="engine.asleep",
                call=what,
            )

    def _move(self, device: torch.device) -> None:
        for module in (*self._modules, *self.extra_modules):
            module.to(device)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and key != "step":  # torch counts steps on the CPU
                        state[key] = value.to(device)


class Resident:
    """`sleep` and `wake` of an engine that sets `residence`; all ranks sleep and wake together."""

    residence: Residence

    def sleep(self) -> None:
        """Move weights and optimizer state to CPU memory; calls that need them raise until `wake`."""
        self.residence.sleep()

    def wake(self) -> None:
        """Undo `sleep`."""
        self.residence.wake()


class TrainedEngine(Resident):
    """Base of the live engines of trainers and critics, which set `learner`: updates and checkpoints."""

    learner: Learner

    def update(self, batch: Rows, mini_batches: Sequence[MiniBatch], objective: Objective[Rows]) -> Metrics:
        """One optimizer step per mini-batch, in order; then increments `version`.

        Reports the metrics of `objective`, and ``grad_norm`` (before clipping) and ``lr`` under ``actor/`` or
        ``critic/``, as means over mini-batches. Only a trainer's objective gets entropy.

        A collective: each rank passes its part of the same mini-batches, and reports its part of the metrics.
        """
        self.residence.require_awake("update")
        with self.learner.mesh.all_or_none("update"):
            batch = self._checked(batch)
        return self.learner.update(batch, mini_batches, objective, lambda micro: self._forward(micro, objective))

    def _checked(self, batch: Rows) -> Rows:
        """The checked rows, with the heads of other models open."""
        raise NotImplementedError

    def _forward(self, micro: Any, objective: Objective[Rows]) -> tuple[Tensor, Tensor | None]:
        """The model's output for a micro-batch, and its entropy."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The number of `update` calls so far."""
        return self.learner.version

    def state_dict(self) -> dict[str, Any]:
        """``weights``, ``optimizer``, ``steps``, ``version``, ``over``; the tensors are the live ones, as in torch.

        For an adapter, ``weights`` are only its own, and ``over`` identifies the base weights. With several ranks, each
        has its own shards (`torch.distributed.tensor.DTensor`).
        """
        return self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, bit for bit."""
        self.learner.load_state_dict(state)

    def save_checkpoint(self, folder: str) -> None:
        """Write `state_dict` to a new folder, each rank its shards; a collective."""
        self.learner.save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        """Resume from a checkpoint of any number of ranks, bit for bit if the number is the same; a collective."""
        self.learner.load_checkpoint(folder)


class TorchScorerEngine(Resident):
    """A live `Scorer`; made by `TorchScorer.build`."""

    def __init__(
        self, folder: str, scorer: TorchModel, budget: Budget, logprob_chunk: int, residence: Residence
    ) -> None:
        self.folder, self.residence = folder, residence
        self._scorer, self._budget, self._chunk = scorer, budget, logprob_chunk

    @property
    def model(self) -> PreTrainedModel:
        """The causal LM itself, in evaluation mode; a rollout in this process may share it."""
        return self._scorer.module

    @property
    def compute_dtype(self) -> torch.dtype:
        """The compute dtype: float32, or bfloat16 over float32 weights."""
        return self._scorer.dtype

    @property
    def sharded(self) -> bool:
        """Whether the weights of `model` are sharded."""
        return self._scorer.mesh.sharded

    def computing(self) -> AbstractContextManager[None]:
        """The autocast region of this engine, for `model`."""
        return self._scorer.autocast()

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        """Log-probs of the response tokens at each row's temperature: float32 ``[batch response]``, 0 off the mask.

        A collective: each rank passes any number of its own rows, and gets their log-probs.
        """
        out = _blank(batch)
        self._score("log_probs", batch, [out], lambda micro: [self._scorer.log_probs(micro, self._chunk, "none")[0]])
        return out

    @torch.no_grad()
    def logit_norms(self, batch: Sequences) -> Tensor:
        """``1 - 2 p + sum p**2`` of the response tokens, at each row's temperature: float32 ``[batch response]``, 0 off
        the mask.

        That is the squared norm of the gradient of a token's log-prob in the logits over the temperature, where p is
        its probability and the sum is over the vocabulary. Ranks and errors as in `log_probs`.
        """
        out = _blank(batch)
        self._score("logit_norms", batch, [out], lambda micro: [self._scorer.logit_norms(micro, self._chunk)])
        return out

    def _score(self, call: str, batch: Sequences, out: Sequence[Tensor], score: _Score) -> None:
        """Fill `out` with the scores of micro-batches."""
        self.residence.require_awake(call)
        with self._scorer.mesh.all_or_none(call):
            inputs = SequenceInputs.of(batch, self._scorer.vocabulary)
        fill_rows(out, self._scorer.mesh, inputs, self._budget, score)

    @torch.no_grad()
    def top_log_probs(self, batch: Sequences, k: int) -> Top:
        """The `k` most likely tokens in the place of each response token, and the log-prob of all others together.

        Ranks and errors as in `log_probs`.
        """
        if k >= self._scorer.vocabulary:
            raise ParameterError(
                f"k={k} covers the vocabulary of {self._scorer.vocabulary} tokens, but [batch, response, vocabulary] "
                f"would not fit in memory. Pass a smaller one, such as k={max(1, self._scorer.vocabulary // 4)}, or "
                f"use TeacherHiddenStates and FullGKD for all tokens.",
                code="model.top-k",
                k=k,
                vocabulary=self._scorer.vocabulary,
            )
        out = Top(_blank(batch, k).long(), _blank(batch, k), _blank(batch))
        self._score("top_log_probs", batch, out, lambda micro: self._scorer.top(micro, self._chunk, k))
        return out


class FrozenEngine(TorchScorerEngine):
    """A live `HiddenStateScorer` with the weights of its folder."""

    _head: tuple[int, FolderHead] | None = None

    @torch.no_grad()
    def last_states(self, batch: Sequences) -> HiddenStates:
        """The last hidden states, float32 ``[batch response hidden]``, and the head for their logits.

        Ranks and errors as in `log_probs`.
        """
        self.residence.require_awake("last_states")
        self._head = self._head or self._find_head()
        width, head = self._head
        out = _blank(batch, width)
        self._score("last_states", batch, [out], lambda micro: [self._scorer.last_states(micro)])
        return HiddenStates(out, head)

    def follow(self, source: Trainer, alpha: float) -> Receipt:
        """Set the weights to ``alpha * source + (1 - alpha) * own``, in float32; see `Follower`."""
        self.residence.require_awake("follow")
        start, own = time.perf_counter(), dict(named_weights(self.model))
        sent, received = dict[str, str](), dict[str, Tensor]()
        for name, tensor, digest in weights_for(None, source, checked=True):
            sent[name], received[name] = digest, tensor
        if wrong := sorted({n for n in own.keys() | sent.keys() if _shape(own.get(n)) != _shape(received.get(n))}):
            raise SyncError(
                f"The weights of version {source.version} are not those of {self.folder!r}: {wrong[0]} differs, and "
                f"{len(wrong) - 1} more. Bind the reference and the policy to models of one architecture.",
                code="engine.weights-mismatch",
                version=source.version,
                faults=wrong,
            )
        mix_weights(self.model, received, alpha)
        self._head, size = None, sum(tensor.nbytes for tensor in received.values())
        return Receipt(source.version, combine(sent), size, time.perf_counter() - start, transport="copy")

    def save_checkpoint(self, folder: str) -> None:
        """Write the weights to a new folder."""
        from flowrl.backends.torch.train import checkpoint  # late: torch.distributed.checkpoint takes 0.5 s to import

        checkpoint.save(folder, self._scorer.mesh, *self._named(), {})

    def load_checkpoint(self, folder: str) -> None:
        """Restore the weights of a checkpoint."""
        from flowrl.backends.torch.train import checkpoint  # as above

        checkpoint.load(folder, self._scorer.mesh, *self._named(), lambda _: {}, {})

    def _named(self) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        """The weights by name, and an optimizer without state, which checkpoints take."""
        names = dict(self.model.named_parameters())
        return names, torch.optim.SGD(names.values())

    def _find_head(self) -> tuple[int, FolderHead]:
        after, found = self._scorer.after_head, self._scorer.head()
        if after is None or found is None:
            raise BindError(
                f"{type(self.model).__name__} in {self.folder!r} does not compute its logits by a linear head on its "
                f"last hidden states with a scale or a cap, so no other process could compute them. Use its top "
                f"tokens instead: TeacherTopK and GKD.",
                code="model.no-linear-head",
                path=self.folder,
                architecture=type(self.model).__name__,
            )
        width, digest = found
        return width, FolderHead(self.folder, digest, after, self.compute_dtype)


class TorchTrainerEngine(TorchScorerEngine, TrainedEngine):
    """A live `Trainer`; made by `TorchTrainer.build`."""

    def __init__(
        self,
        folder: str,
        scorer: TorchModel,
        budget: Budget,
        logprob_chunk: int,
        residence: Residence,
        learner: Learner,
        tokenizer: Any,
    ) -> None:
        super().__init__(folder, scorer, budget, logprob_chunk, residence)
        self.learner, self._tokenizer = learner, tokenizer
        self._passthrough = Passthrough.of(scorer.module, folder)
        self._heads: dict[Head, Head] = {}

    def _checked(self, batch: Rows) -> Rows:
        check_sequences(batch, self._scorer.vocabulary)  # type: ignore[arg-type]
        return self._with_open_heads(batch)

    def _forward(self, micro: Any, objective: Objective[Rows]) -> tuple[Tensor, Tensor | None]:
        # Entropy is always reported; its gradient is computed only if the objective uses it.
        entropy: Entropy = "gradient" if objective.wants_entropy else "value"
        idle = isinstance(micro, SequenceInputs)  # an idle row has no further columns, and no token that needs them
        return self._scorer.log_probs(micro, self._chunk, entropy, None if idle else objective.of_distribution)

    def _with_open_heads(self, batch: Rows) -> Rows:
        """`batch` with the heads of other models open, on this engine's device while it is awake."""
        heads = {name: x for name, x in batch._asdict().items() if not isinstance(x, Tensor) and isinstance(x, Head)}
        self._heads = {head: self._heads.get(head) or head.load(self._scorer.device) for head in heads.values()}
        self.residence.extra_modules = [head for head in self._heads.values() if isinstance(head, nn.Module)]
        return batch._replace(**{name: self._heads[head] for name, head in heads.items()})

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """The float32 weights under the names that `save_pretrained` writes, sorted, tied ones once.

        The tensors are the live ones, except that an adapter is merged into copies; copy what must survive the next
        update. Sharded weights are gathered in buckets of at most `bucket_bytes`, of which three exist at a time: a
        collective that all ranks must iterate to the end. See `Sharded.full`. `rounded` rounds shards before that, and
        `outgoing` deals the weights to the ranks.
        """
        return GatheredWeights(partial(self._scorer.weights, bucket_bytes), partial(self._scorer.dealt, bucket_bytes))

    def save_pretrained(self, folder: str) -> None:
        """Write weights (float32, an adapter merged), configuration and tokenizer as a Hugging Face folder.

        Tensors of the model's folder that training does not load, such as a vision tower, are copied from it, bit for
        bit; see `flowrl.backends.torch.passthrough`. A collective: each rank writes some of the files.
        """
        mesh = self._scorer.mesh
        with ExitStack() as rest:
            with mesh.all_or_none("save_pretrained"):
                if mesh.position.leads:
                    rest.enter_context(self._passthrough.completing(folder))
            self._scorer.save_pretrained(folder, BUCKET_BYTES)
        if mesh.position.leads:
            self._tokenizer.save_pretrained(folder)


class LoRATrainerEngine(TorchTrainerEngine):
    """A `TorchTrainerEngine` that trains only an adapter; it is `Adapted`."""

    @property
    def adapter_of(self) -> str:
        """The digest of the base weights, and the scaling of the adapter."""
        assert self._scorer.adapter_of is not None
        return self._scorer.adapter_of

    def adapter_weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """The adapter's float32 weights under the names that PEFT writes, sorted; otherwise as `weights`."""
        scorer = self._scorer
        return GatheredWeights(
            lambda dtype: scorer.adapter_weights(bucket_bytes), lambda dtype: scorer.dealt_adapter(bucket_bytes)
        )

    def save_pretrained(self, folder: str) -> None:
        """As `TorchTrainerEngine.save_pretrained`; and the adapter in PEFT's format, in the subfolder ``adapter``."""
        super().save_pretrained(folder)
        self._scorer.save_adapter(os.path.join(folder, "adapter"), self.folder, BUCKET_BYTES)


class AdapterOffEngine(FrozenEngine):
    """A live `HiddenStateScorer` with a trainer's base weights: its model with the adapter off."""

    def __init__(self, actor: LoRATrainerEngine) -> None:
        residence = Residence(actor.model.device, [])  # the shared model moves with the trainer
        super().__init__(actor.folder, actor._scorer, actor._budget, actor._chunk, residence)
        self._actor = actor

    def _score(self, call: str, batch: Sequences, out: Sequence[Tensor], score: _Score) -> None:
        """As `TorchScorerEngine._score`, with the adapter off in the call."""
        self._actor.residence.require_awake(call)
        with self._scorer.without_adapter():
            super()._score(call, batch, out, score)

    def _find_head(self) -> tuple[int, FolderHead]:
        with self._scorer.without_adapter():
            return super()._find_head()


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _blank(batch: Sequences, *more: int) -> Tensor:
    """Float32 zeros ``[batch response ...]``."""
    return torch.zeros(*batch.response_mask.shape, *more, device=batch.response_mask.device)
