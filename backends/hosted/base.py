"""Base of the engines that run external libraries (vLLM, SGLang): a sync loads their weights, a fault stops them, and
the next sync restarts them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch

from flowrl.backends.hosted.arrival import IncomingWeights, expected_weights
from flowrl.backends.hosted.folder import FolderWeights
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import RequestEngine, StopRule
from flowrl.backends.torch.load import load_causal_lm, loading
from flowrl.backends.torch.lora import require_peft
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import AsleepError, BindError, EngineError, SyncError
from flowrl.protocols.protocols import Caches, Request, Response, Sampling, Trainer
from flowrl.records import Receipt
from flowrl.sync.digest import named_weights, weights_digest
from flowrl.sync.probe import (
    Probe,
    Scores,
    compute_dtype,
    questions,
    refuse_old_weights,
    refuse_other_weights,
    resolution,
)
from flowrl.sync.received import ReceivedWeights


class RawResponse(NamedTuple):
    """A response as an engine returned it.

    Args:
        log_probs: one per token.
        versions: the version of the weights that each token was sampled from.
        ended: the engine's reason; ``"stop"`` is a rule of the request.
        cached: prompt tokens that the engine had cached.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[str]
    ended: str
    cached: int


class PendingRequest(NamedTuple):
    """A request in flight; `versions` are those of the engine's weights since it began."""

    request: Request
    ending: StopRule
    settings: Any
    versions: list[int]


