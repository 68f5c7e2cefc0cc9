"""Calls of gpt-oss: a message of OpenAI's harmony format to ``functions.name``, with the arguments as JSON.

.. code-block:: text

    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 17}<|call|>

The recipient may also be before the channel. Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from flowrl.data.text.harmony import messages
from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, call_of, json_at

_EXPECTED = '<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"key": "value"}'


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    calls: list[ToolCall] = []
    for message in messages(text):
        if message.recipient is None:
            continue
        if message.content is None:
            raise InvalidToolCall(f"the call of {message.recipient!r} has no <|message|>; expected {_EXPECTED}")
        arguments, _ = json_at(message.content, 0, _EXPECTED)
        calls.append(call_of({"name": message.recipient.removeprefix("functions."), "arguments": arguments}))
    return calls


def write(calls: Sequence[ToolCall]) -> str:
    """The text of a call, with the header that the chat template of gpt-oss writes."""
    (call,) = calls
    return f" to=functions.{call.name}<|channel|>commentary json<|message|>{json.dumps(call.arguments)}<|call|>"


GPT_OSS = CallFormat(parse, write, special=True, several=False)
