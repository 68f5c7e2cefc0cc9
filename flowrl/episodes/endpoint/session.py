"""`Session`: an episode's side of the endpoint, which matches each request to the tokens that the policy has read.

It runs in the event loop of the episode. A request continues the recorded tokens of the longest prefix that it repeats
and that ends with an answer; otherwise its conversation is tokenized as the prompt of a new segment.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.data.text.transcript import Transcript
from flowrl.episodes.chat import Chat, EpisodeOver, Limit
from flowrl.episodes.endpoint.messages import CompletionRequest, RequestError, chained, form, template_message
from flowrl.episodes.environment import InvalidToolCall, Row
from flowrl.episodes.parsers.call_format import CallFormat, Tools
from flowrl.errors import FlowrlError
from flowrl.protocols.protocols import Response

MAX_WAITING = 256
"""Maximum requests of an episode that wait for others of it."""


@dataclass(frozen=True)
class Context:
    """What the policy reads for a request.

    Args:
        segment: the number of the segment that it continues; None begins one.
    """

    transcript: Transcript
    segment: int | None = None


@dataclass(frozen=True)
class Completion:
    """An answer, as the client gets it."""

    message: Mapping[str, Any]
    finish_reason: str
    response: Response
    prompt_tokens: int


class Flight:
    """A request that is computed, and its answer; retries share it.

    Args:
        waiters: connections that wait for the answer.
        recorded: whether the answer was returned, so that it is part of the episode.
    """

    def __init__(self, request: CompletionRequest, work: asyncio.Task[tuple[Context, Completion]]) -> None:
        self.request, self.work = request, work
        self.waiters = 0
        self.recorded = False


class Session:
    """The requests of one episode.

    Args:
        calls: the format of the tool calls in an answer.
        concurrency: maximum requests that the policy answers at once.
        strict: see `Endpoint`.
    """

    def __init__(self, chat: Chat, row: Row, calls: CallFormat, concurrency: int, strict: bool) -> None:
        self.chat, self._row, self._calls, self.strict = chat, row, calls, strict
        self.loop = asyncio.get_running_loop()
        self.over: Limit | None = None
        """The limit that a request has met."""
        self.refused: RequestError | None = None
        """The last error that a client got."""
        chat.counts |= dict.fromkeys(("overridden", "retries", "abandoned", "refused"), 0)
        # a single sequence grows by one answer after another
        self._room = asyncio.Semaphore(concurrency if chat.limits.rewrites == "segment" else 1)
        self._waiting = 0
        self._turn = 0
        self._busy: set[str] = set()  # names of requests in flight
        self._names: set[str] = set()
        self._flights: list[Flight] = []
        self._latest: dict[str, Flight] = {}  # by identity
        self._recorded: dict[str, tuple[int, int]] = {}  # by digest, the segment and the number of its answer
        self._closed = False

    async def respond(self, request: CompletionRequest, retried: bool) -> Completion:
        """The answer to a request. An answer that no connection waits for is kept for a retry of its request.

        Args:
            retried: whether the client says that it repeats a request.

        Raises:
            RequestError: the request is refused, or the episode is over.
        """
        if self._closed:
            raise RequestError(401, "invalid_api_key", "The episode of this key is over. Start no further requests.")
        if request.overridden:
            self.chat.counts["overridden"] += 1
        try:
            flight = self._joined(request, retried) or self._start(request)
            flight.waiters += 1
            try:
                context, completion = await asyncio.shield(flight.work)
            finally:
                flight.waiters -= 1
            self._record(flight, context, completion)
        except RequestError as error:
            self.refused = error
            raise
        except EpisodeOver as over:
            raise self._ended(over.why) from None
        except FlowrlError as error:
            self.refused = RequestError(400, error.code, error.message, "messages")
            self.chat.counts["refused"] += 1
            raise self.refused from error
        return completion

    async def close(self) -> None:
        """End all requests; later ones are refused. Answers that were not returned are dropped."""
        self._closed = True
        for flight in self._flights:
            flight.work.cancel()
        await asyncio.gather(*(flight.work for flight in self._flights), return_exceptions=True)
        for name in self._names - {self._row.row_id}:
            self.chat.broker.drop(name)
        self.chat.counts["abandoned"] = sum(not one.recorded and _has_answer(one.work) for one in self._flights)

    def reward(self, value: float) -> None:
        """Add to the reward of the last answer; raises `RequestError` if that is not possible."""
        try:
            self.chat.reward(value)
        except FlowrlError as error:
            raise RequestError(400, error.code, error.message, "score") from error

    def _joined(self, request: CompletionRequest, retried: bool) -> Flight | None:
        """The flight that a request repeats: one that no connection waits for any more, or one that it retries."""
        flight = self._latest.get(request.identity)
        if flight is None or not (retried or (not flight.waiters and not flight.recorded)):
            return None
        if flight.work.done() and not _has_answer(flight.work):
            return None
        self.chat.counts["retries"] += 1
        return flight

    def _start(self, request: CompletionRequest) -> Flight:
        if self._waiting >= MAX_WAITING:
            raise RequestError(
                429, "rate_limit_exceeded", f"{MAX_WAITING} requests of this episode wait already. Send fewer at once."
            )
        self._waiting += 1
        flight = Flight(request, asyncio.ensure_future(self._work(request)))
        self._flights.append(flight)
        self._latest[request.identity] = flight
        return flight

    async def _work(self, request: CompletionRequest) -> tuple[Context, Completion]:
        async with self._room:
            self._waiting -= 1
            chat, in_flight = self.chat, len(self._busy)
            if len(chat.rewards) + in_flight >= chat.limits.turns:
                raise EpisodeOver("turns")
            if chat.exceeds_context(request.messages):
                raise EpisodeOver("context")
            context = self._context(request, in_flight)
            if len(context.transcript.ids) >= chat.limits.context:
                raise EpisodeOver("context")
            turn, name = self._turn, self._name()
            self._turn += 1
            self._busy.add(name)
            try:
                ids = list(context.transcript.ids)
                response = await chat.sample(name, ids, turn, request.max_tokens, request.stop)
            finally:
                self._busy.discard(name)
            return context, self._completion(request, response, turn, len(ids))

    def _name(self) -> str:
        """The row's id, by which the engine retains the KV of earlier answers, or another one while that is in use."""
        numbers = range(len(self._busy) + 1)
        names = (f"{self._row.row_id}~{number}" if number else self._row.row_id for number in numbers)
        name = next(name for name in names if name not in self._busy)
        self._names.add(name)
        return name

    def _context(self, request: CompletionRequest, in_flight: int) -> Context:
        """The recorded tokens that a request continues, with its further messages; or its messages as a prompt."""
        chat, found = self.chat, self._recorded.get(request.prefix)
        tokenizer = chat.broker.tokenizer
        if request.tools and not tokenizer.template_reads("tools"):
            raise RequestError(
                400,
                "unsupported_parameter",
                "The chat template does not read tools. Describe them in a message.",
                "tools",
            )
        if found is not None:
            transcript = chat.segments[found[0]].until(found[1])
            further = request.messages[request.after :]
            try:
                transcript.reply(further)
            except FlowrlError as error:
                if error.code != "tokenizer.rewritten-turns" or chat.limits.rewrites == "refuse":
                    raise
                chat.allow_segment(len(chat.segments) + in_flight)
                return Context(transcript.rewritten(further))
            else:
                if not self._is_last(Context(transcript, found[0])) or in_flight:
                    chat.allow_segment(len(chat.segments) + in_flight)
                return Context(transcript, found[0])
        chat.allow_segment(len(chat.segments) + in_flight)
        arguments = {**chat.template_kwargs, **({"tools": list(request.tools)} if request.tools else {})}
        return Context(Transcript(tokenizer, request.messages, chat.check, arguments))

    def _is_last(self, context: Context) -> bool:
        """Whether the tokens continue the last segment of the episode from its end."""
        segments = self.chat.segments
        if context.segment != len(segments) - 1:
            return False
        return len(segments[-1].answers) == len(context.transcript.answers)

    def _completion(self, request: CompletionRequest, response: Response, turn: int, prompt: int) -> Completion:
        text = self.chat.broker.tokenizer.decode(response.ids, self.chat.broker.sampling.stop_token_ids)
        ends = [text.index(stop) for stop in request.stop if stop in text]
        text = text[: min(ends)] if ends else text
        reason = "length" if response.ended == "length" else "stop"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        try:
            tools = Tools(request.tools, self.chat.broker.tokenizer)
            calls = self._calls.calls(text, response.ids, tools) if request.tools else ()
        except InvalidToolCall:  # the client reads it as text
            self.chat.tool_errors += 1
            calls = ()
        if calls:
            self.chat.tool_calls += len(calls)
            message["content"] = _before_calls(text)
            message["tool_calls"] = [
                {
                    "id": f"call_{turn}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for number, call in enumerate(calls)
            ]
            reason = "tool_calls" if reason == "stop" else reason
        return Completion(message, reason, response, prompt)

    def _record(self, flight: Flight, context: Context, completion: Completion) -> None:
        """Make an answer that is returned part of the episode."""
        if flight.recorded:
            return
        chat, transcript = self.chat, context.transcript
        if len(chat.rewards) >= chat.limits.turns:  # others have been recorded since it began
            raise EpisodeOver("turns")
        if self._is_last(context):
            transcript.inherited = chat.segments[-1].inherited
            chat.segments[-1] = transcript
        else:
            chat.allow_segment(len(chat.segments))
            chat.segments.append(transcript)
        chat.record(transcript, completion.response)
        flight.recorded = True
        digest = chained(flight.request.conversation, form(template_message(completion.message, {})))
        self._recorded[digest] = (len(chat.segments) - 1, len(transcript.answers) - 1)

    def _ended(self, why: Limit) -> RequestError:
        """The error of a request beyond a limit of the episode."""
        self.over = self.over or why
        limit = {"turns": self.chat.limits.turns, "context": self.chat.limits.context}.get(
            why, self.chat.limits.segments
        )
        code = "context_length_exceeded" if why == "context" else f"max_{why}_exceeded"
        return RequestError(
            400, code, f"The episode has used up its limit of {why}, {limit}. End the program, or continue with less."
        )


def _has_answer(work: asyncio.Task[Any]) -> bool:
    return work.done() and not work.cancelled() and work.exception() is None


def _before_calls(text: str) -> str | None:
    """The text before the first call; None if there is none, or the calls are written in a format of their own."""
    before, mark, _ = text.partition("<tool_call>")
    return before if mark and before.strip() else None
