"""`RequestPool`: the requests in flight in SGLang's process, which decodes all of them together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.backends.rollout import StopDetector
from flowrl.data.text.tokenizer import ChatTokenizer


class ResponseRequest(NamedTuple):
    """A response to start.

    Args:
        stop: strings that end it, soon after they are complete.
        support: whether log-probs are of the distribution after top-k and top-p.
    """

    name: str
    ids: list[int]
    seed: int
    sampling: Mapping[str, Any]
    stop: Sequence[str]
    support: bool

    @property
    def parameters(self) -> dict[str, Any]:
        """SGLang's sampling parameters. Without stop strings it reports only the first token and the last, since each
        message costs as much as a row's share of a step."""
        interval = {} if self.stop else {"stream_interval": self.sampling["max_new_tokens"]}
        return {**self.sampling, "sampling_seed": self.seed, **interval}


class Tokens(NamedTuple):
    """The tokens of a response so far; copies, since SGLang appends to the lists that it returns."""

    ids: list[int]
    log_probs: list[float]
    cached: int

    @classmethod
    def of(cls, output: Mapping[str, Any], support: bool) -> Tokens:
        """The tokens of an output of SGLang."""
        meta = output["meta_info"]
        sampled = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
        log_probs = list(meta["output_token_sampling_logprobs"]) if support else sampled
        return cls(list(output["output_ids"]), log_probs, meta["cached_tokens"])


@dataclass
class Row:
    """A response in the scheduler; `detector` of stop strings has read `seen` tokens."""

    request: ResponseRequest
    detector: StopDetector
    seen: int = 0
    stopped: Tokens | None = None
    has_token: bool = False


class RequestPool:
    """All requests; runs on the event loop of SGLang's tokenizer manager, which advances only while `some` or `drain`
    run. Its scheduler, another process, always runs."""

    def __init__(self, manager: Any, tokenizer: ChatTokenizer) -> None:
        self._manager, self._tokenizer = manager, tokenizer
        # SGLang aborts all requests whose id begins with the given one, so no id may be a prefix of another.
        self._ids = (f"{number}." for number in itertools.count())
        self._rows: dict[str, Row] = {}  # by id; also dropped ones, until they leave the scheduler
        self._in_flight: dict[str, str] = {}  # the id of each request that was not dropped
        self._ended: dict[str, dict[str, Any]] = {}
        self._streams: set[asyncio.Task[None]] = set()  # one for all requests that began together
        self._changed = asyncio.Event()

    async def some(self, new: Sequence[ResponseRequest], seconds: float, **alike: Any) -> dict[str, dict[str, Any]]:
        """Start requests, and wait until any response has ended, for at most `seconds`; those that ended, by name.

        `alike` are SGLang's further arguments of each new request.
        """
        if new:
            await self._begin(new, alike)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        known = -1
        while known < len(self._ended):  # responses that end in one step of the scheduler arrive together
            known = len(self._ended)
            await asyncio.sleep(0)
        self._changed.clear()
        self._raise_failures()
        ended, self._ended = self._ended, {}
        return ended

    def drop(self, name: str) -> None:
        """Abort a request; its name is free at once."""
        self._ended.pop(name, None)
        if rid := self._in_flight.pop(name, None):
            self._manager.abort_request(rid)

    @property
    def without_token(self) -> list[str]:
        """Requests in flight of which no token has arrived, though the scheduler may have sampled one."""
        return [name for name, rid in self._in_flight.items() if not self._rows[rid].has_token]

    async def drain(self) -> None:
        """Wait until all dropped requests have left the scheduler and no longer use weights and caches."""
        while self._rows.keys() - self._in_flight.values():
            await self._changed.wait()
            self._changed.clear()
            self._raise_failures()
        if self._ended:
            self._changed.set()

    async def _begin(self, new: Sequence[ResponseRequest], alike: Mapping[str, Any]) -> None:
        """Send all requests to the scheduler in one message, so that it prefills them together."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        rows = {next(self._ids): Row(each, StopDetector(self._tokenizer, each.stop)) for each in new}
        request = GenerateReqInput(
            rid=[*rows],
            input_ids=[each.ids for each in new],
            sampling_params=[each.parameters for each in new],
            return_logprob=True,
            return_sampling_mask=[each.support for each in new],
            stream=True,
            **alike,
        )
        self._rows |= rows
        self._in_flight |= {row.request.name: rid for rid, row in rows.items()}
        stream = asyncio.create_task(self._follow(request))
        self._streams.add(stream)
        stream.add_done_callback(lambda _: self._changed.set())
        # The scheduler ignores an abort of a request that has not reached it yet.
        while not (stream.done() or self._was_scheduled([*rows][-1])):
            await asyncio.sleep(0)

    def _was_scheduled(self, rid: str) -> bool:
        """Whether a request has reached the scheduler."""
        state = self._manager.rid_to_state.get(rid)
        return rid not in self._rows or (state is not None and state.dispatched)

    async def _follow(self, request: Any) -> None:
        async for output in self._manager.generate_request(request, None):
            self._record(output)

    def _record(self, output: Mapping[str, Any]) -> None:
        """Record an output of SGLang, which contains all tokens of the response each time."""
        rid, ended = output["meta_info"]["id"], output["meta_info"]["finish_reason"]
        row = self._rows[rid]
        row.has_token = True
        if row.request.stop and row.stopped is None:
            new = output["output_ids"][row.seen :]
            row.seen += len(new)
            if any(row.detector.completes(token) for token in new):
                # If it then has to wait for room, its last output has only the versions.
                row.stopped = Tokens.of(output, row.request.support)
                self._manager.abort_request(rid)
        if ended is None:
            return
        del self._rows[rid]
        self._changed.set()
        if self._in_flight.get(row.request.name) != rid:
            return  # it was dropped, and if it had to wait for room, its output is incomplete
        del self._in_flight[row.request.name]
        tokens = row.stopped or Tokens.of(output, row.request.support)
        spans = output["meta_info"]["weight_versions"]
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        # After a stop string there may be more versions than tokens.
        about = {"versions": versions[: len(tokens.ids)], "ended": str(ended)}
        self._ended[row.request.name] = tokens._asdict() | about

    def _raise_failures(self) -> None:
        for stream in [stream for stream in self._streams if stream.done()]:
            self._streams.remove(stream)
            stream.result()
