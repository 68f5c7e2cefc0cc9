"""`Chat`, an episode's side of the conversation, and `RequestBroker`, which batches the requests of all episodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Check, Message, Transcript
from flowrl.data.waits import WaitRecorder
from flowrl.episodes.environment import Answer, Row, ToolCall, short
from flowrl.episodes.tools import InvalidToolCall, Toolbox, said, template_arguments
from flowrl.errors import EpisodeError, type_of
from flowrl.protocols.protocols import Request, Response, Sampling, StreamingRollout


class EpisodeOver(Exception):
    """An episode asked for an answer that it does not get: its turns are used up, or there is no room for more tokens.

    It is the ordinary end of an episode; an agent may catch it to give its score.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Limits:
    """How long an episode may get.

    Args:
        turns: answers.
        context: tokens, from the first of the prompt to the last of the last answer.
        seconds: that the environment may take between two answers, before the first and after the last.
    """

    turns: int
    context: int
    seconds: float


class RequestBroker:
    """Stands between episodes, which are coroutines of one event loop, and an engine, which computes in that thread.

    Between two steps of the engine every coroutine goes on that can: it takes its answer, and what it asks for next is
    in the engine's next step.

    Args:
        engine: takes requests.
        tokenizer: of its model.
        sampling: how answers are drawn.
        key: where their random numbers come from.
    """

    def __init__(self, engine: StreamingRollout, tokenizer: ChatTokenizer, sampling: Sampling, key: Key) -> None:
        self.tokenizer, self.sampling, self.key = tokenizer, sampling, key
        self.environments = WaitRecorder("some wait for their environments")
        self.idle = WaitRecorder("all wait for their environments")
        """When there was nothing to compute."""
        self._engine = engine
        self._new: list[Request] = []
        self._asked: dict[str, asyncio.Future[Response]] = {}
        self._more = asyncio.Event()

    async def ask(self, request: Request) -> Response:
        """The response to a request."""
        asked: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._asked[request.name] = asked
        self._new.append(request)
        self._more.set()
        self.environments.end()
        try:
            return await asked
        finally:
            self.environments.begin()

    def enter(self) -> None:
        """An episode begins, with its environment."""
        self.environments.begin()

    def leave(self, name: str) -> None:
        """An episode that has entered is over: nothing of this name goes on."""
        self.environments.end()
        self._asked.pop(name, None)
        self._new = [request for request in self._new if request.name != name]
        self._engine.drop(name)

    async def serve(self) -> None:
        """Compute whatever is asked for, until cancelled; raises what the engine raises."""
        while True:
            if not self._asked:
                self._more.clear()
                self.idle.begin()
                try:
                    await self._more.wait()
                finally:  # the last reply of an environment is waited for, too, and nothing asked behind it
                    self.idle.end()
            new, self._new = self._new, []
            for request in new:
                self._engine.submit(request)
            for name in self._engine.step():
                self._asked.pop(name).set_result(self._engine.take(name))
            await asyncio.sleep(0)


