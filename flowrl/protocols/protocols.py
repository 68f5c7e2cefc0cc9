"""The Protocols of live engines, through which operators and executors use weights.

Operators know engines only by them, so engines are interchangeable. A `flowrl.protocols.backend.Backend` builds an
engine and lists the Protocols that it implements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, dtype

from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.records import Receipt, Sequences, Tokens

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

Caches = Literal["reuse", "recompute"]
"""Whether responses in flight during a weight update keep the KV computed with older weights, or recompute it."""

Batch = TypeVar("Batch", bound=NamedTuple)
Batch_contra = TypeVar("Batch_contra", bound=NamedTuple, contravariant=True)


class ReplicatedMiniBatch(NamedTuple):
    """All rows of a mini-batch, for an objective that compares rows.

    Args:
        weights: float32 ``[rows response]``.
        own: int64 ``[rows of this rank]``, the positions of this rank's rows.
    """

    batch: Any
    weights: Tensor
    own: Tensor


class MiniBatch(NamedTuple):
    """The rows of one optimizer step, and the weight of each of their tokens in the objective.

    Args:
        rows: int64 ``[rows]``, indices into this rank's part of the batch.
        weights: float32 ``[rows response]``, normalized over the full mini-batch. The objective is
            ``(weights * per_token_loss).sum()``, so splitting it into micro-batches or ranks does not change it.
        whole: set if the objective compares rows and is no such sum; it is then called once on all rows.
    """

    rows: Tensor
    weights: Tensor
    replicated: ReplicatedMiniBatch | None = None


class OfDistribution(NamedTuple):
    """A per-token loss computed from each token's distribution while the logits exist.

    Args:
        columns: names of the columns that it also reads.
        loss: called with log-probs ``[tokens vocabulary]``, and by name the columns at these tokens and the values
            unchanged; returns float ``[tokens]``.
    """

    columns: tuple[str, ...]
    loss: Callable[..., Tensor]


class Objective(Protocol[Batch_contra]):
    """What an update minimizes, given the model's current output: log-probs and their entropy, or values."""

    @property
    def wants_entropy(self) -> bool: ...

    @property
    def of_distribution(self) -> OfDistribution | None:
        """The per-token loss that a policy passes in place of log-probs; None for log-probs."""
        ...

    @property
    def of_tokens(self) -> bool: ...  # a sum over tokens of which each needs no other, so parts of a row suffice

    def __call__(
        self, output: Tensor, entropy: Tensor | None, batch: Batch_contra, weights: Tensor, metrics: Metrics
    ) -> Tensor:
        """The scalar objective over some rows of a mini-batch.

        Args:
            output: float32 ``[rows response]``: log-probs (`Trainer`) or values (`Critic`) under the current weights.
            entropy: float32 ``[rows response]`` of the next-token distribution, with a gradient only if
                `wants_entropy`; None for values.
            weights: float32 ``[rows response]``.
        """
        ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Args:
        temperature: 0 is greedy.
        top_k: keep the `top_k` most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches `top_p`; 1 keeps all.
        stop_token_ids: tokens that end a row, as the tokenizer's ``ends`` do; the stop token is part of the response.
        stop: strings that end a row once its text (special tokens skipped) contains one. The response includes the
            full token that completes the string, so its text may extend past the string.
        ignore_eos: the tokenizer's ``ends`` do not end a row; stop tokens and strings still do.
        min_p: keep the tokens whose probability is at least `min_p` times the largest one; 0 keeps all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens of the context and of the
            response so far; 1 is none.
        presence_penalty: subtracted from the logits of tokens of the response so far.
        frequency_penalty: subtracted from a token's logit once per occurrence in the response so far.
    """

    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the logits of a token depend on the tokens before it by a penalty."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Sampled(NamedTuple):
    """What an engine sampled: right-padded ``[rows response]`` tokens (int64), mask (bool), log-probs (float32), and
    the version of the weights that sampled each token (int64; -1 off the mask)."""

    responses: Tensor
    response_mask: Tensor
    log_probs: Tensor
    versions: Tensor


@dataclass(frozen=True)
class Request:
    """A request for one response of a `StreamingRollout`.

    Args:
        name: identifies the request, and is unique among those in flight. The turns of an episode share one name.
        ids: the context: the prompt, and in later turns also earlier responses and replies.
        sampling: how tokens are sampled, and where the response ends.
        key: the source of this request's random numbers alone: ``key.response(row_id, turn)``.
        retain_cache: keep the KV for a later request of this name or `cache_key`; the engine may evict and recompute.
        cache_key: shared by concurrent requests of an episode, which have several names; by default the name.
    """

    name: str
    ids: Sequence[int]
    sampling: Sampling
    key: Key
    retain_cache: bool = False
    cache_key: str | None = None


class Response(NamedTuple):
    """The response to a `Request`.

    Args:
        log_probs: of each token, under the distribution that it was sampled from.
        versions: of each token, the version of the weights that sampled it; non-decreasing, and constant unless
            weights were updated during the response.
        ended: ``"stop"`` by a rule of its `Sampling` or the tokenizer, ``"length"`` by ``max_new_tokens``.
    """

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    ended: Literal["stop", "length"]


@runtime_checkable
class Scorer(Protocol):
    """A causal LM that scores tokens."""

    def log_probs(self, batch: Sequences) -> Tensor:
        """Log-probs of the response tokens at each row's temperature: float32 ``[batch response]``, 0 off the mask."""
        ...


@runtime_checkable
class HasComputeDtype(Protocol):
    """A scorer or rollout engine that declares its compute dtype; float32 is assumed for others."""

    @property
    def compute_dtype(self) -> dtype:
        """The dtype of its matrix products, such as `torch.bfloat16`."""
        ...


