"""Calls of Hermes and Qwen 2.5 and 3: any number of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Source: https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools
from flowrl.episodes.parsers.plain_json import call_in

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    return [call_in(written) for written in _CALL.findall(text)]


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls."""
    return "\n".join(f"<tool_call>\n{json.dumps(call._asdict())}\n</tool_call>" for call in calls)


HERMES = CallFormat(parse, write, begins=("<tool_call>",))