class HostedRollout(RequestEngine):
    """A live engine of an external library.

    Requests wait in a queue until a `step` has room for them, so a probe never waits for the engine's own queue. An
    error in generation or a weight update stops the engine with all requests; the next sync restarts it.
    """

    def __init__(self, spec: EngineSpec, tokenizer: ChatTokenizer, seed: int) -> None:
        super().__init__(tokenizer)
        self._spec: EngineSpec = spec
        self._seed = seed
        self._probe: Probe | None = None
        self._arithmetic: torch.dtype | None = None
        self._scores: Scores | None = None  # of the probe, when the engine's scores last changed
        self._asleep = False
        self._waiting: dict[str, PendingRequest] = {}
        self._begun: dict[str, PendingRequest] = {}  # in the engine
        self._responses: dict[str, Response] = {}
        self.context_tokens = 0
        """Prompt tokens of all responses so far."""
        self.cached_tokens = 0
        """How many of these the engine had cached."""
        self._adapter_of: str | None = None
        if spec.lora is not None:
            require_peft()
            self._adapter_of = spec.lora.over(weights_digest(named_weights(load_causal_lm(spec.model))))
        with loading(spec.model):
            self._due = expected_weights(spec.model, spec.lora)

    @property
    def probe(self) -> Probe:
        """The tokens that engine and trainer score after a sync: prompts, and the engine's responses with the weights
        of its folder."""
        assert self._probe is not None
        return self._probe

    @property
    def compute_dtype(self) -> torch.dtype:
        """The engine's compute dtype, as it reported at its first start."""
        assert self._arithmetic is not None
        return self._arithmetic

    def _start_first(self) -> None:
        """Start the engine and let it respond to the prompts of the probe; `_start` is for later starts. Raises
        `BindError` if it does not, and `SyncError` if it is frozen and does not compute its folder as transformers."""
        self._start()
        with self._stopping_on_error():
            self._arithmetic = self._dtype()
            prompts, sampling = questions(self.tokenizer, self._limits()[1] or 2048)
            try:
                responses = self._respond(prompts, sampling)
            except Exception as error:
                raise BindError(
                    f"{self.name} starts with {self._spec.model!r}, but cannot generate ({type(error).__name__}: "
                    f"{getattr(error, 'message', error)}). Bind a model whose architecture and sizes it can compute on "
                    f"this machine.",
                    code="engine.does-not-start",
                    engine=self.name,
                    path=self._spec.model,
                    error=type(error).__name__,
                ) from error
            width = min(len(response.ids) for response in responses)
            self._probe = Probe(prompts, [list(response.ids)[:width] for response in responses])
        if self._spec.frozen:
            self.sync(cast(Trainer, FolderWeights(self._spec.model)))

    def _respond(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[RawResponse]:
        """Generate without a receipt."""
        settings = self._settings(sampling, StopRule(self.tokenizer, sampling))
        responses: dict[str, RawResponse] = {}
        for i, prompt in enumerate(prompts):
            self._begin(str(i), prompt, settings, i)
        while len(responses) < len(prompts):
            responses |= self._advance()
        return [responses[str(i)] for i in range(len(prompts))]

    def _drop(self, name: str) -> None:
        self._responses.pop(name, None)
        self._waiting.pop(name, None)
        if self._begun.pop(name, None) is not None:
            with self._stopping_on_error():
                self._abort(name)

    def _knows(self, name: str) -> bool:
        return name in self._waiting or name in self._begun or name in self._responses

    def _submit(self, request: Request) -> None:
        """Queue a request, whose seed is from ``request.key``; raises `DataError` if the engine cannot sample so."""
        ending = StopRule(self.tokenizer, request.sampling)
        self._waiting[request.name] = PendingRequest(request, ending, self._settings(request.sampling, ending), [])

    def _step(self, version: int) -> list[str]:
        """As `RequestEngine`, for one turn of the engine. Raises `SyncError` if the engine reports tokens of another
        version, and `EngineError` if it failed or ended a response without a rule."""
        with self._stopping_on_error():
            for name in [*self._waiting][: self._spec.max_num_seqs - len(self._begun)]:
                pending = self._begun[name] = self._waiting.pop(name)
                pending.versions[:] = [version]
                self._begin(name, pending.request.ids, pending.settings, pending.request.key.bits & (2**63 - 1))
            responses = self._advance() if self._begun else {}
            for name, response in responses.items():
                pending = self._begun.pop(name)
                self._responses[name] = self._checked(response, pending)
                self.context_tokens += len(pending.request.ids)
                self.cached_tokens += response.cached
        return [*responses]

    def _take(self, name: str) -> Response | None:
        return self._responses.pop(name, None)

    def _checked(self, response: RawResponse, pending: PendingRequest) -> Response:
        """The tokens of a response, their log-probs and versions, up to its end."""
        if unexpected := sorted(set(response.versions) - {*map(str, pending.versions)}):
            raise SyncError(
                f"{self.name} reports that it sampled from weights of version {', '.join(unexpected)}, but its receipt "
                f"was for version {', '.join(map(str, pending.versions))}. Update its weights only with engine.sync "
                f"and engine.swap.",
                code="engine.version-mismatch",
                engine=self.name,
                found=unexpected,
                expected=pending.versions,
            )
        longest = pending.request.sampling.max_new_tokens
        length = pending.ending.length(response.ids)
        by_rule = length is not None or response.ended == "stop"
        if not by_rule and len(response.ids) < longest:
            raise EngineError(
                f"{self.name} ended a response after {len(response.ids)} tokens ({response.ended}) without EOS, a stop "
                f"token or a stop string; max_new_tokens is {longest}. Call engine.sync(trainer), which restarts it, "
                f"and make its KV cache larger (memory_fraction, or the size of the cache).",
                code="engine.truncated-response",
                engine=self.name,
                found=len(response.ids),
                expected=longest,
                reason=response.ended,
            )
        ids, log_probs = [*response.ids[:length]], [*response.log_probs[:length]]
        versions = [int(version) for version in response.versions[:length]]
        return Response(ids, log_probs, versions, "stop" if by_rule else "length")

    def _sync(self, source: Trainer) -> Receipt:
        """Load the weights of `source`, drop all caches, and probe the result. Queued requests remain.

        Digest and bytes of the receipt are those of the tensors as sent, before the engine casts and packs them; with
        `lora` those of the adapter. Raises `BindError` if the engine was stopped and does not start again. After any
        error other than requests in flight, there is no receipt.
        """
        self._require_awake("sync")
        self._refuse_sync([*self._begun])
        self._receipt = None
        return self._receive(source, None)

    def _swap(self, source: Trainer, caches: Caches) -> Receipt:
        """As `_sync`, between two tokens of the requests in flight. Those without a token begin again, since the engine
        may have prefilled a part of their contexts with older weights."""
        with self._stopping_on_error():
            self._require_awake("swap")
            self._spec.refuse_swap(caches)
            return self._receive(source, caches if self._begun else None)

    def _receive(self, source: Trainer, caches: Caches | None) -> Receipt:
        """`_sync`, or with `caches`, `_swap`."""
        start = time.perf_counter()
        if not self._lives:
            self._start()
        arrival = IncomingWeights(source, self._adapter_of, self._due, self.compute_dtype, self._spec.model)
        # Weights from another process arrive with the trainer's scores of the first replica's probe.
        probe = source.probe if isinstance(source, ReceivedWeights) and source.probe else self.probe
        with self._stopping_on_error():
            try:
                self._begin_again(self._halt(caches))
                transport = self._take_over(arrival, caches)
                log_probs = self._score(probe)
            except (SyncError, EngineError):
                raise
            except Exception as error:
                if death := self._death():
                    raise EngineError(
                        f"{death} while {self.name} loaded the weights of version {source.version} "
                        f"({type(error).__name__}: {error}). Check the memory of its processes; the engine was "
                        f"stopped, and the next engine.sync(trainer) restarts it.",
                        code="engine.process-died",
                        engine=self.name,
                        how=death,
                        when="during sync",
                    ) from error
                raise SyncError(
                    f"{self.name} failed to load the weights of version {source.version} ({type(error).__name__}: "
                    f"{error}). Check that it supports the architecture, and its memory; the engine was stopped, and "
                    f"the next engine.sync(trainer) restarts it.",
                    code="engine.sync-failed",
                    engine=self.name,
                    version=source.version,
                    error=type(error).__name__,
                ) from error
            scores = refuse_other_weights(self.name, log_probs, self.compute_dtype, probe, source, self._spec.tolerance)
            shown = resolution(self.compute_dtype, compute_dtype(source), self._spec.tolerance)
            scores = scores._replace(concurrent=caches is not None)
            self._scores = refuse_old_weights(self.name, scores, self._scores, shown)
        for pending in self._begun.values():
            pending.versions.append(source.version)
        seconds = time.perf_counter() - start
        self._receipt = Receipt(source.version, arrival.digest, arrival.nbytes, seconds, transport)
        return self._receipt

    def _begin_again(self, names: Iterable[str]) -> None:
        """Abort requests in the engine and queue them again."""
        again = {name: self._begun.pop(name) for name in names}
        for name in again:
            self._abort(name)
        self._waiting = again | self._waiting

    def sleep(self) -> None:
        """Release the device's memory; idempotent. Requests in flight are queued again, and recomputed after `wake`."""
        if not self._asleep and self._lives:
            with self._stopping_on_error():
                self._begin_again([*self._begun])
                self._release()
        self._asleep = True

    def wake(self) -> None:
        """Take the memory again; idempotent."""
        if self._asleep and self._lives:
            with self._stopping_on_error():
                self._resume()
        self._asleep = False

    def close(self) -> None:
        """Stop the engine with all its processes and requests; idempotent."""
        self._receipt = None
        self._waiting.clear()
        self._begun.clear()
        if self._lives:
            self._stop()

    def _require_awake(self, what: str) -> None:
        if self._asleep:
            raise AsleepError(
                f"{what} was called while {self.name} sleeps, with its memory released. Call engine.wake() first.",
                code="engine.asleep",
                engine=self.name,
                call=what,
            )

    def _stopping_on_error(self) -> AbstractContextManager[None]:
        """Stop the engine on any error in the block, which may leave requests or partial weights in it."""
        return ending_on_error(self.close)

    @property
    @abstractmethod
    def _lives(self) -> bool:
        """Whether it is running."""

    @abstractmethod
    def _start(self) -> None:
        """Start it; raises `BindError`."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop it, with all its processes."""

    @abstractmethod
    def _settings(self, sampling: Sampling, ending: StopRule) -> Any:
        """`sampling` in the engine's format; raises `DataError`."""

    @abstractmethod
    def _begin(self, name: str, ids: Sequence[int], settings: Any, seed: int) -> None:
        """Start a response; none of that name is in flight. The engine may compute nothing before `_advance`.

        `settings` are from `_settings`, for this request only; `seed` is from 0 to 2^63 - 1.
        """

    @abstractmethod
    def _advance(self) -> dict[str, RawResponse]:
        """Compute one turn of the engine, such as a token of each response. Called only with requests in flight.

        The result has the ended responses by name: each once, none that was aborted. It may be empty, but must not be
        empty again and again without progress.
        """

    @abstractmethod
    def _abort(self, name: str) -> None:
        """Abort a response in flight: its name may begin again at once. Its cache may remain."""

    @abstractmethod
    def _halt(self, caches: Caches | None) -> Sequence[str]:
        """Stop sampling until `_take_over` is done.

        `caches` is None if no responses are in flight; with ``"reuse"``, returns at least those without a token.
        """

    @abstractmethod
    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        """Load weights under their version; returns the transport. Later responses reuse no older cache, and with
        ``"recompute"`` neither do those in flight."""

    @abstractmethod
    def _score(self, probe: Probe) -> list[float]:
        """Log-probs of a probe's responses at temperature 1, row by row. Responses in flight may continue meanwhile;
        the next `_advance` returns those that end."""

    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """The compute dtype of the started engine."""

    def _death(self) -> str | None:
        """After an error, which process of the engine died, and how; None if none did, or if the error names it."""
        return None

    @abstractmethod
    def _release(self) -> None:
        """Release the device's memory."""

    @abstractmethod
    def _resume(self) -> None:
        """Take the memory again."""


@contextmanager
def ending_on_error(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` on any error in the block; if that fails too, its error becomes a note of the first one."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as another:
            error.add_note(f"Ending it failed too ({type(another).__name__}: {another}).")
        raise
