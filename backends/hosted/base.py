"""What engines by others (vLLM, SGLang) share: they hold weights of their own, a sync fills them, a fault ends them,
and the next sync starts them anew.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor

from flowrl.backends.hosted.arrival import Arrival, due_weights
from flowrl.backends.hosted.folder import FolderWeights
from flowrl.backends.rollout import Ending, RolloutEngine, packed
from flowrl.backends.torch.load import Folder, FolderBackend, load_causal_lm, loading
from flowrl.backends.torch.lora import LoRA, require_peft
from flowrl.core.protocols import Closable, Rollout, Sampled, Sampling, Sleeper, Trainer
from flowrl.data.keys import Key
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.errors import AsleepError, BindError, EngineError, ParameterError, SyncError
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


class EngineSpec(FolderBackend):
    """What is set alike for each of these engines.

    Args:
        model: a Hugging Face folder.
        tensor_parallel: devices that share the weights.
        ranks: engines like this, each in a process and on devices of its own, that share the rows out among them; more
            than one needs a place.
        dtype: of weights and arithmetic; ``"auto"`` is the folder's, but bfloat16 where that is float32.
        memory_fraction: of the device's memory, for weights and KV cache together; None is the engine's own default.
        max_model_len: tokens that prompt and response may have together, 17 at least, so that the probe has something
            to show; None is the model's own limit.
        max_num_seqs: rows that are sampled at a time.
        prefix_caching: compute what prompts have in common once.
        tolerance: by how much the engine's log-probs may differ from the trainer's after a sync, in nats a token on the
            mean (see `flowrl.sync.probe.refuse_other_weights`); None is 1e-3 where both compute in float32, otherwise
            0.05.
        lora: that of an actor which trains an adapter beside the weights of this very folder: sync then sends the
            adapter alone. Without, the engine gets all weights, the adapter merged into them.
        frozen: answer with the weights of the folder, which nothing syncs: a judge, or an opponent that stays as it is.
        engine_args: further arguments of the engine, by name.
    """

    serves = (Rollout, Sleeper, Closable)
    reserved: ClassVar[Mapping[str, str]]
    """Engine arguments that are fields here."""
    fixed: ClassVar[Sequence[str]]
    """Engine arguments that what the columns of a rollout mean depends on."""
    probes: ClassVar[bool] = True  # so trainers in other processes send log-probs of the probe with their weights
    collective: ClassVar[bool] = False  # ranks need no group, and vLLM would take a default one of ours for its own

    model: Folder
    tensor_parallel: int = Field(default=1, ge=1)
    ranks: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=17)
    max_num_seqs: int = Field(default=256, ge=1)
    prefix_caching: bool = True
    tolerance: float | None = Field(default=None, gt=0)
    lora: LoRA | None = None
    frozen: bool = False
    engine_args: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def slots_per_rank(self) -> int:
        """Devices that one engine computes on."""
        return self.tensor_parallel

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors `sync` reads."""
        return "weights" if self.lora is None else "adapter_weights"

    def __post_init__(self) -> None:
        if self.frozen and self.lora is not None:
            raise ParameterError("frozen=True takes no sync, so no adapter ever comes; drop lora or frozen")
        for name in self.engine_args:
            if name in self.reserved:
                field = self.reserved[name]
                raise ParameterError(f"engine_args={{{name!r}: ...}} is a field of its own; set the field {field}")
            if name in self.fixed:
                raise ParameterError(
                    f"engine_args={{{name!r}: ...}} would change what the rollout's tokens and log-probs mean; it is "
                    f"not open to choice, so leave it out."
                )


