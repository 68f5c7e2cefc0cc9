"""`Session`: an episode's side of the endpoint, which matches each request to the tokens that the policy has read.

It runs in the event loop of the episode. A request continues the recorded tokens of the longest prefix that it repeats
and that ends with an answer; otherwise its conversation is tokenized as the prompt of a new segment.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.data.text.answers import with_thought
from flowrl.data.text.transcript import Message, Transcript
from flowrl.episodes.chat import Chat, EpisodeOver, Limit
from flowrl.episodes.endpoint.answers import AnswerReader
from flowrl.episodes.endpoint.flights import Completion, Context, Flight, Listener, Recorded, Stored
from flowrl.episodes.endpoint.messages import RequestError, chained, form, with_thoughts
from flowrl.episodes.endpoint.requests import CompletionRequest
from flowrl.episodes.environment import Row
from flowrl.episodes.parsers.call_format import CallFormat
from flowrl.errors import FlowrlError
from flowrl.protocols.protocols import Response

MAX_WAITING = 256
"""Maximum requests of an episode that wait for others of it."""

_TOKENWISE = 256
"""The first tokens of a streamed answer, which are read one by one; then in parts that grow with the answer, since the
time of each reading does."""


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
        self.stored: dict[str, Stored] = {}
        """By the id of a response."""
        chat.counts |= dict.fromkeys(("overridden", "retries", "abandoned", "refused"), 0)
        # a single sequence grows by one answer after another
        self._room = asyncio.Semaphore(concurrency if chat.limits.rewrites == "segment" else 1)
        self._waiting: set[Flight] = set()
        self._turn = 0
        self._busy: set[str] = set()  # names of requests in flight
        self._names: set[str] = set()
        self._flights: list[Flight] = []
        self._latest: dict[str, Flight] = {}  # by identity
        self._recorded: dict[str, list[Recorded]] = {}  # by the digest of a conversation without its thoughts
        self._closed = False

    async def respond(self, request: CompletionRequest, retried: bool, listener: Listener | None = None) -> Completion:
        """The answer to a request. An answer that no connection waits for is kept for a retry of its request, and one
        that a client reads while it is sampled ends with the connection.

        Args:
            retried: whether the client says that it repeats a request.
            listener: called in this loop with what is sampled, if the engine gives that.

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
                if listener is not None:
                    flight.listen(listener)
                context, completion = await asyncio.shield(flight.work)
            finally:
                flight.waiters -= 1
                if listener is not None and not flight.waiters and not flight.work.done():
                    flight.left = flight.work.cancel()
            self._record(flight, context, completion)
        except RequestError as error:
            self.refused = error
            raise
        except EpisodeOver as over:
            self.refused = self._ended(over.why)
            raise self.refused from None
        except FlowrlError as error:
            self.refused = RequestError(400, error.code, error.message, "messages")
            self.chat.counts["refused"] += 1
            raise self.refused from error
        return completion

    def store(self, id: str, request: CompletionRequest, completion: Completion) -> None:
        """Let a later request continue this answer by its id, unless its own request asks for the opposite."""
        if request.stored is not None:
            names = {**request.names, **{call: name for call, name, _ in completion.calls}}
            self.stored[id] = Stored([*request.messages[request.stored :], completion.message], names)

    @property
    def ended_by(self) -> Limit | None:
        """The limit of the episode that a request after its first answer has met."""
        return self.over if self.chat.answers else None

    async def close(self) -> None:
        """End all requests; later ones are refused. Answers that were not returned are dropped."""
        self._closed = True
        for flight in self._flights:
            flight.work.cancel()
        await asyncio.gather(*(flight.work for flight in self._flights), return_exceptions=True)
        for name in self._names - {self._row.row_id}:
            self.chat.broker.drop(name)
        self.chat.counts["abandoned"] = sum(
            one.left or (not one.recorded and _has_answer(one.work)) for one in self._flights
        )

    def reward(self, value: float) -> None:
        """Add to the reward of the last answer; raises `RequestError` if that is not possible."""
        try:
            self.chat.reward(value)
        except FlowrlError as error:
            raise RequestError(400, error.code, error.message, "score") from error

    def _joined(self, request: CompletionRequest, retried: bool) -> Flight | None:
        """The flight that a request repeats: one that no connection waits for any more, or one that it retries."""
        flight = self._latest.get(request.identity)
        if flight is None or flight.left or not (retried or (not flight.waiters and not flight.recorded)):
            return None
        if flight.work.done() and not _has_answer(flight.work):
            return None
        self.chat.counts["retries"] += 1
        return flight

    def _start(self, request: CompletionRequest) -> Flight:
        if len(self._waiting) >= MAX_WAITING:
            raise RequestError(
                429, "rate_limit_exceeded", f"{MAX_WAITING} requests of this episode wait already. Send fewer at once."
            )
        flight = Flight(request)
        self._waiting.add(flight)
        flight.work = asyncio.ensure_future(self._work(flight))
        flight.work.add_done_callback(lambda _: self._waiting.discard(flight))
        self._flights.append(flight)
        self._latest[request.identity] = flight
        return flight

    async def _work(self, flight: Flight) -> tuple[Context, Completion]:
        async with self._room:
            self._waiting.discard(flight)
            chat, request, in_flight = self.chat, flight.request, len(self._busy)
            if len(chat.rewards) + in_flight >= chat.limits.turns:
                raise EpisodeOver("turns")
            if chat.exceeds_context(request.messages):
                raise EpisodeOver("context")
            context = self._context(request, in_flight)
            if len(context.transcript.ids) >= chat.limits.context:
                raise EpisodeOver("context")
            return context, await self._sampled(flight, list(context.transcript.ids))

    async def _sampled(self, flight: Flight, ids: list[int]) -> Completion:
        """What the policy answers after these tokens."""
        chat, request = self.chat, flight.request
        turn, name = self._turn, self._name()
        self._turn += 1
        self._busy.add(name)
        reader = AnswerReader(chat.broker.tokenizer, ids, self._calls, request.tools, request.stop)
        follower = asyncio.ensure_future(self._follow(flight, name, reader)) if flight.is_streamed else None
        try:
            response = await chat.sample(name, ids, turn, request.max_tokens, request.stop)
        finally:
            self._busy.discard(name)
            if follower is not None and not follower.cancel():
                follower.result()  # raises its error
        return self._completion(request, response, turn, len(ids), reader)

    async def _follow(self, flight: Flight, name: str, reader: AnswerReader) -> None:
        """Tell the listeners what is sampled, after each step of the engine at first."""
        start = 0
        while (ids := self.chat.broker.sampled_so_far(name, start)) is not None:
            if len(ids) > start // _TOKENWISE:
                start += len(ids)
                flight.tell(reader.partial(ids))
            await asyncio.sleep(0)

    def _name(self) -> str:
        """The row's id, by which the engine retains the KV of earlier answers, or another one while that is in use."""
        numbers = range(len(self._busy) + 1)
        names = (f"{self._row.row_id}~{number}" if number else self._row.row_id for number in numbers)
        name = next(name for name in names if name not in self._busy)
        self._names.add(name)
        return name

    def _context(self, request: CompletionRequest, in_flight: int) -> Context:
        """The recorded tokens that a request continues, with its further messages; or its messages as a prompt."""
        chat, tokenizer = self.chat, self.chat.broker.tokenizer
        if request.tools and not tokenizer.template_reads("tools"):
            raise RequestError(
                400,
                "unsupported_parameter",
                "The chat template does not read tools. Describe them in a message.",
                "tools",
            )
        arguments = {**chat.template_kwargs, **({"tools": list(request.tools)} if request.tools else {})}
        if (found := self._continued(request, arguments)) is not None:
            transcript = chat.segments[found.segment].until(found.answer)
            further = request.messages[request.after :]
            try:
                transcript.reply(further)
            except FlowrlError as error:
                if error.code != "tokenizer.rewritten-turns" or chat.limits.rewrites == "refuse":
                    raise
                chat.allow_segment(len(chat.segments) + in_flight)
                return Context(transcript.rewritten(further))
            else:
                if not self._is_last(Context(transcript, found.segment)) or in_flight:
                    chat.allow_segment(len(chat.segments) + in_flight)
                return Context(transcript, found.segment)
        chat.allow_segment(len(chat.segments) + in_flight)
        messages = [with_thought(tokenizer, message) for message in request.messages]
        return Context(Transcript(tokenizer, messages, chat.check, arguments))

    def _continued(self, request: CompletionRequest, arguments: Mapping[str, Any]) -> Recorded | None:
        """The recorded answer that a request continues. The client may have dropped thoughts that the chat template
        drops here, too."""
        recorded = self._recorded.get(request.prefix, ())
        given = request.thoughts
        for one in reversed(recorded):
            if one.thoughts == given:
                return one
        for one in reversed(recorded):
            dropped = all(now in ("", before) for now, before in zip(given, one.thoughts, strict=True))
            if dropped and self._reads_same(request.messages, one.thoughts, arguments):
                return one
        return None

    def _reads_same(self, messages: Sequence[Message], thoughts: Sequence[str], arguments: Mapping[str, Any]) -> bool:
        """Whether the policy would read the same if the messages of the assistant had these thoughts; white space
        counts as in the check of the chat template."""
        tokenizer, strict = self.chat.broker.tokenizer, self.chat.check == "strict"
        texts = (
            tokenizer.rendered([with_thought(tokenizer, one) for one in each], arguments, True)
            for each in (messages, with_thoughts(messages, thoughts))
        )
        one, other = (text if strict else "".join(text.split()) for text in texts)
        return one == other

    def _is_last(self, context: Context) -> bool:
        """Whether the tokens continue the last segment of the episode from its end."""
        segments = self.chat.segments
        if context.segment != len(segments) - 1:
            return False
        return len(segments[-1].answers) == len(context.transcript.answers)

    def _completion(
        self, request: CompletionRequest, response: Response, turn: int, prompt: int, reader: AnswerReader
    ) -> Completion:
        tokenizer, ids = self.chat.broker.tokenizer, response.ids
        ends = ids[-1] in tokenizer.ends or ids[-1] in self.chat.broker.sampling.stop_token_ids
        reading = reader.complete(ids[:-1] if ends else ids)
        self.chat.tool_errors += reading.invalid
        self.chat.tool_calls += len(reading.calls)
        calls = [
            (f"call_{turn}_{number}", call.name, json.dumps(call.arguments, ensure_ascii=False))
            for number, call in enumerate(reading.calls)
        ]
        reason = "length" if response.ended == "length" else "tool_calls" if calls else "stop"
        pairs = zip(ids, response.log_probs, strict=True)
        return Completion(
            reading=reading,
            content=reading.content if reading.content or not calls else None,
            calls=calls,
            finish_reason=reason,
            response=response,
            prompt_tokens=prompt,
            log_probs=[_log_prob(tokenizer.shown([token]), value) for token, value in pairs]
            if request.logprobs
            else None,
            thought_tokens=len(tokenizer.response_ids(reading.thought)) if reading.thought else 0,
        )

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
        request, thought = flight.request, completion.reading.thought
        digest = chained(request.conversation, form(completion.message))
        recorded = Recorded(len(chat.segments) - 1, len(transcript.answers) - 1, (*request.thoughts, thought))
        self._recorded.setdefault(digest, []).append(recorded)

    def _ended(self, why: Limit) -> RequestError:
        """The error of a request beyond a limit of the episode."""
        self.over = self.over or why
        limits = self.chat.limits
        if why == "context":
            return RequestError(
                400,
                "context_length_exceeded",
                f"The request leaves no room for an answer within the context of {limits.context} tokens. Send less.",
                "messages",
            )
        most = limits.turns if why == "turns" else limits.segments
        return RequestError(
            400, f"max_{why}_exceeded", f"The episode has used up its limit of {most} {why}. End the program."
        )


def _has_answer(work: asyncio.Task[Any]) -> bool:
    return work.done() and not work.cancelled() and work.exception() is None


def _log_prob(token: str, value: float) -> dict[str, Any]:
    """A token as chat completions have it."""
    return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
