"""Calls of Llama 3.1, 3.2 and 3.3: ``{"name": ..., "parameters": {...}}``, several separated by ``;``.

An answer starts with them, or with ``<|python_tag|>``. Text after them is ignored.
Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from flowrl.episodes.environment import ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, call_of, json_at

_TAG = "<|python_tag|>"
_EXPECTED = '{"name": "...", "parameters": {...}}'
_NEXT = re.compile(r"\s*;\s*(?=\{)")


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The calls in an answer; raises `InvalidToolCall` for a malformed call."""
    before, tag, after = text.partition(_TAG)
    written = after if tag else before
    if not tag and not (written.lstrip().startswith("{") and '"name"' in written):
        return []
    calls, end = [], 0
    while True:
        found, end = json_at(written, end, _EXPECTED)
        calls.append(call_of(found, ("parameters", "arguments")))
        if (following := _NEXT.match(written, end)) is None:
            return calls
        end = following.end()


def write(calls: Sequence[ToolCall]) -> str:
    """The text of calls."""
    return "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls)


LLAMA3_JSON = CallFormat(parse, write, special=True, begins=(_TAG, "{"))