class Answer(NamedTuple):
    """One response as an engine gave it.

    Args:
        ids: its tokens.
        log_probs: one a token.
        versions: of the weights that they came from, as the engine says.
        ended: by what, in the engine's words; ``"stop"`` is by a rule that it was given.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Iterable[str]
    ended: str


class HostedRollout(RolloutEngine):
    """A live engine by others; what is abstract differs from one to the other.

    An error while it generates or takes over weights leaves the engine in no known state, so it is ended, and the next
    sync starts it anew.

    Args:
        spec: what to start.
        tokenizer: of its folder.
        seed: handed to the engine.
    """

    def __init__(self, spec: EngineSpec, tokenizer: ChatTokenizer, seed: int) -> None:
        super().__init__(tokenizer)
        self._seed = seed
        self._folder, self._tolerance, self._frozen = spec.model, spec.tolerance, spec.frozen
        self._probe: Probe | None = None
        self._arithmetic: torch.dtype | None = None
        self._scores: Scores | None = None  # of the probe, when the engine's last changed
        self._asleep = False
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
                settings = self._settings(sampling, Ending(self.tokenizer, sampling))
                answers = self._answer(prompts, settings, list(range(len(prompts))))
            except Exception as error:
                raise BindError(
                    f"{self.name} starts with {self._folder!r} and then answers no question ({type(error).__name__}: "
                    f"{error}); expected an architecture and sizes that it can compute with here."
                ) from error
            width = min(len(answer.ids) for answer in answers)
            self._probe = Probe(prompts, [list(answer.ids)[:width] for answer in answers])
        if self._frozen:
            self.sync(cast(Trainer, FolderWeights(self._folder)))

    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        """Padding does not reach the engine. Row ``i`` has a seed of its own, from ``key.derive(row_ids[i])``.

        Raises:
            SyncError: the engine says that tokens came from weights of another version.
            DataError: a `sampling` that the engine cannot do.
        """
        ending = Ending(self.tokenizer, sampling)
        settings = self._settings(sampling, ending)
        requests = [ids[attended].tolist() for ids, attended in zip(prompts, mask, strict=True)]
        seeds = [key.derive(row).bits & (2**63 - 1) for row in row_ids]
        rows: list[tuple[Sequence[int], Sequence[float]]] = []
        if requests:
            with self._at_stake():
                answers = self._answer(requests, settings, seeds)
                rows = [self._checked(answer, ending, sampling.max_new_tokens) for answer in answers]
        return packed(rows, self.tokenizer.pad_id)

    def _checked(self, answer: Answer, ending: Ending, max_new_tokens: int) -> tuple[Sequence[int], Sequence[float]]:
        """The tokens and log-probs of a response, up to where it ends."""
        assert self._receipt is not None
        if set(answer.versions) - {str(self._receipt.version)}:
            raise SyncError(
                f"{self.name} says that it sampled from weights of version {', '.join(sorted(answer.versions))}, and "
                f"this engine's receipt is for version {self._receipt.version}; expected one version: let nobody but "
                f"engine.sync update its weights."
            )
        length = ending.length(answer.ids)
        if length is None and len(answer.ids) < max_new_tokens and answer.ended != "stop":
            raise EngineError(
                f"{self.name} ended a response after {len(answer.ids)} tokens ({answer.ended}); expected EOS, a stop "
                f"token, a stop string or max_new_tokens={max_new_tokens}. Call engine.sync(trainer), which starts it "
                f"anew, and give its KV cache more room (memory_fraction, or the size of the cache)."
            )
        return answer.ids[:length], answer.log_probs[:length]

    def sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`, forget what was computed with the old ones, and probe the result.

        Digest and bytes of the receipt are those of the tensors as they came, before the engine casts and packs them;
        with `lora` they are those of the adapter.

        Raises:
            SyncError: weights are missing, unknown or of another shape; `source` has no adapter over the same weights
                as this engine, which takes that alone; the engine failed to load them; or the probe
                finds other log-probs than the trainer's, or those of older weights. There is no receipt then.
            BindError: the engine had been ended by an error before, and does not start again.
            AsleepError: the engine sleeps.
            EngineError: a process of the engine died, or answered with an error.
        """
        self._require_awake("sync")
        self._receipt = None
        start = time.perf_counter()
        if not self._lives:
            self._start()
        arrival = Arrival(source, self._adapter_of, self._due, self.arithmetic, self._folder)
        # Weights from another process come with the trainer's scores of the probe of the first of these engines.
        probe = source.probe if isinstance(source, ReceivedWeights) and source.probe else self.probe
        with self._at_stake():
            try:
                transport = self._take(arrival)
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
            scores = refuse_other_weights(self.name, log_probs, self.arithmetic, probe, source, self._tolerance)
            shown = resolution(self.arithmetic, arithmetic(source), self._tolerance)
            self._scores = refuse_old_weights(self.name, scores, self._scores, shown)
        seconds = time.perf_counter() - start
        self._receipt = Receipt(source.version, arrival.digest, arrival.nbytes, seconds, transport)
        return self._receipt

    def sleep(self) -> None:
        """Give the device's memory back; twice is as good as once."""
        if not self._asleep and self._lives:
            with self._at_stake():
                self._release()
        self._asleep = True

    def wake(self) -> None:
        """Take the memory back; twice is as good as once."""
        if self._asleep and self._lives:
            with self._at_stake():
                self._resume()
        self._asleep = False

    def close(self) -> None:
        """End the engine with all its processes; twice is as good as once."""
        self._receipt = None
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
    def _answer(self, requests: list[list[int]], settings: Any, seeds: list[int]) -> list[Answer]:
        """Answer prompts, in order; raises `EngineError`."""

    @abstractmethod
    def _take(self, arrival: Arrival) -> str:
        """Take weights over under their version, and forget what was computed with others; the transport."""

    @abstractmethod
    def _score(self, probe: Probe) -> list[float]:
        """Log-probs of a probe's answers at temperature 1, row by row."""

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
