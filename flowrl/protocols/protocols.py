"""What a live engine must do: the Protocols through which operators and executors reach weights.

Operators know engines only by these Protocols, so that one engine can stand in for another. What makes an engine is a
`flowrl.protocols.backend.Backend`, which lists the Protocols that its engine has.
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
"""What becomes of what was computed with older weights, of answers that are under way as weights change: it is kept, or
computed anew."""

Batch = TypeVar("Batch", bound=NamedTuple)
Batch_contra = TypeVar("Batch_contra", bound=NamedTuple, contravariant=True)


class WholeMiniBatch(NamedTuple):
    """A whole mini-batch, for an objective that has to see it at once.

    Args:
        batch: the columns that the objective reads, all rows of the mini-batch.
        weights: float32 ``[rows response]``, of all of them.
        own: int64 ``[rows of this rank]``, where its rows stand among them.
    """

    batch: Any
    weights: Tensor
    own: Tensor


class MiniBatch(NamedTuple):
    """The rows of one optimiser step, and the weight of each of their tokens in the objective.

    Args:
        rows: int64 ``[rows]``, indices into the batch; of several ranks each has those of its own part.
        weights: float32 ``[rows response]``, taken over the whole mini-batch; its objective is
            ``(weights * per_token_loss).sum()``, so neither micro-batches nor ranks change it: every one sums its own
            rows.
        whole: given where the objective is no such sum, because it compares rows: it is then called once, on all rows
            of the mini-batch.
    """

    rows: Tensor
    weights: Tensor
    whole: WholeMiniBatch | None = None


class OfDistribution(NamedTuple):
    """What an objective takes of each token's distribution over the vocabulary, while that exists.

    Args:
        columns: by name, what it reads beside.
        loss: given log-probs ``[tokens vocabulary]``, and by name the columns at these tokens and the values as they
            are, float ``[tokens]``.
    """

    columns: tuple[str, ...]
    loss: Callable[..., Tensor]


class Objective(Protocol[Batch_contra]):
    """What an update minimises, given what the model says now: log-probs with their entropy, or values."""

    @property
    def wants_entropy(self) -> bool: ...

    @property
    def of_distribution(self) -> OfDistribution | None:
        """What is handed in, of a policy, in the place of log-probs; None wants these."""
        ...

    def __call__(
        self, output: Tensor, entropy: Tensor | None, batch: Batch_contra, weights: Tensor, metrics: Metrics
    ) -> Tensor:
        """The scalar objective over some rows of a mini-batch.

        Args:
            output: float32 ``[rows response]``: log-probs (`Trainer`) or values (`Critic`) under the weights as they
                are.
            entropy: float32 ``[rows response]`` of the next-token distribution, with a gradient only where
                `wants_entropy`; None for values.
            batch: the columns of these rows.
            weights: float32 ``[rows response]``.
            metrics: where it reports its numbers; parts of a mini-batch merge.
        """
        ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: 0 is greedy.
        top_k: keep the `top_k` most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches `top_p`; 1 keeps all.
        max_new_tokens: at most so many tokens a row.
        stop_token_ids: tokens that end a row, besides the tokeniser's `ends`; the stop token is part of the response.
        stop: strings that end a row, once its text (special tokens skipped) contains one. The response ends with the
            token that completes the string: all of that token is part of it, and so the text may go on past the string.
        ignore_eos: the tokeniser's `ends` do not end a row; stop tokens and strings still do.
    """

    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Sampled(NamedTuple):
    """What an engine sampled: right-padded ``[rows response]`` tokens (int64), mask (bool), log-probs (float32), and
    the version of the weights that sampled each token (int64; -1 off the mask)."""

    responses: Tensor
    response_mask: Tensor
    log_probs: Tensor
    versions: Tensor


@dataclass(frozen=True)
class Request:
    """One answer that is asked for: what `StreamingRollout` take.

    Args:
        name: by which it is taken. No two that are under way share one; an episode gives its own to each of its turns.
        ids: all that stands before the answer: the prompt, and in later turns what was sampled and what came between.
        sampling: how tokens are drawn, and where the answer ends.
        key: where its random numbers come from, and nothing else's: ``key.answer(row_id, turn)``.
        retain_cache: keep the KV of this request and its response, since a later request of this name may continue
            from them. A hint: the engine may evict it and recompute.
    """

    name: str
    ids: Sequence[int]
    sampling: Sampling
    key: Key
    retain_cache: bool = False


class Response(NamedTuple):
    """The answer to a `Request`.

    Args:
        ids: its tokens, at least one.
        log_probs: one a token, of the distribution that it was drawn from.
        versions: one a token, of the weights that sampled it; they never fall, and differ only where weights were
            swapped under the answer.
        ended: ``"stop"`` by a rule of its `Sampling` or the tokeniser, ``"length"`` by ``max_new_tokens``.
    """

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    ended: Literal["stop", "length"]


@runtime_checkable
class Scorer(Protocol):
    """Weights of a causal LM that can score tokens."""

    def log_probs(self, batch: Sequences) -> Tensor:
        """Log-probs of the response tokens at each row's temperature: float32 ``[batch response]``, 0 off the mask."""
        ...


@runtime_checkable
class HasComputeDtype(Protocol):
    """A scorer, or an engine that generates, which says what it computes in; of others float32 is expected."""

    @property
    def arithmetic(self) -> dtype:
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
        """One optimiser step per mini-batch, in order; then `version` grows by one."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they are trained, under their Hugging Face names, sorted, tied ones once; a sync rounds them
        where the engine is coarser."""
        ...

    def save_pretrained(self, folder: str) -> None:
        """Write weights, configuration and tokeniser as a Hugging Face folder."""
        ...


