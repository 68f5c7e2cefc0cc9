"""Calls of GLM 4.5 to 4.7: XML pairs of keys and values, with the arguments as bare text.

.. code-block:: text

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>17</arg_value>
    </tool_call>

GLM 4.7 writes no line ends. Source: the chat template of https://huggingface.co/zai-org/GLM-4.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, value_of

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CALL = re.compile(r"\s*([^\s<>{}]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_EXPECTED = "<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>"


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    return [_call(block, tools) for block in _BLOCK.findall(text)]


def _call(block: str, tools: Tools) -> ToolCall:
    call = _CALL.fullmatch(block)
    if call is None or _ARGUMENT.sub("", call.group(2)):
        raise InvalidToolCall(f"{block.strip()[:200]!r} is not a tool call; expected {_EXPECTED}")
    name = call.group(1)
    given = ((key.strip(), value) for key, value in _ARGUMENT.findall(call.group(2)))
    return ToolCall(name, {key: value_of(value, tools.parameter(name, key)) for key, value in given})


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls."""
    return "\n".join(map(_written, calls))


def _written(call: ToolCall) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.arguments.items()}
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"


GLM = CallFormat(parse, write, begins=("<tool_call>",))
