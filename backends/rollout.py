"""Base of all rollout engines: the receipt that sampling requires, the request loop of `generate`, live weight
updates, prompt checks, and one rule for where a response ends."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError, SwapError, SyncError
from flowrl.protocols.protocols import Caches, Request, Response, Sampled, Sampling, Trainer
from flowrl.records import FROZEN, Receipt


class RolloutEngine(ABC):
    """Base of live rollout engines; `sync` sets `_receipt`."""

    name: ClassVar[str]
    """The name in errors."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last sync; None before the first one and after one that failed."""
        return self._receipt

    def freeze(self, digest: str) -> Self:
        """Generate with the current weights for good; `digest` is theirs."""
        self._receipt = Receipt(FROZEN, digest, bytes=0, seconds=0.0, transport="folder")
        return self

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key
    ) -> Sampled:
        """Sample one response per row.

        A response ends with a token that ends a turn (`ChatTokenizer.ends`), a stop token, or the token that completes
        a stop string, which is part of it, or after `sampling.max_new_tokens`. Log-probs are under the distribution
        that was sampled: after temperature, top-k and top-p, renormalized; at temperature 0, under temperature 1.

        Args:
            prompts: int64 ``[batch prompt]``, padded on the left.
            prompt_mask: bool ``[batch prompt]``.
            row_ids: one per row; a row's random numbers depend on its id and on no other row.

        Returns:
            responses, mask, log-probs and versions ``[batch response]``, as wide as the longest response, on the
            prompts' device.
        """
        self._require_awake("generate")
        self._require_receipt()
        check_prompts(prompts, prompt_mask, row_ids, sampling, *self._limits(), self.tokenizer.folder)
        sampled = self._sample(prompts, prompt_mask, row_ids, sampling, key)
        self._refuse_not_finite(sampled, row_ids)
        return Sampled(*(column.to(prompts.device) for column in sampled))

    def _require_receipt(self) -> Receipt:
        """The receipt; raises `SyncError` if there is none."""
        if self._receipt is None:
            raise SyncError(
                f"{self.name} has no receipt, so the version of the policy that it would sample from is unknown. Call "
                f"engine.sync(trainer) first (in a graph: end the step with Sync()(actor)).",
                code="engine.no-receipt",
                engine=self.name,
            )
        return self._receipt

    def _refuse_not_finite(self, sampled: Sampled, row_ids: Sequence[str]) -> None:
        wrong = (sampled.response_mask & ~sampled.log_probs.isfinite()).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            log_prob = float(sampled.log_probs[row, token])
            raise DataError(
                f"{self.name} returned the log-prob {log_prob} for response token {token} of row {row_ids[row]!r} "
                f"({len(wrong)} tokens in {len(wrong[:, 0].unique())} of {len(row_ids)} rows are not finite). Check "
                f"engine_args for other ways of sampling (speculative decoding), the weights for NaN, and whether the "
                f"model overflows in the engine's dtype.",
                code="engine.not-finite",
                engine=self.name,
                row=row_ids[row],
                token=token,
                log_prob=log_prob,
            )

    @abstractmethod
    def _require_awake(self, what: str) -> None:
        """Raise `AsleepError` if the engine sleeps."""

    @abstractmethod
    def _limits(self) -> tuple[int, int | None]:
        """The size of the vocabulary, and the most tokens of a sequence (None: unlimited)."""

    @abstractmethod
    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        """`generate` for checked prompts, on any device."""


class FairLock:
    """A fair lock: ``with alone:``. A waiting thread comes before one that releases and reacquires."""

    def __init__(self) -> None:
        self._next, self._now = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._now.acquire()

    def __exit__(self, *_: object) -> None:
        self._now.release()


