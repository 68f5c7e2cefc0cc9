"""Calls of Qwen3-Coder, Qwen 3.5 and later, and Nemotron 3: XML with the arguments as bare text.

.. code-block:: text

    <tool_call>
    <function=add>
    <parameter=a>
    17
    </parameter>
    </function>
    </tool_call>

Source: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, value_of

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>\s*|\Z)", re.DOTALL)
_EXPECTED = "<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>"


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    return [_call(block, tools) for block in _BLOCK.findall(text)]


def _call(block: str, tools: Tools) -> ToolCall:
    function = _FUNCTION.fullmatch(block)
    body = "" if function is None else function.group(2).strip("\n")
    rest = _PARAMETER.sub("", body)
    if function is None or rest.strip():
        raise InvalidToolCall(f"{block.strip()[:200]!r} is not a tool call; expected {_EXPECTED}")
    name = function.group(1).strip()
    given = ((key.strip(), value) for key, value in _PARAMETER.findall(body))
    return ToolCall(name, {key: value_of(value, tools.parameter(name, key)) for key, value in given})


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls."""
    return "\n".join(map(_written, calls))


def _written(call: ToolCall) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


QWEN3_CODER = CallFormat(parse, write, begins=("<tool_call>",))
