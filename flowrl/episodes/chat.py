"""`Chat`: an agent's conversation with an engine in an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from flowrl.data.text.transcript import Check, Message, SampledSpan, Transcript
from flowrl.episodes.environment import (
    MAX_EXTRA,
    Answer,
    InvalidToolCall,
    Row,
    ToolCall,
    check_reward,
    content_size,
    text_size,
)
from flowrl.episodes.parsers.call_format import Tools
from flowrl.episodes.requests.broker import RequestBroker
from flowrl.episodes.requests.clock import EpisodeClock
from flowrl.episodes.tools import Toolbox, result_text, template_arguments
from flowrl.errors import EpisodeError, offer
from flowrl.protocols.protocols import Request, Response

Limit = Literal["turns", "context", "segments"]
"""The limits that end an episode."""

Rewrites = Literal["refuse", "segment"]
"""What to do where the next prompt does not continue what was said: refuse it, or begin a new segment."""


class EpisodeOver(Exception):
    """The episode cannot have another answer: its turns or segments are used up, or its context has no room.

    This is an ordinary end of an episode; an agent may catch it to return its score.
    """

    def __init__(self, why: Limit) -> None:
        super().__init__(why)
        self.why: Limit = why


@dataclass(frozen=True)
class Limits:
    """How long an episode may get.

    Args:
        turns: maximum answers.
        context: maximum tokens of a segment, from the first of the prompt to the last of the last answer.
        seconds: that the environment may take between two answers, before the first and after the last.
        rewrites: what to do with a rewritten context.
        segments: maximum segments; None is no limit.
    """

    turns: int
    context: int
    seconds: float
    rewrites: Rewrites = "refuse"
    segments: int | None = None


class Chat:
    """An agent's conversation with the policy: ``answer = await chat.answer()``, then ``await chat.answer("Sure?")``.

    Args:
        check: how to compare the chat template with the tokens of the episode; see `Transcript`.
        clock: ends the episode; every answer moves its deadline.
        others: of the further engines that the episode may ask, by name.
    """

    def __init__(
        self,
        broker: RequestBroker,
        row: Row,
        limits: Limits,
        check: Check,
        toolbox: Toolbox | None,
        clock: EpisodeClock,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        others: Mapping[str, RequestBroker] = MappingProxyType({}),
    ) -> None:
        self.broker, self._row, self.limits, self.check = broker, row, limits, check
        self._toolbox, self._clock, self.template_kwargs = toolbox, clock, template_kwargs
        self._turn = asyncio.Lock()
        branching = replace(limits, rewrites="segment", segments=None)
        self.others = {name: Chat(other, row, branching, check, None, clock) for name, other in others.items()}
        """The conversations with the further engines of the episode, by name; see `ask`."""
        self.exhausted: str | None = None
        """The name of the one whose limits ended the episode."""
        self.segments: list[Transcript] = []
        """The sequences that the policy read, in the order of their answers; a single one if the context only grew."""
        self._rewritten: Sequence[Message] | None = None
        self.rewards: list[float] = []
        """By answer."""
        self.versions: list[list[int]] = []
        """By answer, the version of the weights that sampled each of its tokens."""
        self.rewarded = False
        """Whether the environment gave any reward."""
        self.cuts: list[bool] = []
        """By answer, whether its length ended it."""
        self.tool_calls = 0
        """How many tool calls ran."""
        self.tool_errors = 0
        """How many tool calls were invalid."""
        self.program: Mapping[str, Any] | None = None  # how that of an `Endpoint` has ended
        self.counts: dict[str, int] = {}
        """What else an agent counts, by the name of the metric, such as ``"retries"``."""

    @property
    def transcript(self) -> Transcript | None:
        """The tokens that the policy reads next; None before the first request for an answer."""
        return self.segments[-1] if self.segments else None

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation that the policy reads; a copy, which later answers do not extend."""
        if self._rewritten is not None:
            return [*self._rewritten]
        return [*(self._row.messages if self.transcript is None else self.transcript.messages)]

    @property
    def answers(self) -> Sequence[SampledSpan]:
        """The tokens of each answer, within its segment."""
        return [span for segment in self.segments for span in segment.own]

    def rewrite(self, conversation: Sequence[Message]) -> None:
        """Replace what the policy reads: compress the conversation, or return to an earlier point of it.

        The next answer continues the recorded tokens as far as they are the same messages, up to an answer; all else is
        tokenized as a prompt. It begins a new segment, unless it continues the last one.

        Args:
            conversation: all messages, or those before the ones that `answer` adds.
        """
        self._rewritten = list(conversation)

    def use_tools(self, toolbox: Toolbox) -> None:
        """Give the policy tools of this episode alone, such as methods of its own object; before the first answer.

        Raises:
            EpisodeError: the policy has answered, so the chat template has described other tools.
        """
        if self.transcript is not None:
            raise EpisodeError(
                "The agent set tools after the first answer, when the prompt had described others. Call "
                "chat.use_tools(...) before chat.answer(...).",
                code="tool.invalid",
                tools=toolbox.names,
            )
        self._toolbox = toolbox

    async def answer(self, messages: Sequence[Message] | str | None = None) -> Answer:
        """The policy's next answer.

        Args:
            messages: in the first turn, the conversation that the episode starts with, by default the prompt; later,
                what follows the last answer. A string is a user message.

        Raises:
            EpisodeOver: the turns or segments are used up, or the context has no room.
            EpisodeError: there is no reply to the last answer, or the chat template now writes earlier turns
                differently.
            DataError: the chat template does not support the messages.
        """
        turn = len(self.rewards)
        try:
            if turn >= self.limits.turns:
                raise EpisodeOver("turns")
            if self.exceeds_context(messages):
                raise EpisodeOver("context")
            transcript = self._extended(messages)
            if len(transcript.ids) >= self.limits.context:
                raise EpisodeOver("context")
        except EpisodeOver:
            await asyncio.sleep(0)  # an agent that keeps asking must not block the other episodes
            raise
        response = await self.sample(self.broker.request_name(self._row.row_id), transcript.ids, turn)
        return self.record(transcript, response)

    async def ask(self, name: str, messages: Sequence[Message] | str) -> Answer:
        """The answer of another engine of the episode, such as a simulated user: ``await chat.ask("user", messages)``.

        The engine reads these messages and nothing else of the episode. Where they repeat an earlier conversation with
        it up to one of its answers, the recorded tokens continue. It samples with random numbers of its own, which
        depend on the row, its name and the number of its answer. Questions to one engine are answered one after
        another, in the order of the calls.

        Args:
            name: a key of ``Interact(others=...)``.
            messages: the whole conversation, up to the message that it answers. A string is a user message.

        Raises:
            EpisodeOver: its turns are used up, or its context has no room.
            EpisodeError: there is no engine of that name, or no message to answer.
            DataError: its chat template does not support the messages.
        """
        if name not in self.others:
            raise EpisodeError(
                f"The episode asks {name!r}, which it does not have; {offer(name, self.others, 'it has')} Pass "
                f"Interact(others={{{name!r}: Role({name!r})}}), and bind the role.",
                code="episode.unknown-engine",
                name=name,
                known=sorted(self.others),
            )
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        if not conversation or _is_answer(conversation[-1]):
            raise EpisodeError(
                f"The episode asks {name!r} to answer {'its own answer' if conversation else 'no messages'}. Pass the "
                f"conversation up to a message of another role, such as user.",
                code="episode.no-question",
                name=name,
            )
        other = self.others[name]
        async with other._turn:
            other.rewrite(conversation)
            try:
                return await other.answer()
            except EpisodeOver:
                self.exhausted = name
                raise

    async def sample(
        self, name: str, ids: Sequence[int], turn: int, most: int | None = None, stop: tuple[str, ...] = ()
    ) -> Response:
        """What the policy samples after these tokens.

        Args:
            name: of the request; those of an episode that are in flight at once need several.
            most, stop: end the response earlier than the sampling of the node does.
        """
        broker, sampling = self.broker, self.broker.sampling
        room = min(self.limits.context - len(ids), sampling.max_new_tokens if most is None else most)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room), stop=(*sampling.stop, *stop))
        row_id = self._row.row_id
        key, caches = broker.key.response(row_id, turn), broker.request_name(row_id)
        request = Request(name, list(ids), sampling, key, True, cache_key=caches)
        with self._clock.paused():  # an engine has no time limit
            return await broker.ask(request)

    def record(self, transcript: Transcript, response: Response) -> Answer:
        """Append what the policy sampled to a segment, the last one."""
        answered = transcript.answer(response.ids, response.log_probs)
        self.rewards.append(0.0)
        self.versions.append(response.versions)
        self.cuts.append(response.ended == "length")
        return Answer(answered.text, response.ids, len(self.rewards) - 1, response.ended == "length")

    def close(self) -> None:
        """Drop the requests of an episode that is over, and what the engines retain for it."""
        for chat in (self, *self.others.values()):
            chat.broker.drop(chat.broker.request_name(self._row.row_id))

    def reward(self, value: float) -> None:
        """Add to the reward of the last answer.

        Raises:
            EpisodeError: it is not a finite number, or there is no answer yet.
        """
        check_reward(value)
        if not self.rewards:
            raise EpisodeError(
                f"The environment gave a reward of {value} before any answer; expected None until the policy has "
                f"answered. Return the reward from step(answer).",
                code="episode.reward-before-answer",
                found=value,
            )
        self.rewards[-1] += float(value)
        check_reward(sum(self.rewards))  # advantages add the rewards of an episode
        self.rewarded = True

    def calls(self, answer: Answer) -> Sequence[ToolCall]:
        """The tool calls in an answer.

        Raises:
            InvalidToolCall: one is malformed.
        """
        if self._toolbox is None:
            return ()
        toolbox, tools = self._toolbox, Tools(self._toolbox.schemas, self.broker.tokenizer)
        return toolbox.format.calls(answer.text, answer.ids, tools)

    async def tool(self, call: ToolCall) -> str:
        """Run a tool call; returns the text for the policy.

        Raises:
            InvalidToolCall: there is no such tool, or the arguments do not fit.
            EpisodeError: the tool returned neither text nor JSON.
        """
        if self._toolbox is None:
            raise EpisodeError(
                f"The agent called the tool {call.name!r}, but this episode has no tools. Pass Interact(tools=[...]).",
                code="tool.invalid",
                tool=call.name,
            )
        tool = self._toolbox.find(call)
        self.tool_calls += 1
        return result_text(await self._toolbox.run(tool, call.arguments))

    async def answer_by_tools(self, messages: Sequence[Message] | str | None = None) -> Answer:
        """As `answer`, but runs the tool calls in it and replies with their results until an answer has none.

        An invalid call is the policy's fault: the policy gets an error message, and `tool_errors` counts the call.
        """
        answer = await self.answer(messages)
        while replies := await self._replies(answer):
            answer = await self.answer(replies)
        return answer

    async def _replies(self, answer: Answer) -> list[Message]:
        try:
            calls = self.calls(answer)
        except InvalidToolCall as invalid:
            self.tool_errors += 1
            return [{"role": "tool", "content": f"error: {invalid}"}]
        replies: list[Message] = []
        for call in calls:
            try:
                content = await self.tool(call)
            except InvalidToolCall as invalid:
                self.tool_errors += 1
                content = f"error: {invalid}"
            replies.append({"role": "tool", "name": call.name, "content": content})
        return replies

    def exceeds_context(self, messages: Sequence[Message] | str | None) -> bool:
        """Whether messages have no room by their number or size alone, which is known without tokenizing them."""
        added = [{"content": messages}] if isinstance(messages, str) else messages or ()
        given = [*(self._rewritten or ()), *added]
        characters = sum(map(content_size, given))
        if max(len(given), characters // self.broker.tokenizer.longest_token) > self.limits.context:
            return True
        most = characters + MAX_EXTRA
        if text_size(given, most) > most:
            raise EpisodeError(
                f"The messages have more than {MAX_EXTRA} characters outside of the text of their content; expected "
                f"less. Remove what the policy does not read.",
                code="episode.invalid-reply",
                field="messages",
                limit=MAX_EXTRA,
            )
        return False

    def _extended(self, messages: Sequence[Message] | str | None) -> Transcript:
        """The tokens that the policy answers."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        rewritten, self._rewritten = self._rewritten, None
        if rewritten is not None:
            conversation = [*rewritten, *(messages or ())]
            if not conversation or _is_answer(conversation[-1]):
                self._refuse_no_reply()
            if (found := self._recorded(conversation)) is None:
                return self._begin(conversation)
            return self._reply(found, conversation[len(found.messages) :])
        if self.transcript is None:
            return self._begin(self._row.messages if messages is None else messages)
        return self._reply(self.transcript, messages or ())

    def _reply(self, segment: Transcript, messages: Sequence[Message]) -> Transcript:
        """A segment with these messages after its last answer, or a new one if the template rewrites it."""
        if not messages:
            self._refuse_no_reply()
        try:
            segment.reply(messages)
        except EpisodeError as error:
            if error.code != "tokenizer.rewritten-turns" or self.limits.rewrites == "refuse":
                raise
            return self._add(segment.rewritten(messages))
        return segment if segment is self.transcript else self._add(segment)

    def _refuse_no_reply(self) -> NoReturn:
        raise EpisodeError(
            f"There is no reply to answer {len(self.rewards)} of the episode, so the policy cannot continue. Return "
            f"Reply('...'), or Reply(done=True) if the episode is over; an agent passes chat.answer('...').",
            code="episode.no-reply",
            answers=len(self.rewards),
        )

    def _recorded(self, conversation: Sequence[Message]) -> Transcript | None:
        """The recorded tokens of the most messages of a conversation, up to an answer that is its last."""
        number = max((i for i, message in enumerate(conversation) if _is_answer(message)), default=-1)
        for segment in reversed(self.segments):
            for answer, span in enumerate(segment.answers):
                if span.message == number and segment.messages[: number + 1] == conversation[: number + 1]:
                    ends = segment is self.transcript and len(segment.messages) == number + 1
                    return segment if ends else segment.until(answer)
        return None

    def _begin(self, conversation: Sequence[Message]) -> Transcript:
        arguments = template_arguments(self.broker.tokenizer, self._toolbox, self.template_kwargs)
        return self._add(Transcript(self.broker.tokenizer, conversation, self.check, arguments))

    def _add(self, segment: Transcript) -> Transcript:
        """Begin a segment; the last one is dropped if the policy answered nothing in it."""
        if self.segments and not self.segments[-1].own:
            self.segments.pop()
        self.allow_segment(len(self.segments))
        self.segments.append(segment)
        return segment

    def allow_segment(self, number: int) -> None:
        """Raise `EpisodeError` or `EpisodeOver` if there is no room for the segment of this number, from 0."""
        if number and self.limits.rewrites == "refuse":
            raise EpisodeError(
                f"The agent rewrote the conversation after {len(self.rewards)} answers, but this episode is a single "
                f"sequence of tokens, which only grows. Pass Interact(rewrites='segment') to train on several.",
                code="episode.rewritten-context",
                answers=len(self.rewards),
            )
        if self.limits.segments is not None and number >= self.limits.segments:
            raise EpisodeOver("segments")


_current: ContextVar[Chat] = ContextVar("flowrl_chat")


def current_chat() -> Chat:
    """The `Chat` of the episode that calls this, in a coroutine of an environment, a tool or an agent.

    Raises:
        EpisodeError: no episode calls this, but a thread, another process, or code outside of an episode.
    """
    if (chat := _current.get(None)) is None:
        raise EpisodeError(
            "current_chat() was called outside of an episode, or in a thread or process of its own. Call it in a "
            "coroutine: define the method or tool with `async def`, without Interact(processes=True).",
            code="episode.no-chat",
        )
    return chat


def set_current_chat(chat: Chat) -> None:
    """Make this the `current_chat` of the task of its episode."""
    _current.set(chat)


def _is_answer(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"