class RequestEngine(RolloutEngine):
    """Base of live rollout engines that serve `StreamingRollout`; `generate` submits all rows and steps until they end.

    An error in `step` ends all requests in flight. A lock admits one thread at a time, so `swap`, which another thread
    may call, runs between two steps.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer)
        self._unnamed: list[str] = []  # requests that ended while `generate` stepped
        self._alone = FairLock()
        self._swap_error: BaseException | None = None  # of the last swap, until it is reported

    def sync(self, source: Trainer) -> Receipt:
        """Load the weights of `source`; see `Synced.sync`, and `_sync`."""
        with self._alone:
            self._swap_error = None
            return self._sync(source)

    def swap(self, source: Trainer, caches: Caches) -> Receipt:
        """Load the weights of `source` with requests in flight; see `LiveWeightUpdate.swap`, and `_swap`."""
        with self._alone:
            self._swap_error = None
            try:
                return self._swap(source, caches)
            except BaseException as error:
                self._receipt, self._swap_error = None, error
                raise

    def _require_receipt(self) -> Receipt:
        """As `RolloutEngine`; raises `SwapError` if the last swap failed."""
        failed = self._swap_error
        if self._receipt is None and failed is not None:
            self._swap_error = None
            raise SwapError(
                f"{self.name} failed to swap its weights with requests in flight ({type(failed).__name__}: "
                f"{getattr(failed, 'message', failed)}). Call engine.sync(trainer) before it continues.",
                code="engine.swap-failed",
                engine=self.name,
                error=type(failed).__name__,
            ) from failed
        return super()._require_receipt()

    def submit(self, request: Request) -> None:
        """Queue a request, which a later `step` starts; see `StreamingRollout.submit`."""
        with self._alone:
            self._require_awake("submit")
            self._require_receipt()
            self._refuse_request(request)
            self._unnamed = [name for name in self._unnamed if name != request.name]
            self._submit(request)

    def _refuse_request(self, request: Request) -> None:
        """Refuse a prompt that the model cannot take (`DataError`), and a name in use (`ParameterError`)."""
        ids = torch.tensor([list(request.ids)], dtype=torch.int64)
        mask = torch.ones_like(ids, dtype=torch.bool)
        check_prompts(ids, mask, [request.name], request.sampling, *self._limits(), self.tokenizer.folder)
        if self._knows(request.name):
            raise ParameterError(
                f"A request named {request.name!r} is in flight, or its response was not taken. Use another name, or "
                f"call engine.take({request.name!r}) once step() returned it, or engine.drop({request.name!r}).",
                code="engine.request-exists",
                request=request.name,
            )

    def step(self) -> list[str]:
        """Compute one token of each response; the names of those that ended; see `StreamingRollout.step`."""
        self._require_awake("step")
        ended = self._next()
        earlier, self._unnamed = [name for name in self._unnamed if self._knows(name)], []
        return [*earlier, *ended]

    def take(self, name: str) -> Response:
        """The response to a request, once; see `StreamingRollout.take`."""
        response = self._take(name)
        if response is None:
            raise ParameterError(
                f"There is no response to request {name!r}: it was not submitted, has not ended, or its response was "
                f"taken. Pass a name that engine.step() returned, once.",
                code="engine.no-response",
                request=name,
            )
        if not all(map(math.isfinite, response.log_probs)):
            self._refuse_not_finite(packed([response[:3]], self.tokenizer.pad_id), [name])
        return response

    def drop(self, name: str) -> None:
        """Abort a request, and drop its response and cache; see `StreamingRollout.drop`."""
        with self._alone:
            self._drop(name)

    def _next(self) -> list[str]:
        """A step under the lock; the requests that ended."""
        with self._alone:
            return self._step(self._require_receipt().version)

    def _refuse_sync(self, begun: Sequence[str]) -> None:
        """Raise `SyncError` if requests have sampled tokens and have not ended (`begun`)."""
        if begun:
            version = self._require_receipt().version
            raise SyncError(
                f"sync was called with {len(begun)} requests in flight (such as {begun[0]!r}), whose tokens are of "
                f"version {version}; after a sync a response has one version. Call engine.step() until they end, or "
                f"engine.drop(name), or engine.swap(trainer, caches='recompute') if the engine supports it.",
                code="engine.requests-in-flight",
                engine=self.name,
                requests=len(begun),
                request=begun[0],
                version=version,
            )

    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        names = {f"generate {i}": i for i in range(len(row_ids))}
        rows: list[_Tokens] = [((), (), ())] * len(names)
        try:
            with self._alone:
                for name, i in names.items():
                    self._submit(Request(name, prompts[i][mask[i]].tolist(), sampling, key.response(row_ids[i])))
            missing = len(names)
            while missing:
                for name in self._next():
                    if name not in names:
                        self._unnamed.append(name)
                        continue
                    response = self._take(name)
                    assert response is not None  # since `_step` returned its name
                    rows[names[name]] = response[:3]
                    missing -= 1
        except BaseException:
            for name in names:
                self.drop(name)
            raise
        return packed(rows, self.tokenizer.pad_id)

    @abstractmethod
    def _sync(self, source: Trainer) -> Receipt:
        """`sync`, under the lock."""

    def _swap(self, source: Trainer, caches: Caches) -> Receipt:
        """`swap`, under the lock. The old receipt remains until the new weights have arrived, since another thread may
        read it. By default an engine swaps only without requests in flight."""
        return self._sync(source)

    @abstractmethod
    def _drop(self, name: str) -> None:
        """`drop`, under the lock."""

    @abstractmethod
    def _knows(self, name: str) -> bool:
        """Whether a request of that name is in flight, or its response was not taken."""

    @abstractmethod
    def _submit(self, request: Request) -> None:
        """`submit` for a checked request."""

    @abstractmethod
    def _step(self, version: int) -> list[str]:
        """`step` with weights of this version."""

    @abstractmethod
    def _take(self, name: str) -> Response | None:
        """`take`, or None."""


_Tokens = tuple[Sequence[int], Sequence[float], Sequence[int]]  # of a response: tokens, log-probs and versions


def packed(rows: Sequence[_Tokens], pad: int) -> Sampled:
    """Responses of unequal length as columns, padded on the right."""
    width = max((len(ids) for ids, _, _ in rows), default=0)
    sampled = Sampled(
        torch.full((len(rows), width), pad),
        torch.zeros(len(rows), width, dtype=torch.bool),
        torch.zeros(len(rows), width),
        torch.full((len(rows), width), -1),
    )
    for i, (ids, log_probs, versions) in enumerate(rows):
        sampled.responses[i, : len(ids)] = torch.tensor(ids)
        sampled.response_mask[i, : len(ids)] = True
        sampled.log_probs[i, : len(ids)] = torch.tensor(log_probs)
        sampled.versions[i, : len(ids)] = torch.tensor(versions)
    return sampled


def check_prompts(
    prompts: Tensor,
    mask: Tensor,
    row_ids: Sequence[str],
    sampling: Sampling,
    vocabulary: int,
    positions: int | None,
    folder: str,
) -> None:
    """Refuse prompts by shape, padding, vocabulary (stop tokens included) or length: at most `positions` tokens per
    sequence."""
    if prompts.ndim != 2 or mask.shape != prompts.shape or mask.dtype != torch.bool or len(row_ids) != len(prompts):
        raise DataError(
            f"Prompts have the shape {tuple(prompts.shape)} with a {mask.dtype} mask {tuple(mask.shape)} and "
            f"{len(row_ids)} row ids; expected two [batch prompt] tensors, the mask a bool, and one id per row.",
            code="engine.invalid-prompts",
            found=tuple(prompts.shape),
        )
    if len(prompts) == 0:
        return
    ends = mask[:, -1] if prompts.shape[1] else mask.new_zeros(len(mask))
    holes = ~ends | (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if holes.any():
        row = int(holes.nonzero()[0])
        raise DataError(
            f"Prompt {row} is empty, padded on the right, or has a hole in its mask; expected tokens padded on the "
            f"left. Make prompts with tokenizer.pad_left(rows).",
            code="engine.invalid-prompts",
            row=row,
        )
    tokens = prompts[mask]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise DataError(
            f"Prompts have token ids from {int(tokens.min())} to {int(tokens.max())}, but the model's vocabulary is 0 "
            f"to {vocabulary - 1}. Make prompts with its own tokenizer ({folder!r}).",
            code="model.unknown-token",
            token_id=int(tokens.max() if tokens.max() >= vocabulary else tokens.min()),
            vocabulary=vocabulary,
        )
    if unknown := [i for i in sampling.stop_token_ids if not 0 <= i < vocabulary]:
        raise DataError(
            f"stop_token_ids={sampling.stop_token_ids} contains {unknown[0]}, but the model's vocabulary is 0 to "
            f"{vocabulary - 1}, so it would end no response. Pass ids of its own tokenizer ({folder!r}), or drop it.",
            code="model.unknown-token",
            token_id=unknown[0],
            vocabulary=vocabulary,
        )
    if positions is not None:
        _check_length(mask, row_ids, sampling, positions)


def _check_length(mask: Tensor, row_ids: Sequence[str], sampling: Sampling, positions: int) -> None:
    longest = int(mask.sum(1).max())
    if longest + sampling.max_new_tokens > positions:
        fixes = ["Raise it if the model allows that"]
        if (response := positions - longest) > 0:
            fixes.append(f"lower max_new_tokens to {response}")
        if (room := positions - sampling.max_new_tokens) > 0:
            fixes.append(f"drop prompts of more than {room} tokens")
        raise DataError(
            f"The longest prompt has {longest} tokens, and {longest} + max_new_tokens={sampling.max_new_tokens} "
            f"exceeds the limit of {positions} tokens per sequence (the model's positions, or max_model_len). "
            f"{', or '.join(fixes)}.",
            code="model.too-long",
            row=row_ids[int(mask.sum(1).argmax())],
            found=longest + sampling.max_new_tokens,
            expected=positions,
        )


class StopRule:
    """Where a response ends: at a token of `token_ids` (stop tokens, and `ChatTokenizer.ends`, which end a turn), or at
    the token that completes a stop string."""

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        self.token_ids = sorted({*(() if sampling.ignore_eos else tokenizer.ends), *sampling.stop_token_ids})
        self.stop = sampling.stop
        self._tokenizer = tokenizer

    def detector(self) -> StopDetector:
        """The detector of stop strings for one response."""
        return StopDetector(self._tokenizer, self.stop)

    def length(self, ids: Sequence[int]) -> int | None:
        """The number of tokens up to the first that ends the response, inclusive; None if none does."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self.token_ids), None)
        text = self._tokenizer.text(ids[:length]) if self.stop else ""
        if any(string in text for string in self.stop):
            detector = self.detector()
            length = next((i + 1 for i, token in enumerate(ids[:length]) if detector.completes(token)), length)
        return length


class StopDetector:
    """Detects the token that completes a stop string.

    It decodes only as many last tokens as the longest string has bytes, plus one: a token that is not special is at
    least one byte, and its text may depend on the token before it.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._last: deque[int] = deque(maxlen=1 + max((len(string.encode()) for string in stop), default=0))

    def completes(self, token: int) -> bool:
        """Whether the next token completes a stop string."""
        if not self._stop or token in self._tokenizer.special_ids:
            return False
        self._last.append(token)
        text = self._tokenizer.text(self._last)
        return any(string in text for string in self._stop)
