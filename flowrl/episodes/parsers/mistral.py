"""Calls of Mistral: ``[TOOL_CALLS]`` and a list of JSON objects, or names with ``[ARGS]`` and their arguments.

Models up to Mistral Small 3 write ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``, later ones
``[TOOL_CALLS]name[ARGS]{...}`` for each call, some with ``[CALL_ID]`` and an id after the name. Source:
https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling and its tokenizers, mistral-common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, call_of, json_at

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_EXPECTED = f'{_MARK} [{{"name": "...", "arguments": {{...}}}}] or {_MARK}name[ARGS]{{"key": "value"}}'


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    calls: list[ToolCall] = []
    end = 0
    while (start := text.find(_MARK, end)) >= 0:
        start += len(_MARK)
        if (named := _NAMED.match(text, start)) is not None:
            arguments, end = json_at(text, named.end(), _EXPECTED)
            calls.append(call_of({"name": named.group(1), "arguments": arguments}))
            continue
        listed, end = json_at(text, start, _EXPECTED)
        if not isinstance(listed, list) or not listed:
            raise InvalidToolCall(f"{text[start:].strip()[:200]!r} is not a list of tool calls; expected {_EXPECTED}")
        calls += map(call_of, listed)
    return calls


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls, as a list."""
    return f"{_MARK} {json.dumps([call._asdict() for call in calls])}"


MISTRAL = CallFormat(parse, write, special=True, begins=(_MARK,))
