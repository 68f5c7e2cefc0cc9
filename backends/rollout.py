"""What all rollout engines share: a receipt, without which they do not sample; requests, and the loop over them that
`generate` is, under which weights may change; checks of prompts; and one rule for where responses end, whichever engine
stops by itself.
"""

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
from flowrl.records import Receipt


class RolloutEngine(ABC):
    """Base of live rollout engines; `sync` sets `_receipt`, and whatever else is abstract is the engine's own.

    Args:
        tokenizer: of the model's folder.
    """

    name: ClassVar[str]
    """What errors call it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last sync; None before the first one and after one that failed."""
        return self._receipt

    def freeze(self, digest: str) -> Self:
        """Generate with the weights that are there, as version 0; `digest` is theirs."""
        self._receipt = Receipt(0, digest, bytes=0, seconds=0.0, transport="folder")
        return self

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokeniser of the model's folder."""
        return self._tokenizer

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key
    ) -> Sampled:
        """Sample one response per row.

        A response ends with a token that ends a turn (`ChatTokenizer.ends`), a stop token, or the token that completes
        a stop string, which is part of it, or after `sampling.max_new_tokens`. Log-probs are of the distribution that
        was drawn from: after temperature, top-k and top-p, renormalised; at temperature 0, of temperature 1.

        Args:
            prompts: int64 ``[batch prompt]``, padded on the left.
            prompt_mask: bool ``[batch prompt]``.
            row_ids: one per row; what a row draws depends on its id and on no other row.
            sampling: how tokens are drawn.
            key: where the random numbers come from.

        Returns:
            responses, mask, log-probs and versions ``[batch response]``, as wide as the longest response, on the
            prompts' device.

        Raises:
            SyncError: the engine holds no receipt, or its weights are not those of its receipt.
            DataError: prompts that the model cannot take (shapes, padding, vocabulary, length); what the engine itself
                refuses; or it gives log-probs that are not finite.
            AsleepError: the engine sleeps.
            EngineError: the engine or one of its processes failed.
        """
        self._require_awake("generate")
        self._require_receipt()
        check_prompts(prompts, prompt_mask, row_ids, sampling, *self._limits(), self.tokenizer.folder)
        sampled = self._sample(prompts, prompt_mask, row_ids, sampling, key)
        self._refuse_not_finite(sampled, row_ids)
        return Sampled(*(column.to(prompts.device) for column in sampled))

    def _require_receipt(self) -> Receipt:
        """The receipt, without which nothing is sampled; raises `SyncError`."""
        if self._receipt is None:
            raise SyncError(
                "this rollout engine holds no receipt, so nobody knows which version of the policy it would sample "
                "from; call engine.sync(trainer) first (in a graph: end the step with Sync()(actor))."
            )
        return self._receipt

    def _refuse_not_finite(self, sampled: Sampled, row_ids: Sequence[str]) -> None:
        wrong = (sampled.response_mask & ~sampled.log_probs.isfinite()).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise DataError(
                f"{self.name} gave response token {token} of row {row_ids[row]!r} the log-prob "
                f"{float(sampled.log_probs[row, token])} ({len(wrong)} tokens in {len(wrong[:, 0].unique())} of "
                f"{len(row_ids)} rows are not finite); expected a finite one for every token that was sampled. Look in "
                f"engine_args for what draws tokens by other means (speculative decoding), in the weights for NaN, and "
                f"whether the model overflows in the engine's dtype."
            )

    @abstractmethod
    def _require_awake(self, what: str) -> None:
        """Refuse to do `what` asleep; raises `AsleepError`."""

    @abstractmethod
    def _limits(self) -> tuple[int, int | None]:
        """How many tokens there are, and how many a sequence may have (None: any number)."""

    @abstractmethod
    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        """`generate`, of prompts that have been checked, on any device."""


class Alone:
    """One thread at a time: ``with alone:``. Who waits comes before who goes in again and again.

    A lock alone would not do: the thread that gives it back and takes it again is faster than one that must wake up.
    """

    def __init__(self) -> None:
        self._next, self._now = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._now.acquire()

    def __exit__(self, *_: object) -> None:
        self._now.release()


