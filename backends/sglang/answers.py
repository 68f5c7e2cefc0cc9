"""The answers that SGLang has under way in its process: it decodes all of them together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.backends.rollout import Watch
from flowrl.data.text.tokenizer import ChatTokenizer


class ResponseRequest(NamedTuple):
    """An answer to begin.

    Args:
        name: no other that is under way has it.
        ids: the tokens before the answer.
        seed: of its draws.
        sampling: SGLang's sampling parameters.
        stop: strings that end it; it is ended soon after, not at once.
        support: whether log-probs are of the distribution that top-k and top-p leave.
    """

    name: str
    ids: list[int]
    seed: int
    sampling: Mapping[str, Any]
    stop: Sequence[str]
    support: bool

    @property
    def parameters(self) -> dict[str, Any]:
        """What SGLang takes as its sampling parameters. Where nobody looks for strings it tells of the first token and
        of the last, since each message costs as much as a row's share of a step."""
        interval = {} if self.stop else {"stream_interval": self.sampling["max_new_tokens"]}
        return {**self.sampling, "sampling_seed": self.seed, **interval}


class Tokens(NamedTuple):
    """What there is of an answer; copies, since SGLang adds to the lists that it hands out.

    Args:
        ids: its tokens.
        log_probs: one a token.
        cached: tokens before it that SGLang had in its cache.
    """

    ids: list[int]
    log_probs: list[float]
    cached: int

    @classmethod
    def of(cls, output: Mapping[str, Any], support: bool) -> Tokens:
        """Those in an output of SGLang's."""
        meta = output["meta_info"]
        sampled = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
        log_probs = list(meta["output_token_sampling_logprobs"]) if support else sampled
        return cls(list(output["output_ids"]), log_probs, meta["cached_tokens"])


@dataclass
class Row:
    """An answer that the scheduler has.

    Args:
        asked: what was asked for.
        watch: looks for its stop strings.
        seen: tokens that it has looked at.
        stopped: the answer up to where one was complete.
        drawn: whether it has a token.
    """

    asked: ResponseRequest
    watch: Watch
    seen: int = 0
    stopped: Tokens | None = None
    drawn: bool = False


class Answers:
    """All of them; on the event loop of SGLang's tokeniser manager, which goes on only while `some` or `settled` run.
    Its scheduler, another process, always does.

    Args:
        manager: SGLang's tokeniser manager.
        tokenizer: whose text stop strings are looked for in.
    """

    def __init__(self, manager: Any, tokenizer: ChatTokenizer) -> None:
        self._manager, self._tokenizer = manager, tokenizer
        # SGLang aborts all requests whose id begins with the one that is given, so no id may begin another.
        self._ids = (f"{number}." for number in itertools.count())
        self._rows: dict[str, Row] = {}  # by id; also those that were dropped, until they have left the scheduler
        self._under_way: dict[str, str] = {}  # the id of each answer that somebody waits for
        self._ended: dict[str, dict[str, Any]] = {}
        self._streams: set[asyncio.Task[None]] = set()  # one for all answers that began together
        self._news = asyncio.Event()

    async def some(self, new: Sequence[ResponseRequest], seconds: float, **alike: Any) -> dict[str, dict[str, Any]]:
        """Begin answers, and wait until any has ended, or for so many seconds; those that have, by name.

        Args:
            new: what to begin.
            seconds: to wait.
            alike: what SGLang takes with each of the new ones.

        Raises:
            Exception: what SGLang raises for an answer.
        """
        if new:
            await self._begin(new, alike)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        known = -1
        while known < len(self._ended):  # what ends in one step of the scheduler's comes at once
            known = len(self._ended)
            await asyncio.sleep(0)
        self._news.clear()
        self._raise_what_failed()
        ended, self._ended = self._ended, {}
        return ended

    def drop(self, name: str) -> None:
        """End an answer that nobody waits for; its name is free."""
        self._ended.pop(name, None)
        if rid := self._under_way.pop(name, None):
            self._manager.abort_request(rid)

    @property
    def undrawn(self) -> list[str]:
        """Those under way of which no token has come, though the scheduler may have drawn one."""
        return [name for name, rid in self._under_way.items() if not self._rows[rid].drawn]

    async def settled(self) -> None:
        """Wait until all that were dropped have left the scheduler: weights and caches are no more in use."""
        while self._rows.keys() - self._under_way.values():
            await self._news.wait()
            self._news.clear()
            self._raise_what_failed()
        if self._ended:
            self._news.set()

    async def _begin(self, new: Sequence[ResponseRequest], alike: Mapping[str, Any]) -> None:
        """Give the scheduler all of them in one message, so that it computes their contexts together."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        rows = {next(self._ids): Row(asked, Watch(self._tokenizer, asked.stop)) for asked in new}
        request = GenerateReqInput(
            rid=[*rows],
            input_ids=[asked.ids for asked in new],
            sampling_params=[asked.parameters for asked in new],
            return_logprob=True,
            return_sampling_mask=[asked.support for asked in new],
            stream=True,
            **alike,
        )
        self._rows |= rows
        self._under_way |= {row.asked.name: rid for rid, row in rows.items()}
        stream = asyncio.create_task(self._follow(request))
        self._streams.add(stream)
        stream.add_done_callback(lambda _: self._news.set())
        # Before it has heard of an answer, the scheduler would forget that it is aborted.
        while not (stream.done() or self._heard_of([*rows][-1])):
            await asyncio.sleep(0)

    def _heard_of(self, rid: str) -> bool:
        """Whether the scheduler has, or had, this answer."""
        state = self._manager.rid_to_state.get(rid)
        return rid not in self._rows or (state is not None and state.dispatched)

    async def _follow(self, request: Any) -> None:
        async for output in self._manager.generate_request(request, None):
            self._note(output)

    def _note(self, output: Mapping[str, Any]) -> None:
        """Take what SGLang says of an answer: all that there is of it, each time."""
        rid, ended = output["meta_info"]["id"], output["meta_info"]["finish_reason"]
        row = self._rows[rid]
        row.drawn = True
        if row.asked.stop and row.stopped is None:
            fresh = output["output_ids"][row.seen :]
            row.seen += len(fresh)
            if any(row.watch.completes(token) for token in fresh):
                # Of one that then has to wait for room, the last output says the versions, and no more.
                row.stopped = Tokens.of(output, row.asked.support)
                self._manager.abort_request(rid)
        if ended is None:
            return
        del self._rows[rid]
        self._news.set()
        if self._under_way.get(row.asked.name) != rid:
            return  # nobody wants it, and of one that had to wait for room SGLang does not say everything
        del self._under_way[row.asked.name]
        tokens = row.stopped or Tokens.of(output, row.asked.support)
        spans = output["meta_info"]["weight_versions"]
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        # Of one with a stop string there are more by now.
        told = {"versions": versions[: len(tokens.ids)], "ended": str(ended)}
        self._ended[row.asked.name] = tokens._asdict() | told

    def _raise_what_failed(self) -> None:
        for stream in [stream for stream in self._streams if stream.done()]:
            self._streams.remove(stream)
            stream.result()
