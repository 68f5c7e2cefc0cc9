"""A call as the whole answer: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, call_of


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """The call in an answer; raises `InvalidToolCall` for a malformed object with a name."""
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [call_in(text)] if isinstance(written, dict) and "name" in written else []


def call_in(text: str) -> ToolCall:
    """The call that a text is; raises `InvalidToolCall`."""
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False).encode()  # fails for lone surrogates, which no tokenizer encodes
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise InvalidToolCall(
            f'{text.strip()[:200]!r} is not a tool call; expected {{"name": "...", "arguments": {{...}}}}'
        )
    return call_of(call)


def write(calls: Sequence[ToolCall]) -> str:
    """The text of a call."""
    return json.dumps(calls[0]._asdict())


PLAIN_JSON = CallFormat(parse, write, several=False, begins=("{",))
