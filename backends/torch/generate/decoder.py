"""Step-wise decoding: requests wait, join the batch of rows, sample a token per step, and leave.

Their KV is in a `Memory`: `flowrl.backends.torch.generate.slots` for models of plain full attention, and
`flowrl.backends.torch.generate.cache_batches` for all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from flowrl.backends.rollout import StopDetector, StopRule
from flowrl.backends.torch.generate.sampler import next_token, penalized
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError
from flowrl.protocols.protocols import Request, Response, Sampling

PATIENCE = 8
"""Steps for which requests wait for others to join with, if there is room for all."""


class Context(NamedTuple):
    """The tokens of a row that joins, and the result of `Memory.retain` from the row's previous turn."""

    ids: list[int]
    retained: Any = None


class Retained(NamedTuple):
    """The KV of an ended request: its name, its tokens with those of its response, and the result of
    `Memory.retain`."""

    name: str
    ids: list[int]
    kv: Any


class Memory(Protocol):
    """The KV of rows, which are numbered from 0 in the order of `join` and `leave`."""

    computed: int
    """Tokens that `join` computed so far, without padding."""

    @property
    def worth(self) -> float:
        """Rows join at once if they are at least this share of the current rows."""
        ...

    def decoding(self) -> AbstractContextManager[None]:
        """Prepare the model for `join` and `extend` in the block; restores it afterwards."""
        ...

    def join(self, contexts: Sequence[Context]) -> Tensor:
        """Append rows; logits ``[row vocab]`` after their contexts."""
        ...

    def extend(self, tokens: Tensor) -> Tensor:
        """Append a token to every row, int64 ``[row]``; logits ``[row vocab]`` after it."""
        ...

    def leave(self, ended: Sequence[int]) -> list[int]:
        """Remove rows; returns the old numbers of the remaining ones in their new order."""
        ...

    def retain(self, row: int, ids: list[int]) -> Any:
        """The KV of a row with the tokens `ids`, or None, for a later `Context`."""
        ...

    def seal(self) -> None:
        """The weights change: current rows continue with their KV, but later ones do not reuse it."""
        ...

    def clear(self) -> None:
        """Drop all rows and release their memory."""
        ...