class RequestEngine(RolloutEngine):
    """Base of live rollout engines that take `Requests`; `generate` submits all rows, and steps until they are there.

    An error of `step` ends all requests that are under way. One thread at a time lets requests begin, go on or drop, or
    takes weights over: so `swap`, which another thread may call, comes between two steps.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer)
        self._unnamed: list[str] = []  # requests that ended while `generate` stepped
        self._alone = Alone()
        self._not_swapped: BaseException | None = None  # by what the last swap failed, until that is told

    def sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`; see `Synced.sync`, and `_sync`.

        Raises:
            SyncError: requests are under way, which go on; or the weights did not arrive, and there is no receipt then.
        """
        with self._alone:
            self._not_swapped = None
            return self._sync(source)

    def swap(self, source: Trainer, caches: Caches) -> Receipt:
        """Take over the weights of `source` under requests that are under way; see `Swaps.swap`, and `_swap`.

        Raises:
            SyncError: the weights did not arrive. There is no receipt then, and what is under way fails with its next
                step.
        """
        with self._alone:
            self._not_swapped = None
            try:
                return self._swap(source, caches)
            except BaseException as error:
                self._receipt, self._not_swapped = None, error
                raise

    def _require_receipt(self) -> Receipt:
        """As `RolloutEngine`; where weights were to be swapped, it says what has become of that.

        Raises:
            SwapError: they did not arrive.
        """
        failed = self._not_swapped
        if self._receipt is None and failed is not None:
            self._not_swapped = None
            raise SwapError(
                f"the weights of {self.name} were to change under the answers that are under way, and did not arrive "
                f"({type(failed).__name__}: {failed}); expected a sync before it goes on: engine.sync(trainer)."
            ) from failed
        return super()._require_receipt()

    def submit(self, request: Request) -> None:
        """Ask for an answer, which is begun by a later `step`; see `Requests.submit`."""
        with self._alone:
            self._require_awake("submit")
            self._require_receipt()
            self._refuse_request(request)
            self._unnamed = [name for name in self._unnamed if name != request.name]
            self._submit(request)

    def _refuse_request(self, request: Request) -> None:
        """Refuse what the model cannot take, and a name that is taken; raises `DataError` or `ParameterError`."""
        ids = torch.tensor([list(request.ids)], dtype=torch.int64)
        mask = torch.ones_like(ids, dtype=torch.bool)
        check_prompts(ids, mask, [request.name], request.sampling, *self._limits(), self.tokenizer.folder)
        if self._asked(request.name):
            raise ParameterError(
                f"a request named {request.name!r} is under way, or its response was not taken; expected another name, "
                f"or engine.take({request.name!r}) first, once step() has named it, or engine.drop({request.name!r})."
            )

    def step(self) -> list[str]:
        """Compute one token of each answer; the names of those that ended; see `Requests.step`."""
        self._require_awake("step")
        ended = self._next()
        earlier, self._unnamed = [name for name in self._unnamed if self._asked(name)], []
        return [*earlier, *ended]

    def take(self, name: str) -> Response:
        """The response to a request, once; see `Requests.take`."""
        response = self._take(name)
        if response is None:
            raise ParameterError(
                f"there is no response to a request {name!r}: it was not submitted, has not ended, or its response was "
                f"taken; expected a name that engine.step() gave, once."
            )
        if not all(map(math.isfinite, response.log_probs)):
            self._refuse_not_finite(packed([response[:3]], self.tokenizer.pad_id), [name])
        return response

    def drop(self, name: str) -> None:
        """Stop a request, drop its response, and forget what was kept of it; see `Requests.drop`."""
        with self._alone:
            self._drop(name)

    def _next(self) -> list[str]:
        """A step, by this thread alone; the requests that ended."""
        with self._alone:
            return self._step(self._require_receipt().version)

    def _refuse_sync(self, begun: Sequence[str]) -> None:
        """Refuse to take over weights while answers have tokens of others; raises `SyncError`.

        Args:
            begun: the requests that have drawn tokens and have not ended.
        """
        if begun:
            raise SyncError(
                f"sync was called while {len(begun)} requests are under way ({begun[0]!r} is one), whose tokens are of "
                f"version {self._require_receipt().version}; expected none, since an answer bears one version: call "
                f"engine.step() until they end, or engine.drop(name); or where the engine can, swap: "
                f"engine.swap(trainer, caches='recompute')."
            )

    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        names = {f"generate {i}": i for i in range(len(row_ids))}
        rows: list[_Tokens] = [((), (), ())] * len(names)
        try:
            with self._alone:
                for name, i in names.items():
                    self._submit(Request(name, prompts[i][mask[i]].tolist(), sampling, key.answer(row_ids[i])))
            missing = len(names)
            while missing:
                for name in self._next():
                    if name not in names:
                        self._unnamed.append(name)
                        continue
                    response = self._take(name)
                    assert response is not None  # `_step` said so
                    rows[names[name]] = response[:3]
                    missing -= 1
        except BaseException:
            for name in names:
                self.drop(name)
            raise
        return packed(rows, self.tokenizer.pad_id)

    @abstractmethod
    def _sync(self, source: Trainer) -> Receipt:
        """`sync`, by one thread alone."""

    def _swap(self, source: Trainer, caches: Caches) -> Receipt:
        """`swap`, by one thread alone. Until the new weights are there, the receipt of the old ones stays: another
        thread may read. An engine without this swaps where nothing is under way."""
        return self._sync(source)

    @abstractmethod
    def _drop(self, name: str) -> None:
        """`drop`, by one thread alone."""

    @abstractmethod
    def _asked(self, name: str) -> bool:
        """Whether a request of that name is under way, or its response was not taken."""

    @abstractmethod
    def _submit(self, request: Request) -> None:
        """`submit`, of a request that has been checked."""

    @abstractmethod
    def _step(self, version: int) -> list[str]:
        """`step`, with weights of this version."""

    @abstractmethod
    def _take(self, name: str) -> Response | None:
        """`take`, or None."""


