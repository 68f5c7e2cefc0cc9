"""Calls of DeepSeek R1, V3 and V3.1: special tokens around a name and the arguments as JSON.

V3 and R1 write ``function``, the name, and a block of JSON; V3.1 writes the name and the JSON alone. Source: the chat
templates of https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 and https://huggingface.co/deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, marked_calls

_SECTION = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_BEGIN, _SEPARATOR, _END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
_CALL = re.compile(rf"{_BEGIN}\s*(?:function{_SEPARATOR}([^\n<]+)\n```json\n|([^\n<]+){_SEPARATOR})")
_EXPECTED = f'{_BEGIN}function{_SEPARATOR}name\\n```json\\n{{"key": "value"}}\\n```{_END}'


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    return marked_calls(text, _SECTION[0], _BEGIN, _CALL, _EXPECTED)


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls, as V3 writes it."""
    written = (
        f"{_BEGIN}function{_SEPARATOR}{call.name}\n```json\n{json.dumps(call.arguments)}\n```{_END}" for call in calls
    )
    return _SECTION[0] + "\n".join(written) + _SECTION[1]


DEEPSEEK = CallFormat(parse, write, special=True, begins=(_SECTION[0], _BEGIN))
