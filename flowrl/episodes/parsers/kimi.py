"""Calls of Kimi K2: special tokens around an id, ``functions.name:index``, and the arguments as JSON.

Source: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, call_of, json_at

_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL = re.compile(rf"{re.escape(_BEGIN)}\s*(?:functions\.)?([^\s<>]+?)(?::\d+)?\s*{re.escape(_ARGUMENTS)}")
_EXPECTED = f'{_BEGIN}functions.name:0{_ARGUMENTS}{{"key": "value"}}{_END}'


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    calls: list[ToolCall] = []
    end = text.find(_SECTION[0])
    while (start := text.find(_BEGIN, max(0, end))) >= 0:
        call = _CALL.match(text, start)
        if call is None:
            raise InvalidToolCall(f"{text[start:].strip()[:200]!r} is not a tool call; expected {_EXPECTED}")
        arguments, end = json_at(text, call.end(), _EXPECTED)
        calls.append(call_of({"name": call.group(1), "arguments": arguments}))
    if not calls and end >= 0:
        raise InvalidToolCall(f"{text[end:].strip()[:200]!r} has no tool call; expected {_EXPECTED}")
    return calls


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls."""
    written = (
        f"{_BEGIN}functions.{call.name}:{i}{_ARGUMENTS}{json.dumps(call.arguments)}{_END}"
        for i, call in enumerate(calls)
    )
    return f"{_SECTION[0]}{''.join(written)}{_SECTION[1]}"


KIMI = CallFormat(parse, write, special=True)