@runtime_checkable
class Trainer(Scorer, Protocol):
    """A scorer whose weights are trained."""

    @property
    def version(self) -> int:
        """The version of the weights: how many `update` calls they have seen."""
        ...

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], objective: Objective[Batch]) -> Metrics:
        """One optimizer step per mini-batch, in order; then increments `version`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights under their Hugging Face names, sorted, tied ones once. A sync rounds them to the
        engine's dtype if it is coarser."""
        ...

    def save_pretrained(self, folder: str) -> None:
        """Write weights, configuration and tokenizer as a Hugging Face folder."""
        ...


@runtime_checkable
class Critic(Protocol):
    """A trained value function over tokens."""

    @property
    def version(self) -> int:
        """The version of the weights: how many `update` calls they have seen."""
        ...

    def values(self, batch: Tokens) -> Tensor:
        """The value before each response token: float32 ``[batch response]``, 0 off the mask."""
        ...

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], objective: Objective[Batch]) -> Metrics:
        """One optimizer step per mini-batch, in order; then increments `version`."""
        ...


@runtime_checkable
class Synced(Protocol):
    """An engine whose weights come from a sync. It must not sample without a receipt, and has one initially only if
    its backend is ``frozen``."""

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last sync, or None."""
        ...

    def sync(self, source: Trainer) -> Receipt:
        """Load the weights of `source`; the receipt has ``source.version``.

        Raises:
            SyncError: the received weights differ from those sent.
        """
        ...


@runtime_checkable
class Rollout(Synced, Protocol):
    """An engine that samples responses, as tokens."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key
    ) -> Sampled:
        """Sample one response per row; row ``i`` draws from ``key.uniforms(row_ids)``, or from a seed derived from it.

        Raises:
            SyncError: the engine has no receipt.
        """
        ...


@runtime_checkable
class StreamingRollout(Protocol):
    """An engine with continuous batching: requests may be submitted between any two steps, and each response is
    available as soon as it ends, so a waiting request never blocks the others.

    An error of `step` ends all requests in flight.
    """

    def submit(self, request: Request) -> None:
        """Queue a request; a later `step` starts it once there is room.

        Raises:
            SyncError: the engine has no receipt, or its weights do not match it.
            DataError: the model cannot process the context, for example because it is too long.
            ParameterError: a request of that name is in flight, or its response was not taken.
            AsleepError: the engine sleeps.
        """
        ...

    def step(self) -> list[str]:
        """Run one engine step (one token of each response), if there is anything to compute.

        Returns:
            the names of the requests whose responses ended.

        Raises:
            SyncError: the engine has no receipt, or its weights do not match it.
            DataError: the model's output is not finite.
            AsleepError: the engine sleeps.
            EngineError: the engine or one of its processes failed.
        """
        ...

    def take(self, name: str) -> Response:
        """Remove and return the response to a request.

        Raises:
            ParameterError: there is none.
            DataError: its log-probs are not finite.
        """
        ...

    def drop(self, name: str) -> None:
        """Cancel a request if it is in flight, and discard its response and KV. Does nothing for an unknown name."""
        ...


@runtime_checkable
class CacheStats(Protocol):
    """An engine that counts context tokens since it was built."""

    @property
    def context_tokens(self) -> int:
        """The context tokens of all responses."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Those whose KV was reused from another request."""
        ...


@runtime_checkable
class LiveWeightUpdate(Synced, Protocol):
    """An engine whose weights may change between two tokens of responses in flight. One thread calls all other
    methods; any thread may call `swap`."""

    def swap(self, source: Trainer, caches: Caches) -> Receipt:
        """Load the weights of `source`, as `sync` does, at the end of the current step.

        Responses in flight continue with the new weights. Later requests reuse no KV computed with older weights,
        neither of earlier turns nor of shared prefixes.

        Args:
            source: the trainer.
            caches: ``"recompute"``: the engine recomputes the KV of the responses in flight before their next token, so
                that one version alone samples each token. ``"reuse"``: they continue from the keys and values of the
                older weights.

        Raises:
            SyncError: the received weights differ from those sent; the responses in flight fail with the same error.
        """
        ...


@runtime_checkable
class Adapted(Protocol):
    """A trainer of an adapter on frozen base weights; an engine with the same base weights needs only the adapter."""

    @property
    def adapter_of(self) -> str:
        """Digest of the base weights, and the scaling of the adapter. Must be equal on both sides of a sync."""
        ...

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's weights under PEFT's names, sorted."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can release its device while others compute on it."""

    def sleep(self) -> None:
        """Release the device; the engine computes nothing until `wake`."""
        ...

    def wake(self) -> None:
        """Reclaim the device."""
        ...


@runtime_checkable
class Closable(Protocol):
    """An engine with resources to release, such as its own processes."""

    def close(self) -> None:
        """Release them. Idempotent."""
        ...


@runtime_checkable
class Checkpointed(Protocol):
    """An engine that saves and restores its state; each rank writes its part.

    Checkpoints (``Training(checkpoint_every=...)``) and places that rebuild roles (``restart="role"``) require it of
    every trained role.
    """

    def save_checkpoint(self, folder: str) -> None:
        """Write the state into a new folder."""
        ...

    def load_checkpoint(self, folder: str) -> None:
        """Restore the state that `save_checkpoint` wrote.

        Raises:
            DataError: it belongs to another model or optimizer, or is damaged.
        """
        ...


class BuildContext(Protocol):
    """What `Backend.build` may use."""

    def engine(self, role: str) -> Any:
        """The engine of another role, built first if needed."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def rank(self) -> int:
        """This process's rank among those that form the engine."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes form the engine. If several, they are the default group of `torch.distributed`, which the
        caller has initialized, unless `Backend.collective` is false."""
        ...
