"""`Environment`: the environment of an episode as a class, with what it receives and replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import xxhash

from flowrl.data.text.transcript import Message
from flowrl.errors import EpisodeError, short, type_of

MAX_REWARD = 3.4028234663852886e38
"""The largest float32."""

MAX_EXTRA = 1 << 20
"""Maximum characters of messages beyond the text of their content, such as other keys, per reply."""

MAX_DEPTH = 100
"""Maximum levels of lists and dicts in messages."""


class Row(NamedTuple):
    """A row of the prompts, from which an episode starts.

    Args:
        uid: of its group, the episodes of one prompt.
        ground_truth, extra_info, data_source: from the data, unchanged.
        attempt: how many earlier tries of this episode failed; 0 in the first.
    """

    row_id: str
    uid: str
    messages: Sequence[Message]
    ground_truth: Any
    extra_info: Mapping[str, Any]
    data_source: str
    attempt: int = 0

    @property
    def seed(self) -> int:
        """Seeds the environment's random numbers, below 2**31: ``extra_info["seed"]`` if the data has one, else a hash
        of the group, so that all episodes of a group, and every try, start in the same environment."""
        given = self.extra_info.get("seed")
        return xxhash.xxh3_64_intdigest(self.uid.encode()) >> 33 if given is None else int(given)


class ToolCall(NamedTuple):
    """A tool call that the policy wrote.

    Its `arguments` are by name, as written.
    """

    name: str
    arguments: Mapping[str, Any]


class InvalidToolCall(ValueError):
    """An invalid tool call: the policy's fault; the policy gets the message."""


class Answer(NamedTuple):
    """The policy's answer in one turn.

    Args:
        text: without the token that ended it.
        ids: its tokens.
        turn: its number in the episode, from 0.
        cut: whether its length ended it, and no stop rule.
    """

    text: str
    ids: Sequence[int]
    turn: int
    cut: bool


class Reply(NamedTuple):
    """The environment's reply to an answer.

    Args:
        messages: what the policy sees next; a string is a user message. Optional if the episode is done.
        reward: for the answer that it replies to, placed on that answer's last token; None gives none.
        done: whether the episode is over.
    """

    messages: Sequence[Message] | str = ()
    reward: float | None = None
    done: bool = False


class Environment:
    """Base of environments; each episode has its own instance.

    The methods may be coroutines or plain functions. Plain functions run in threads, so one that waits never blocks the
    other episodes. An error that they raise is a fault of the environment, never a reward.
    """

    async def reset(self, row: Row) -> Reply:
        """The messages before the first answer; by default the prompt."""
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        """The reply to an answer."""
        raise NotImplementedError(f"{type(self).__name__} does not define what it replies: define step(self, answer).")

    async def close(self) -> None:
        """Called once at the end of the episode, even if it failed."""


def check_reply(reply: object) -> Reply:
    """What an environment replied, if it is a valid `Reply`; raises `EpisodeError` otherwise."""
    expected = "expected a Reply(messages, reward=None, done=False)"
    if not isinstance(reply, Reply):
        raise EpisodeError(
            f"The environment returned {short(reply)}; {expected}.",
            code="episode.invalid-reply",
            found=short(reply),
        )
    if not isinstance(reply.messages, str | Sequence):
        raise EpisodeError(
            f"The environment replied with messages={short(reply.messages)}; {expected}, where messages are a string "
            f'or a list such as [{{"role": "user", "content": "..."}}].',
            code="episode.invalid-reply",
            field="messages",
            found=short(reply.messages),
        )
    if not isinstance(reply.done, bool):
        raise EpisodeError(
            f"The environment replied with done={short(reply.done)}; {expected}, where done is True or False.",
            code="episode.invalid-reply",
            field="done",
            found=short(reply.done),
        )
    if reply.reward is not None:
        check_reward(reply.reward)
    return reply


def check_reward(value: object) -> float:
    """A reward; raises `EpisodeError` if it is not a finite number in the range of float32."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(cast(float, value)) <= MAX_REWARD:
        raise EpisodeError(
            f"The reward is {short(value)}, {type_of(value)}; expected a finite int or float in the range of float32. "
            f"Convert bools, NumPy numbers and tensors with float(...).",
            code="episode.invalid-reward",
            found=short(value),
        )
    return float(cast(float, value))


def content_size(message: object) -> int:
    """Characters of a message's content: a text, or a list of parts with texts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list | tuple) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str))


def text_size(messages: object, most: int) -> int:
    """Characters of all text in messages, plus one for each value in them; counts little more than `most`.

    Raises:
        EpisodeError: they nest too deeply for a template.
    """
    total, left = 0, [(messages, 0)]
    while left and total <= most:
        value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise EpisodeError(
                f"The messages nest more than {MAX_DEPTH} levels deep; expected messages such as "
                f'{{"role": "user", "content": "..."}}. Reply with text.',
                code="episode.invalid-reply",
                field="messages",
                limit=MAX_DEPTH,
            )
        total += len(value) if isinstance(value, str | bytes) else 1
        if isinstance(value, Mapping):
            left += [(each, depth + 1) for each in (*value.keys(), *value.values())]
        elif isinstance(value, list | tuple):
            left += [(each, depth + 1) for each in value]
    return total