class Rule:
    """How tokens are sampled and where responses end, for all requests of one `Sampling`."""

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self._ending = StopRule(tokenizer, sampling)
        self._stops = torch.tensor(self._ending.token_ids, dtype=torch.int64, device=device)

    def detector(self) -> StopDetector | None:
        """The detector of stop strings for a response; None without stop strings."""
        return self._ending.detector() if self._ending.stop else None

    def sample(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, their log-probs, and whether they end their responses: ``[row]`` each."""
        tokens, log_probs = next_token(logits, uniforms, self.sampling)
        return tokens, log_probs, torch.isin(tokens, self._stops)


class Part(NamedTuple):
    """The rows of a rule: int64 ``[row]``, and for a rule with penalties the tokens of their prompts: bool
    ``[row vocab]``."""

    rule: Rule
    rows: Tensor
    prompts: Tensor | None


@dataclass(eq=False)
class Row:
    """A request in flight, its tokens and log-probs from before its last eviction, and the first token of each version
    of the weights."""

    request: Request
    rule: Rule
    since: list[tuple[int, int]] = field(default_factory=list)
    sampled: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))
    detector: StopDetector | None = None

    @property
    def context(self) -> list[int]:
        """The tokens before its next one."""
        return [*self.request.ids, *self.sampled[0]]

    def set_version(self, token: int, version: int) -> None:
        """Set the version of this token and later ones."""
        if not self.since or self.since[-1][1] != version:
            self.since.append((token, version))

    def versions(self, tokens: int) -> list[int]:
        """The version of each of its tokens."""
        ends = [*(start for start, _ in self.since[1:]), tokens]
        return [version for (start, version), end in zip(self.since, ends, strict=True) for _ in range(start, end)]


class SampledTokens:
    """Uniform numbers, sampled tokens and log-probs of all rows: tensors by row, with spare capacity."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.count = torch.zeros(0, dtype=torch.int64, device=device)  # sampled tokens
        self.limit = self.count
        self.ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(0, 0, device=device)
        self.uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._rows = torch.arange(0, device=device)

    def join(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        counts, limits = [len(row.sampled[0]) for row in rows], [row.request.sampling.max_new_tokens for row in rows]
        start, total = len(self.count), len(self.count) + len(rows)
        room, width = self.ids.shape
        if total > room or max(limits) > width:
            size = (room if total <= room else max(total, room + room // 2), max(width, *limits))
            for name in ("ids", "log_probs", "uniforms"):
                old = getattr(self, name)
                new = old.new_zeros(size)
                new[:start, :width] = old[:start]
                setattr(self, name, new)
        by_length: dict[int, list[int]] = {}
        for i, limit in enumerate(limits):
            by_length.setdefault(limit, []).append(i)
        for limit, chosen in by_length.items():
            numbers = torch.stack([rows[i].request.key.numbers(limit) for i in chosen])
            self.uniforms[[start + i for i in chosen], :limit] = numbers.to(self._device)
        for i, row in enumerate(rows, start):
            if row.sampled[0]:
                self.ids[i, : len(row.sampled[0])] = torch.tensor(row.sampled[0])
                self.log_probs[i, : len(row.sampled[0])] = torch.tensor(row.sampled[1])
        self.count = torch.cat([self.count, torch.tensor(counts, device=self._device)])
        self.limit = torch.cat([self.limit, torch.tensor(limits, device=self._device)])
        self._rows = torch.arange(total, device=self._device)

    def numbers(self) -> Tensor:
        """The uniform number of each row's next token: float64 ``[row]``."""
        return self.uniforms[self._rows, self.count]

    def record(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Append a token to every row; whether the row has reached its limit."""
        self.ids[self._rows, self.count] = tokens
        self.log_probs[self._rows, self.count] = log_probs
        self.count += 1
        return self.count >= self.limit

    def occurrences(self, rows: Tensor, vocabulary: int) -> Tensor:
        """How often each token was sampled in these rows: int64 ``[row vocab]``."""
        counts = self.count[rows, None]
        ids = self.ids[rows, : int(counts.max())]
        sampled = torch.arange(ids.shape[1], device=self._device) < counts
        return ids.new_zeros(len(rows), vocabulary).scatter_add_(1, ids, sampled.long())

    def last(self) -> Tensor:
        """The last token of each row: int64 ``[row]``."""
        return self.ids[self._rows, self.count - 1]

    def of(self, rows: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of some rows."""
        chosen = torch.tensor(rows, device=self._device)
        counts = self.count[chosen].tolist()
        width = max(counts)
        parts = zip(self.ids[chosen, :width].tolist(), self.log_probs[chosen, :width].tolist(), counts, strict=True)
        return [(ids[:n], log_probs[:n]) for ids, log_probs, n in parts]

    def leave(self, order: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        chosen = torch.tensor(order, dtype=torch.int64, device=self._device)
        moved = [i for i, row in enumerate(order) if i != row]
        sources = [order[i] for i in moved]
        if moved:
            for tensor in (self.ids, self.log_probs, self.uniforms):
                tensor[moved] = tensor[sources]
        self.count, self.limit = self.count[chosen], self.limit[chosen]
        self._rows = self._rows[: len(order)]


class Decoder:
    """Requests in flight: the queue, and the rows that are computed together.

    `max_rows` bounds both the rows that are computed together and the ended rows whose KV is retained.
    """

    def __init__(self, memory: Memory, tokenizer: ChatTokenizer, max_rows: int, device: torch.device) -> None:
        self._memory, self._tokenizer, self._max_rows, self._device = memory, tokenizer, max_rows, device
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._sampled = SampledTokens(device)
        self._responses: dict[str, Response] = {}
        self._retained: list[Retained] = []  # the oldest first; of a name, those of its branches
        self._rules: dict[Sampling, Rule] = {}
        self._parts: list[Part] | None = None  # one for each rule
        self._version: int | None = None  # of the last step
        self._passed = 0  # steps for which requests have waited although there was room
        self._watched = False  # whether any row has stop strings
        self.context_tokens = 0
        """Tokens of all contexts that rows have joined with so far, repeatedly if they joined again."""

    def __contains__(self, name: str) -> bool:
        """Whether a request of that name is in flight, or its response was not taken."""
        return name in self._responses or any(row.request.name == name for row in (*self._rows, *self._waiting))

    @property
    def cached_tokens(self) -> int:
        """As many of `context_tokens` were not computed, since they were there."""
        return self.context_tokens - self._memory.computed

    @property
    def begun(self) -> list[str]:
        """The requests that have sampled tokens and have not ended."""
        return [row.request.name for row in (*self._rows, *self._waiting) if row.since]

    def submit(self, request: Request) -> None:
        """Queue a request."""
        rule = replace(request.sampling, max_new_tokens=1)
        if rule not in self._rules:
            self._rules[rule] = Rule(self._tokenizer, rule, self._device)
        self._waiting.append(Row(request, self._rules[rule], detector=self._rules[rule].detector()))

    def step(self, version: int) -> list[str]:
        """Sample a token for every row, including those that join now, with weights of this version; the requests that
        ended. Raises `DataError` if logits are NaN or infinite."""
        if version != self._version and self._rows:
            for row, count in zip(self._rows, self._sampled.count.tolist(), strict=True):
                row.set_version(count, version)
        self._version = version
        logits = [self._memory.extend(self._sampled.last())] if self._rows else []
        if joining := self._admitted():
            for row in joining:
                row.set_version(len(row.sampled[0]), version)
            contexts = self._recalled(joining)
            self.context_tokens += sum(len(context.ids) for context in contexts)
            logits.append(self._memory.join(contexts))
            self._sampled.join(joining)
            self._rows += joining
            self._parts = None
        return self._sample(torch.cat(logits)) if logits else []

    def take(self, name: str) -> Response | None:
        """The response to a request, once."""
        return self._responses.pop(name, None)

    def sampled_so_far(self, name: str, start: int) -> list[int]:
        """The tokens of a request in flight so far, from this number on."""
        for i, row in enumerate(self._rows):
            if row.request.name == name:
                return cast("list[int]", self._sampled.ids[i, start : int(self._sampled.count[i])].tolist())
        return [i for row in self._waiting if row.request.name == name for i in row.sampled[0][start:]]

    def drop(self, name: str) -> None:
        """Drop a request, its response and its retained KV."""
        self._responses.pop(name, None)
        self._retained = [one for one in self._retained if one.name != name]
        self._waiting = deque(row for row in self._waiting if row.request.name != name)
        if rows := [i for i, row in enumerate(self._rows) if row.request.name == name]:
            self._leave(rows)
        self._tidy()

    def evict(self) -> None:
        """Drop all KV: requests in flight are queued again, and recomputed."""
        if self._rows:
            for row, sampled in zip(self._rows, self._sampled.of(range(len(self._rows))), strict=True):
                row.sampled = sampled
            self._waiting.extendleft(reversed(self._rows))
            self._rows, self._sampled, self._parts = [], SampledTokens(self._device), None
        self._retained.clear()
        self._memory.clear()

    def seal(self) -> None:
        """The weights change: only requests in flight reuse their KV."""
        self._retained.clear()
        self._memory.seal()

    def clear(self) -> None:
        """Drop all requests in flight and all KV, even in the middle of a step."""
        self._waiting.clear()
        self._rows, self._parts = [], None
        self._retained.clear()
        self._tidy()

    def _recalled(self, rows: Sequence[Row]) -> list[Context]:
        """The contexts of rows, each with the retained KV of its request's name, or `cache_key`, that has the longest
        prefix of it; one that a row continues is no longer retained."""
        contexts, continued = list[Context](), set[int]()
        for row in rows:
            ids, name = row.context, row.request.cache_key or row.request.name
            of_name = (one for one in self._retained if one.name == name)
            found = max(of_name, key=lambda one: common([one.ids, ids]), default=None)
            if found is not None and ids[: len(found.ids)] == found.ids:
                continued.add(id(found))
            contexts.append(Context(ids, None if found is None else found.kv))
        self._retained = [one for one in self._retained if id(one) not in continued]
        return contexts

    def _admitted(self) -> list[Row]:
        """The requests that join now. They need their own forward pass, so a few wait for others, but not for long."""
        joining = min(len(self._waiting), self._max_rows - len(self._rows))
        if self._rows and joining < self._memory.worth * len(self._rows):
            self._passed += 1
            if self._passed <= PATIENCE or joining < len(self._waiting):
                return []
        self._passed = 0
        return [self._waiting.popleft() for _ in range(joining)]

    def _sample(self, logits: Tensor) -> list[str]:
        uniforms = self._sampled.numbers()
        if self._parts is None:
            self._parts, self._watched = self._by_rule(logits.shape[1]), any(row.detector for row in self._rows)
        for part in self._parts:
            if part.prompts is not None:
                counts = self._sampled.occurrences(part.rows, logits.shape[1])
                changed = penalized(logits[part.rows], part.rule.sampling, part.prompts, counts)
                logits = logits.float().index_copy(0, part.rows, changed)
        if len(self._parts) == 1:
            tokens, log_probs, ended = self._parts[0].rule.sample(logits, uniforms)
        else:
            tokens = torch.zeros_like(self._sampled.count)
            log_probs = logits.new_zeros(len(logits), dtype=torch.float32)
            ended = torch.zeros_like(tokens, dtype=torch.bool)
            for rule, rows, _ in self._parts:
                tokens[rows], log_probs[rows], ended[rows] = rule.sample(logits[rows], uniforms[rows])
        if self._watched:
            pairs = zip(self._rows, tokens.tolist(), strict=True)
            found = [row.detector is not None and row.detector.completes(token) for row, token in pairs]
            ended |= torch.tensor(found, device=ended.device)
        full = self._sampled.record(tokens, log_probs)
        over = (ended | full | log_probs.isnan()).nonzero().squeeze(1).tolist()
        return self._end(over, ended[over].tolist()) if over else []

    def _by_rule(self, vocabulary: int) -> list[Part]:
        """The rows of each rule."""
        rules: dict[Rule, list[int]] = {}
        for i, row in enumerate(self._rows):
            rules.setdefault(row.rule, []).append(i)
        parts = []
        for rule, rows in rules.items():
            prompts = None
            if rule.sampling.penalizes:
                prompts = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=self._device)
                for prompt, place in zip(prompts, rows, strict=True):
                    prompt[torch.tensor(self._rows[place].request.ids, device=self._device)] = True
            parts.append(Part(rule, torch.tensor(rows, device=self._device), prompts))
        return parts

    def _end(self, over: list[int], stopped: list[bool]) -> list[str]:
        """Remove rows whose responses are complete; their names."""
        names = []
        for i, (ids, log_probs), stop in zip(over, self._sampled.of(over), stopped, strict=True):
            row = self._rows[i]
            if log_probs[-1] != log_probs[-1]:
                raise DataError(
                    f"The model's logits are NaN or infinite for request {row.request.name!r}: its weights diverged, "
                    f"or overflow in their dtype. Look at actor/grad_norm of the steps before, and train with a lower "
                    f"learning rate, or in float32 or bfloat16.",
                    code="engine.not-finite",
                    engine="TorchRollout",
                    request=row.request.name,
                )
            names.append(row.request.name)
            versions, how = row.versions(len(ids)), "stop" if stop else "length"
            self._responses[row.request.name] = Response(ids, log_probs, versions, cast("Any", how))
            if row.request.retain_cache:
                tokens = [*row.request.ids, *ids]
                name = row.request.cache_key or row.request.name
                self._retained.append(Retained(name, tokens, self._memory.retain(i, tokens)))
                if len(self._retained) > self._max_rows:
                    del self._retained[0]
        self._leave(over)
        self._tidy()
        return names

    def _leave(self, rows: Sequence[int]) -> None:
        order = self._memory.leave(rows)
        self._sampled.leave(order)
        self._rows = [self._rows[i] for i in order]
        self._parts = None

    def _tidy(self) -> None:
        """Release memory if no request is in flight and no KV is retained."""
        if not self._rows and not self._waiting and not self._retained:
            self._memory.clear()
            self._sampled = SampledTokens(self._device)
            self._rules.clear()


def common(rows: Sequence[list[int]]) -> int:
    """The length of the longest common prefix."""
    low, high = min(rows), max(rows)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def distinct(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """The index of each distinct row's first occurrence, and for each row which of these it equals."""
    seen: dict[tuple[int, ...], int] = {}
    first, copies = list[int](), list[int]()
    for i, row in enumerate(rows):
        j = seen.setdefault(tuple(row), len(first))
        if j == len(first):
            first.append(i)
        copies.append(j)
    return first, copies