class Chat:
    """What an agent talks to: ``answer = await chat.answer()``, then ``await chat.answer("Are you sure?")``, and so on.

    Args:
        desk: where it asks for answers.
        row: where the episode starts.
        limits: how long it may get.
        check: how the chat template is held against what is there; see `Transcript`.
        toolbox: the tools that the policy may call.
        clock: ends the episode; its deadline is moved by every answer.
        template_kwargs: arguments of the chat template.
    """

    def __init__(
        self,
        desk: RequestBroker,
        row: Row,
        limits: Limits,
        check: Check,
        toolbox: Toolbox | None,
        clock: asyncio.Timeout,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._desk, self._row, self.limits, self._check = desk, row, limits, check
        self._toolbox, self._clock, self._template_kwargs = toolbox, clock, template_kwargs
        desk.enter()
        self.transcript: Transcript | None = None
        """All tokens so far; None before the first answer is asked for."""
        self.rewards: list[float] = []
        """By answer."""
        self.versions: list[list[int]] = []
        """By answer, of the weights that sampled each of its tokens."""
        self.rewarded = False
        """Whether the environment gave any reward."""
        self.cuts: list[bool] = []
        """By answer, whether its length ended it."""
        self.tool_calls = 0
        """Calls of tools that were made."""
        self.tool_errors = 0
        """Calls that the policy wrote and no tool takes."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._row.messages if self.transcript is None else self.transcript.messages

    async def answer(self, messages: Sequence[Message] | str | None = None) -> Answer:
        """What the policy says next.

        Args:
            messages: what it is told: at first the conversation that the episode starts with, by default the prompt;
                later what follows its last answer. A text is a message of the user.

        Raises:
            EpisodeOver: the turns are used up, or there is no room.
            EpisodeError: nothing was said to the last answer, or the chat template writes it otherwise now.
            DataError: the chat template does not take the messages.
        """
        turn = len(self.rewards)
        if turn >= self.limits.turns:
            await asyncio.sleep(0)  # an agent that asks on and on, though all is over, holds nobody up
            raise EpisodeOver("turns")
        transcript = self._told(messages)
        room = self.limits.context - len(transcript.ids)
        if room < 1:
            await asyncio.sleep(0)
            raise EpisodeOver("context")
        desk = self._desk
        sampling = replace(desk.sampling, max_new_tokens=min(desk.sampling.max_new_tokens, room))
        key = desk.key.answer(self._row.row_id, turn)
        request = Request(self._row.row_id, list(transcript.ids), sampling, key, retain_cache=True)
        self._clock.reschedule(None)  # the policy takes the time that it takes
        response = await desk.ask(request)
        self._clock.reschedule(asyncio.get_running_loop().time() + self.limits.seconds)
        answered = transcript.answer(response.ids, response.log_probs)
        self.rewards.append(0.0)
        self.versions.append(response.versions)
        self.cuts.append(response.ended == "length")
        return Answer(answered.text, response.ids, turn, response.ended == "length")

    def stop_clock(self) -> None:
        """Nothing more is waited for by this episode's clock, if its time is not over yet."""
        if not self._clock.expired():
            self._clock.reschedule(None)

    def reward(self, value: float) -> None:
        """Add to what the last answer is worth.

        Raises:
            EpisodeError: it is no finite number, or nothing was answered.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EpisodeError(
                f"a reward is {short(value)}, {type_of(value)}; expected a finite number, an int or a float: "
                f"float(...) makes one of a bool, of NumPy's and of a tensor."
            )
        if not self.rewards:
            raise EpisodeError(f"a reward of {value} is given before any answer; expected one to be rewarded.")
        self.rewards[-1] += float(value)
        self.rewarded = True

    def calls(self, answer: Answer) -> Sequence[ToolCall]:
        """The calls of tools in an answer.

        Raises:
            InvalidToolCall: something looks like one, and is none.
        """
        return () if self._toolbox is None else self._toolbox.calls(answer.text)

    async def tool(self, call: ToolCall) -> str:
        """Make a call, and give what the policy is to read.

        Raises:
            InvalidToolCall: there is no such tool, or it takes other arguments.
            EpisodeError: what it returned is no text.
        """
        if self._toolbox is None:
            raise EpisodeError(
                f"{call.name!r} is called, and this episode has no tools; give some: Interact(tools=...)."
            )
        tool = self._toolbox.find(call)
        self.tool_calls += 1
        return said(await self._toolbox.run(tool, call.arguments))

    async def answer_by_tools(self, messages: Sequence[Message] | str | None = None) -> Answer:
        """As `answer`; the calls in it are made, and what came of them is told, until an answer has none.

        A call that is wrong is the policy's fault: it is told so, and it counts in `tool_errors`.
        """
        answer = await self.answer(messages)
        while replies := await self._replies(answer):
            answer = await self.answer(replies)
        return answer

    async def _replies(self, answer: Answer) -> list[Message]:
        try:
            calls = self.calls(answer)
        except InvalidToolCall as misfit:
            self.tool_errors += 1
            return [{"role": "tool", "content": f"error: {misfit}"}]
        replies: list[Message] = []
        for call in calls:
            try:
                content = await self.tool(call)
            except InvalidToolCall as misfit:
                self.tool_errors += 1
                content = f"error: {misfit}"
            replies.append({"role": "tool", "name": call.name, "content": content})
        return replies

    def _told(self, messages: Sequence[Message] | str | None) -> Transcript:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.transcript is None:
            tokenizer, start = self._desk.tokenizer, self._row.messages if messages is None else messages
            arguments = template_arguments(tokenizer, self._toolbox, self._template_kwargs)
            self.transcript = Transcript(tokenizer, start, self._check, arguments)
        elif not messages:
            raise EpisodeError(
                "an answer is asked for, and nothing was said to the last one; expected something to answer: "
                "Reply('...'), or Reply(done=True) where the episode is over; of an agent, chat.answer('...')."
            )
        else:
            self.transcript.reply(messages)
        return self.transcript