_Tokens = tuple[Sequence[int], Sequence[float], Sequence[int]]
"""Of a response: tokens, log-probs and versions."""


def packed(rows: Sequence[_Tokens], pad: int) -> Sampled:
    """Responses of unequal length, as columns padded on the right."""
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
    """Refuse prompts that a model cannot take.

    Args:
        prompts: int64 ``[batch prompt]``, padded on the left.
        mask: bool ``[batch prompt]``.
        row_ids: one per row.
        sampling: for how many tokens there must be room.
        vocabulary: token ids that the model has, from 0.
        positions: tokens that a sequence may have, None for any number.
        folder: of the model's tokeniser.

    Raises:
        DataError: shapes, padding, vocabulary (stop tokens included) or length are not what is expected.
    """
    if prompts.ndim != 2 or mask.shape != prompts.shape or mask.dtype != torch.bool or len(row_ids) != len(prompts):
        raise DataError(
            f"prompts are {tuple(prompts.shape)} with a {mask.dtype} mask {tuple(mask.shape)} and {len(row_ids)} "
            f"row ids; expected two [batch prompt] tensors, the mask a bool, and one id per row."
        )
    if len(prompts) == 0:
        return
    ends = mask[:, -1] if prompts.shape[1] else mask.new_zeros(len(mask))
    holes = ~ends | (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if holes.any():
        raise DataError(
            f"prompt {int(holes.nonzero()[0])} is empty, padded on the right, or has a hole in its mask; expected "
            f"tokens padded on the left, as tokenizer.pad_left(rows) makes them."
        )
    tokens = prompts[mask]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise DataError(
            f"prompts hold token ids from {int(tokens.min())} to {int(tokens.max())}, but the model's vocabulary is 0 "
            f"to {vocabulary - 1}; make prompts with its own tokeniser ({folder!r})."
        )
    if unknown := [i for i in sampling.stop_token_ids if not 0 <= i < vocabulary]:
        raise DataError(
            f"stop_token_ids={sampling.stop_token_ids} holds {unknown[0]}, but the model's vocabulary is 0 to "
            f"{vocabulary - 1}, so it could end nothing; give ids of its own tokeniser ({folder!r}), or drop it."
        )
    longest = int(mask.sum(1).max())
    if positions is not None and longest + sampling.max_new_tokens > positions:
        can_recover = ["raise that where the model allows it"]
        if (answers := positions - longest) > 0:
            can_recover.append(f"lower max_new_tokens to {answers}")
        if (room := positions - sampling.max_new_tokens) > 0:
            can_recover.append(f"drop prompts of more than {room} tokens")
        raise DataError(
            f"the longest prompt has {longest} tokens, and {longest} + max_new_tokens={sampling.max_new_tokens} is "
            f"more than the {positions} tokens that a sequence may have here, by the model or the engine's "
            f"max_model_len; {', or '.join(can_recover)}."
        )


class Ending:
    """The rule of a `Sampling`: a token that ends a turn (`ChatTokenizer.ends`), a stop token, or the token that
    completes a stop string ends a response.

    Args:
        tokenizer: whose text and ends count.
        sampling: `stop_token_ids`, `stop` and `ignore_eos`.
        token_ids: the tokens that end a response.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        self.token_ids = sorted({*(() if sampling.ignore_eos else tokenizer.ends), *sampling.stop_token_ids})
        self.stop = sampling.stop
        self._tokenizer = tokenizer

    def watch(self) -> Watch:
        """Looks at one response, from its first token on."""
        return Watch(self._tokenizer, self.stop)

    def length(self, ids: Sequence[int]) -> int | None:
        """How many tokens of `ids` are the response: up to the first that ends it, inclusive; None if none does."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self.token_ids), None)
        text = self._tokenizer.text(ids[:length]) if self.stop else ""
        if any(string in text for string in self.stop):
            watch = self.watch()
            length = next((i + 1 for i, token in enumerate(ids[:length]) if watch.completes(token)), length)
        return length


class Watch:
    """Finds the token that completes a stop string.

    Text is made of the last tokens only. They are as many as the longest string has bytes, since a token that is not
    special is a byte at least, and one more, whose text may depend on what came before it.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._last: deque[int] = deque(maxlen=1 + max((len(string.encode()) for string in stop), default=0))

    def completes(self, token: int) -> bool:
        """Whether a stop string is complete with the next token."""
        if not self._stop or token in self._tokenizer.special_ids:
            return False
        self._last.append(token)
        text = self._tokenizer.text(self._last)
        return any(string in text for string in self._stop)
