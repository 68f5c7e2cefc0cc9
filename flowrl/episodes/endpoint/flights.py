"""A request that is computed, what it continues, and its answer; see `flowrl.episodes.endpoint.session`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.data.text.transcript import Message, Transcript
from flowrl.episodes.endpoint.answers import Reading
from flowrl.episodes.endpoint.messages import template_message
from flowrl.episodes.endpoint.requests import CompletionRequest
from flowrl.protocols.protocols import Response

Listener = Callable[[Reading], None]
"""Gets what a client may get of an answer, each time more."""


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
    """An answer, as the client gets it.

    Args:
        content: None if there are only calls.
        calls: id, name and arguments as JSON.
        log_probs: of each token, as chat completions have them, if requested.
        thought_tokens: the length of the thought.
    """

    reading: Reading
    content: str | None
    calls: Sequence[tuple[str, str, str]]
    finish_reason: str
    response: Response
    prompt_tokens: int
    log_probs: Sequence[Mapping[str, Any]] | None
    thought_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """As the chat template reads it."""
        calls = [{"function": {"name": name, "arguments": arguments}} for _, name, arguments in self.calls]
        given = {"role": "assistant", "content": self.content, "reasoning_content": self.reading.thought}
        return template_message({**given, "tool_calls": calls}, {})


class Flight:
    """A request that is computed, and its answer; retries share it.

    Args:
        waiters: connections that wait for the answer.
        recorded: whether the answer was returned, so that it is part of the episode.
        left: whether its client has closed the connection while it read the answer.
        reading: what clients may get of the answer so far.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.work: asyncio.Task[tuple[Context, Completion]]
        self.waiters = 0
        self.recorded = self.left = False
        self.reading = Reading()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call this from now on, and with what is there already."""
        self._listeners.append(listener)
        if self.reading != Reading():
            listener(self.reading)

    def tell(self, reading: Reading) -> None:
        """Call the listeners if there is more to get."""
        if reading != self.reading:
            self.reading = reading
            for listener in self._listeners:
                listener(reading)

    @property
    def is_streamed(self) -> bool:
        """Whether a client reads the answer while it is sampled."""
        return bool(self._listeners)


class Recorded(NamedTuple):
    """An answer of the episode: its segment, its number there, and the thoughts of the messages up to it."""

    segment: int
    answer: int
    thoughts: tuple[str, ...]


class Stored(NamedTuple):
    """A conversation that a later request may continue by the id of its last response.

    Args:
        messages: as the chat template reads them.
        names: of functions by the id of their calls.
    """

    messages: Sequence[Message]
    names: Mapping[str, str]
