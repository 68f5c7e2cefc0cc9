"""Calls of Kimi K2: special tokens around an id, ``functions.name:index``, and the arguments as JSON.

Source: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, marked_calls

_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL = re.compile(rf"{re.escape(_BEGIN)}\s*(?:functions\.)?([^\s<>]+?)(?::\d+)?\s*{re.escape(_ARGUMENTS)}")
_EXPECTED = f'{_BEGIN}functions.name:0{_ARGUMENTS}{{"key": "value"}}{_END}'


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    return marked_calls(text, _SECTION[0], _BEGIN, _CALL, _EXPECTED)


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls."""
    written = (
        f"{_BEGIN}functions.{call.name}:{i}{_ARGUMENTS}{json.dumps(call.arguments)}{_END}"
        for i, call in enumerate(calls)
    )
    return f"{_SECTION[0]}{''.join(written)}{_SECTION[1]}"


KIMI = CallFormat(parse, write, special=True, begins=(_SECTION[0], _BEGIN))
