"""The messages in an answer of gpt-oss, in OpenAI's harmony format.

An answer continues ``<|start|>assistant`` and has one message or more: a thought in the channel ``analysis``, a call of
a tool in ``commentary`` with a recipient, or the text in ``final``. Source:
https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_HEADER = re.compile(
    r"\s*(?:to=(?P<first>[^\s<]+)\s*)?(?:<\|channel\|>(?P<channel>\w+))?\s*(?:to=(?P<second>[^\s<]+))?\s*(?P<kind>.*)",
    re.DOTALL,
)
_END = re.compile(r"<\|(?:end|call|return)\|>")
START = "<|start|>assistant"
"""What begins a message after the first one."""


class HarmonyMessage(NamedTuple):
    """A message.

    Args:
        recipient: to whom, such as ``"functions.add"``; None is the user.
        kind: of its content, such as ``"<|constrain|>json"``; empty for text.
        content: None without the token that begins it.
    """

    channel: str | None
    recipient: str | None
    kind: str
    content: str | None


class Call(NamedTuple):
    """A call of a function.

    Args:
        thought: the text before the call.
        arguments: as written.
    """

    thought: str | None
    name: str
    content_type: str
    arguments: str


def messages(text: str) -> list[HarmonyMessage]:
    """The messages in an answer."""
    return [_message(part) for part in text.split(START)]


def _message(text: str) -> HarmonyMessage:
    header, mark, content = text.partition("<|message|>")
    found = _HEADER.fullmatch(header)
    assert found is not None  # it matches any text
    recipient = found["first"] or found["second"]
    return HarmonyMessage(found["channel"], recipient, found["kind"], _END.split(content)[0] if mark else None)


def call(text: str) -> Call | None:
    """The last call in an answer, also a malformed one; None if it has none."""
    found = messages(text)
    last = next((i for i in reversed(range(len(found))) if found[i].recipient is not None), None)
    if last is None:
        return None
    thought = "\n".join(message.content or "" for message in found[:last]) if last else None
    name = (found[last].recipient or "").removeprefix("functions.")
    return Call(thought, name, found[last].kind.strip() or "json", found[last].content or "")
