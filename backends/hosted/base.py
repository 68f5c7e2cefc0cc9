"""What engines by others (vLLM, SGLang) share: they hold weights of their own, a sync fills them, a fault ends them,
and the next sync starts them anew. They are asked for answers one by one.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch

from flowrl.backends.hosted.arrival import IncomingWeights, due_weights
from flowrl.backends.hosted.folder import FolderWeights
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import Ending, RequestEngine
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
    arithmetic,
    questions,
    refuse_old_weights,
    refuse_other_weights,
    resolution,
)
from flowrl.sync.received import ReceivedWeights


class Answer(NamedTuple):
    """One response as an engine gave it.

    Args:
        ids: its tokens.
        log_probs: one a token.
        versions: of the weights that each came from, as the engine says.
        ended: by what, in the engine's words; ``"stop"`` is by a rule that it was given.
        cached: tokens before it that the engine did not compute, since it had them from other requests.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[str]
    ended: str
    cached: int


class PendingRequest(NamedTuple):
    """A request that is under way.

    Args:
        request: as it was submitted.
        ending: where its answer ends.
        settings: how it is sampled, in the engine's words.
        versions: of the weights that the engine has had since it has the request.
    """

    request: Request
    ending: Ending
    settings: Any
    versions: list[int]


class HostedRollout(RequestEngine):
    """A live engine by others; what is abstract differs from one to the other.

    Requests wait here until a `step` has room for them, and begin in the order in which they came. The engine has no
    more of them than it computes at a time, so that a probe never waits behind others. An error while the engine
    generates or takes over weights leaves it in no known state, so it is ended with all requests, and the next sync
    starts it anew.

    Args:
        spec: what to start.
        tokenizer: of its folder.
        seed: handed to the engine.
    """

    def __init__(self, spec: EngineSpec, tokenizer: ChatTokenizer, seed: int) -> None:
        super().__init__(tokenizer)
        self._spec: EngineSpec = spec
        self._seed = seed
        self._probe: Probe | None = None
        self._arithmetic: torch.dtype | None = None
        self._scores: Scores | None = None  # of the probe, when the engine's last changed
        self._asleep = False
        self._waiting: dict[str, PendingRequest] = {}
        self._begun: dict[str, PendingRequest] = {}  # which the engine has
        self._responses: dict[str, Response] = {}
        self.context_tokens = 0
        """Tokens before all answers so far."""
        self.cached_tokens = 0
        """As many of these the engine had already, from other requests, and did not compute."""
        self._adapter_of: str | None = None
        if spec.lora is not None:
            require_peft()
            self._adapter_of = spec.lora.over(weights_digest(named_weights(load_causal_lm(spec.model))))
        with loading(spec.model):
            self._due = due_weights(spec.model, spec.lora)

    @property
    def probe(self) -> Probe:
        """What the engine and the trainer score after a sync: questions, and how the engine answered them with the
        weights of its folder."""
        assert self._probe is not None
        return self._probe

    @property
    def arithmetic(self) -> torch.dtype:
        """What the engine computes in, as it said when it started first."""
        assert self._arithmetic is not None
        return self._arithmetic

    def _start_first(self) -> None:
        """Start it, and let it answer the questions of the probe; `_start` is for all further times.

        Raises:
            BindError: it does not start, or answers nothing.
            SyncError: it is frozen, and does not compute as transformers does with the same folder.
        """
        self._start()
        with self._at_stake():
            self._arithmetic = self._dtype()
            prompts, sampling = questions(self.tokenizer, self._limits()[1] or 2048)
            try:
                answers = self._answers(prompts, sampling)
            except Exception as error:
                raise BindError(
                    f"{self.name} starts with {self._spec.model!r} and then answers no question "
                    f"({type(error).__name__}: {error}); expected an architecture and sizes that it can compute with "
                    f"here."
                ) from error
            width = min(len(answer.ids) for answer in answers)
            self._probe = Probe(prompts, [list(answer.ids)[:width] for answer in answers])
        if self._spec.frozen:
            self.sync(cast(Trainer, FolderWeights(self._spec.model)))

    def _answers(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        """As the engine gives them, without a receipt."""
        settings = self._settings(sampling, Ending(self.tokenizer, sampling))
        answers: dict[str, Answer] = {}
        for i, prompt in enumerate(prompts):
            self._begin(str(i), prompt, settings, i)
        while len(answers) < len(prompts):
            answers |= self._advance()
        return [answers[str(i)] for i in range(len(prompts))]

    def _drop(self, name: str) -> None:
        """Stop a request, and drop its response."""
        self._responses.pop(name, None)
        self._waiting.pop(name, None)
        if self._begun.pop(name, None) is not None:
            with self._at_stake():
                self._abort(name)

    def _asked(self, name: str) -> bool:
        return name in self._waiting or name in self._begun or name in self._responses

    def _submit(self, request: Request) -> None:
        """Its answer has a seed of its own, from ``request.key``.

        Raises:
            DataError: a `sampling` that the engine cannot do.
        """
        ending = Ending(self.tokenizer, request.sampling)
        self._waiting[request.name] = PendingRequest(request, ending, self._settings(request.sampling, ending), [])

    def _step(self, version: int) -> list[str]:
        """As `RequestEngine`, for as long as the engine computes at a time.

        Raises:
            SyncError: the engine says that tokens came from weights of another version.
            EngineError: it failed, or ended an answer by no rule.
        """
        with self._at_stake():
            for name in [*self._waiting][: self._spec.max_num_seqs - len(self._begun)]:
                asked = self._begun[name] = self._waiting.pop(name)
                asked.versions[:] = [version]
                self._begin(name, asked.request.ids, asked.settings, asked.request.key.bits & (2**63 - 1))
            answers = self._advance() if self._begun else {}
            for name, answer in answers.items():
                asked = self._begun.pop(name)
                self._responses[name] = self._checked(answer, asked)
                self.context_tokens += len(asked.request.ids)
                self.cached_tokens += answer.cached
        return [*answers]

    def _take(self, name: str) -> Response | None:
        return self._responses.pop(name, None)

    def _checked(self, answer: Answer, asked: PendingRequest) -> Response:
        """The tokens of an answer, their log-probs and versions, up to where it ends."""
        if foreign := set(answer.versions) - {*map(str, asked.versions)}:
            raise SyncError(
                f"{self.name} says that it sampled from weights of version {', '.join(sorted(foreign))}, and while it "
                f"did, this engine's receipt was for version {', '.join(map(str, asked.versions))}; expected no other: "
                f"let nobody but engine.sync and engine.swap update its weights."
            )
        longest = asked.request.sampling.max_new_tokens
        length = asked.ending.length(answer.ids)
        by_rule = length is not None or answer.ended == "stop"
        if not by_rule and len(answer.ids) < longest:
            raise EngineError(
                f"{self.name} ended a response after {len(answer.ids)} tokens ({answer.ended}); expected EOS, a stop "
                f"token, a stop string or max_new_tokens={longest}. Call engine.sync(trainer), which starts it "
                f"anew, and give its KV cache more room (memory_fraction, or the size of the cache)."
            )
        ids, log_probs = [*answer.ids[:length]], [*answer.log_probs[:length]]
        versions = [int(version) for version in answer.versions[:length]]
        return Response(ids, log_probs, versions, "stop" if by_rule else "length")

    def _sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`, forget what was computed with the old ones, and probe the result.

        Requests that wait for a `step` go on to do so.

        Digest and bytes of the receipt are those of the tensors as they came, before the engine casts and packs them;
        with `lora` they are those of the adapter.

        Raises:
            SyncError: requests are under way, which go on; weights are missing, unknown or of another shape; `source`
                has no adapter over the same weights as this engine, which takes that alone; the engine failed to load
                them; or the probe finds other log-probs than the trainer's, or those of older weights. But for the
                first, there is no receipt then.
            BindError: the engine had been ended by an error before, and does not start again.
            AsleepError: the engine sleeps.
            EngineError: a process of the engine died, or answered with an error.
        """
        self._require_awake("sync")
        self._refuse_sync([*self._begun])
        self._receipt = None
        return self._receive(source, None)

    def _swap(self, source: Trainer, caches: Caches) -> Receipt:
        """As `_sync`, between two tokens of the requests that are under way. Those that have none yet begin again: of
        their contexts, too, the engine may have computed a part with older weights."""
        with self._at_stake():
            self._require_awake("swap")
            self._spec.refuse_swap(caches)
            return self._receive(source, caches if self._begun else None)

    def _receive(self, source: Trainer, caches: Caches | None) -> Receipt:
        """`_sync`, or with `caches`, `_swap`."""
        start = time.perf_counter()
        if not self._lives:
            self._start()
        arrival = IncomingWeights(source, self._adapter_of, self._due, self.arithmetic, self._spec.model)
        # Weights from another process come with the trainer's scores of the probe of the first of these engines.
        probe = source.probe if isinstance(source, ReceivedWeights) and source.probe else self.probe
        with self._at_stake():
            try:
                self._begin_again(self._halt(caches))
                transport = self._take_over(arrival, caches)
                log_probs = self._score(probe)
            except (SyncError, EngineError):
                raise
            except Exception as error:
                if death := self._death():
                    raise EngineError(
                        f"{death} while {self.name} took over the weights of version {source.version} "
                        f"({type(error).__name__}: {error}); expected all of its processes to live, and memory for "
                        f"their work. The engine is ended; the next engine.sync(trainer) starts it anew."
                    ) from error
                raise SyncError(
                    f"{self.name} failed with the weights of version {source.version} ({type(error).__name__}: "
                    f"{error}); expected weights and an architecture that it can compute with here. The engine is "
                    f"ended; the next engine.sync(trainer) starts it anew."
                ) from error
            scores = refuse_other_weights(self.name, log_probs, self.arithmetic, probe, source, self._spec.tolerance)
            shown = resolution(self.arithmetic, arithmetic(source), self._spec.tolerance)
            scores = scores._replace(concurrent=caches is not None)
            self._scores = refuse_old_weights(self.name, scores, self._scores, shown)
        for asked in self._begun.values():
            asked.versions.append(source.version)
        seconds = time.perf_counter() - start
        self._receipt = Receipt(source.version, arrival.digest, arrival.nbytes, seconds, transport)
        return self._receipt

    def _begin_again(self, names: Iterable[str]) -> None:
        """Let the engine forget requests, which wait again for a step."""
        again = {name: self._begun.pop(name) for name in names}
        for name in again:
            self._abort(name)
        self._waiting = again | self._waiting

    def sleep(self) -> None:
        """Give the device's memory back; twice is as good as once. Requests that are under way wait, and are computed
        anew once the engine is awake."""
        if not self._asleep and self._lives:
            with self._at_stake():
                self._begin_again([*self._begun])
                self._release()
        self._asleep = True

    def wake(self) -> None:
        """Take the memory back; twice is as good as once."""
        if self._asleep and self._lives:
            with self._at_stake():
                self._resume()
        self._asleep = False

    def close(self) -> None:
        """End the engine with all its processes, and all requests; twice is as good as once."""
        self._receipt = None
        self._waiting.clear()
        self._begun.clear()
        if self._lives:
            self._stop()

    def _require_awake(self, what: str) -> None:
        if self._asleep:
            raise AsleepError(
                f"{what} was called while {self.name} sleeps, its memory given back; expected an engine that is awake: "
                f"call engine.wake() first."
            )

    def _at_stake(self) -> AbstractContextManager[None]:
        """Whatever is raised within leaves requests or half of some weights in the engine, so it is ended."""
        return ending_on_error(self.close)

    @property
    @abstractmethod
    def _lives(self) -> bool:
        """Whether it was started, and not ended since."""

    @abstractmethod
    def _start(self) -> None:
        """Start it; raises `BindError`."""

    @abstractmethod
    def _stop(self) -> None:
        """End it, with all its processes."""

    @abstractmethod
    def _settings(self, sampling: Sampling, ending: Ending) -> Any:
        """`sampling` in the engine's words; raises `DataError`."""

    @abstractmethod
    def _begin(self, name: str, ids: Sequence[int], settings: Any, seed: int) -> None:
        """Let the engine begin an answer; none of that name is under way. Nothing need be computed before `_advance`.

        Args:
            name: as `_advance` and `_abort` call it.
            ids: all tokens before the answer.
            settings: what `_settings` gave. It is of this request alone: others beside it have others.
            seed: of what the answer draws, from 0 to 2^63 - 1; wherever the engine can, of nothing else.

        Raises:
            EngineError: the engine failed, and will be ended.
        """

    @abstractmethod
    def _advance(self) -> dict[str, Answer]:
        """Compute on, for as long as is one turn for the engine: a token of each answer, where it says when that is.
        It is called only while there are answers under way, and goes on with all of them together.

        Returns:
            the answers that ended since, by name; each once, and none that was aborted. It may be none, and then waits
            for the next call; it must not come back at once, time and again, with nothing done.

        Raises:
            EngineError: the engine failed, and will be ended.
        """

    @abstractmethod
    def _abort(self, name: str) -> None:
        """Let the engine forget an answer that is under way, at once as far as `_begin` and `_advance` can tell: its
        name may begin again. What was computed may stay in its cache.

        Raises:
            EngineError: the engine failed, and will be ended.
        """

    @abstractmethod
    def _halt(self, caches: Caches | None) -> Sequence[str]:
        """Let no token be drawn before `_take_over` is done, and none be under way.

        Args:
            caches: what is to become of what was computed of answers that are under way; None where none is.

        Returns:
            with ``"reuse"``, the answers under way of which no token was drawn; some more do no harm.
        """

    @abstractmethod
    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        """Take weights over under their version; the transport. Answers that begin afterwards go on from nothing that
        was computed with others, and with ``"recompute"``, neither do those that are under way.

        Args:
            arrival: the weights.
            caches: as `_halt`.
        """

    @abstractmethod
    def _score(self, probe: Probe) -> list[float]:
        """Log-probs of a probe's answers at temperature 1, row by row. Answers that are under way may go on meanwhile;
        those that end are told by the next `_advance`."""

    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """What it computes in, now that it has started."""

    def _death(self) -> str | None:
        """After an error, the process of the engine's that has died, and how; None if none has, or it says so."""
        return None

    @abstractmethod
    def _release(self) -> None:
        """Give the device's memory back."""

    @abstractmethod
    def _resume(self) -> None:
        """Take it again."""


@contextmanager
def ending_on_error(end: Callable[[], object]) -> Iterator[None]:
    """Whatever is raised within, `end` is called; should that fail too, its error is a note of the first one."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as another:
            error.add_note(f"Ending it failed too ({type(another).__name__}: {another}).")
        raise