@runtime_checkable
class Critic(Protocol):
    """Weights of a value function over tokens."""

    @property
    def version(self) -> int:
        """The version of the weights: how many `update` calls they have seen."""
        ...

    def values(self, batch: Tokens) -> Tensor:
        """The value before each response token: float32 ``[batch response]``, 0 off the mask."""
        ...

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], objective: Objective[Batch]) -> Metrics:
        """One optimiser step per mini-batch, in order; then `version` grows by one."""
        ...


@runtime_checkable
class Synced(Protocol):
    """An engine that samples from weights which a sync carries to it. It must not sample without a receipt, and starts
    with one only where its backend says that it is `frozen`."""

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last sync, or None."""
        ...

    def sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`; the receipt carries `source.version`.

        Raises:
            SyncError: what was received is not what was sent.
        """
        ...


@runtime_checkable
class Rollout(Synced, Protocol):
    """One that samples responses, as tokens."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key
    ) -> Sampled:
        """Sample one response per row; row ``i`` draws from ``key.uniforms(row_ids)``, or from a seed out of it.

        Raises:
            SyncError: the engine holds no receipt.
        """
        ...


@runtime_checkable
class StreamingRollout(Protocol):
    """An engine that is asked for answers one by one. They are computed together; new ones may come between any two
    steps, and each leaves when it ends, so that who waits for something else holds nobody up.

    An error of `step` ends all requests that are under way.
    """

    def submit(self, request: Request) -> None:
        """Ask for an answer; it is begun by a later `step`, once there is room and it is worth the engine's while.

        Raises:
            SyncError: the engine holds no receipt, or its weights are not those of its receipt.
            DataError: a context that the model cannot take.
            ParameterError: a request of that name is under way, or its response was not taken.
            AsleepError: the engine sleeps.
        """
        ...

    def step(self) -> list[str]:
        """Compute for as long as the engine does at a time (one token of each answer), if there is anything to compute.

        Returns:
            the names of the requests whose responses are there since.

        Raises:
            SyncError: the engine holds no receipt, or its weights are not those of its receipt.
            DataError: what the model gives is not finite.
            AsleepError: the engine sleeps.
            EngineError: the engine or one of its processes failed.
        """
        ...

    def take(self, name: str) -> Response:
        """The response to a request, once.

        Raises:
            ParameterError: it is not there.
            DataError: its log-probs are not finite.
        """
        ...

    def drop(self, name: str) -> None:
        """Stop a request where it is under way, drop its response, and forget what was kept of it; nothing where there
        is none of these."""
        ...


@runtime_checkable
class CacheStats(Protocol):
    """An engine that counts the tokens before its answers, from when it was built."""

    @property
    def context_tokens(self) -> int:
        """All of them, answer by answer."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Those that it did not compute for that answer, since it had them from another."""
        ...


@runtime_checkable
class LiveWeightUpdate(Synced, Protocol):
    """An engine whose weights may change under answers that are under way, between two tokens. All but `swap` is called
    by one thread, and `swap` by any."""

    def swap(self, source: Trainer, caches: Caches) -> Receipt:
        """Take over the weights of `source`, as `sync` does, as soon as the step that is being computed is done.

        Answers that are under way go on with the new weights. Those that begin afterwards go on from nothing that was
        computed with older ones: neither from what was kept of earlier turns, nor from beginnings in common.

        Args:
            source: the trainer.
            caches: ``"recompute"``: the engine recomputes the KV of the responses in flight before their next token, so
                that one version alone samples each token. ``"reuse"``: they continue from the keys and values of the
                older weights.

        Raises:
            SyncError: what was received is not what was sent; then the answers that are under way fail with it.
        """
        ...


@runtime_checkable
class Adapted(Protocol):
    """A trainer that trains an adapter beside weights that stay; an engine that holds these needs the adapter alone."""

    @property
    def adapter_of(self) -> str:
        """What the adapter is added to, and how: the digest of the weights that stay, and the scaling. It must be equal
        on both sides of a sync."""
        ...

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's weights under the names that PEFT writes, sorted."""
        ...


@runtime_checkable
class RemoteWeights(Protocol):
    """What stands in for a trainer where its weights come from another process."""

    @property
    def transport(self) -> str:
        """The way by which they come."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its device to others between its turns."""

    def sleep(self) -> None:
        """Release the device; the engine computes nothing until `wake`."""
        ...

    def wake(self) -> None:
        """Take the device back."""
        ...


@runtime_checkable
class Closable(Protocol):
    """An engine that has something to end, such as processes of its own."""

    def close(self) -> None:
        """End it; twice is as good as once."""
        ...


@runtime_checkable
class Checkpointed(Protocol):
    """An engine that writes what it needs to go on, and goes on from it; of several ranks, each writes its part.

    Checkpoints (``Training(checkpoint_every=...)``) and places that rebuild roles (``restart="role"``) ask it of every
    trained role.
    """

    def save_checkpoint(self, folder: str) -> None:
        """Write into a new folder."""
        ...

    def load_checkpoint(self, folder: str) -> None:
        """Go on from what was written.

        Raises:
            DataError: it is of another model or optimiser, or damaged.
        """
        ...


class BuildContext(Protocol):
    """What a backend may ask for while it is built."""

    def engine(self, role: str) -> Any:
        """The live engine of another role (built first)."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def rank(self) -> int:
        """Which of the processes that build this engine together this one is."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes build this engine together; if several, they are the default group of
        `torch.distributed`, which the caller has initialised, unless `Backend.collective` is false."""
        ...
