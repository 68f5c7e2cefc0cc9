"""`Environment`: the environment of an episode, as a class; what it is given, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from flowrl.data.text.transcript import Message
from flowrl.errors import EpisodeError


class Row(NamedTuple):
    """A row of the prompts, from which an episode starts.

    Args:
        row_id: of this row alone.
        uid: of its group: the episodes of a prompt.
        messages: the prompt.
        ground_truth, extra_info, data_source: as they stand in the data.
        attempt: how often this episode was tried before; 0 at first.
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
        """For what an environment draws itself, below 2**31: ``extra_info["seed"]`` where the data has one, else one by
        the group, so that all episodes of a group, and every try, begin in the same environment."""
        given = self.extra_info.get("seed")
        return xxhash.xxh3_64_intdigest(self.uid.encode()) >> 33 if given is None else int(given)


class ToolCall(NamedTuple):
    """A call that the policy wrote.

    Args:
        name: of the tool.
        arguments: by name, as they were written.
    """

    name: str
    arguments: Mapping[str, Any]


class Answer(NamedTuple):
    """What the policy said in a turn.

    Args:
        text: what it wrote, without the token that ended it.
        ids: its tokens.
        turn: the how many-th answer of the episode it is, from 0.
        cut: it was ended by its length, and by no rule.
    """

    text: str
    ids: Sequence[int]
    turn: int
    cut: bool


class Reply(NamedTuple):
    """What the environment says.

    Args:
        messages: what the policy sees next; a text is a message of the user. None are needed where the episode is done.
        reward: for the answer that it replies to, on whose last token it stands; None gives none.
        done: whether the episode is over.
    """

    messages: Sequence[Message] | str = ()
    reward: float | None = None
    done: bool = False


class Environment:
    """Base of environments; each episode has one instance, which nobody else sees.

    The methods may be coroutines or plain functions; plain ones run in threads, so that one that waits holds up no
    other episode. An error that they raise is a fault of the environment, and never a reward.
    """

    async def reset(self, row: Row) -> Reply:
        """What stands before the first answer: by default the prompt as it is."""
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        """What the environment says to an answer."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it replies: define step(self, answer).")

    async def close(self) -> None:
        """Called once at the end of the episode, however it ended."""


def checked(reply: object) -> Reply:
    """What an environment replied.

    Raises:
        EpisodeError: it is no reply, or one of other types.
    """
    wanted = "expected a Reply(messages, reward=None, done=False)"
    if not isinstance(reply, Reply):
        raise EpisodeError(f"an environment replied {short(reply)}; {wanted}.")
    if not isinstance(reply.messages, str | Sequence):
        raise EpisodeError(
            f"an environment replied with the messages {short(reply.messages)}; {wanted}, where messages are a text, "
            f'or a list such as [{{"role": "user", "content": "..."}}].'
        )
    if not isinstance(reply.done, bool):
        raise EpisodeError(
            f"an environment replied with done={short(reply.done)}; {wanted}, where done is a bool, True or False."
        )
    return reply


def short(value: object) -> str:
    """The repr, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
