"""The input of OpenAI's responses API: items as messages, and flat tools as those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.data.text.transcript import Message
from flowrl.episodes.endpoint.messages import RequestError, invalid, template_message

_KINDS = ("message", "reasoning", "function_call", "function_call_output")
"""The types of items."""


def messages_of(given: Any, names: dict[str, str]) -> list[Message]:
    """The messages of an input. Neighboring items of the assistant are one message: a thought, a text, and calls.

    Args:
        names: of functions by the id of their calls; those of the input are added.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid("input is neither text nor a list of items. Pass the conversation.", "input")
    found: list[Message] = []
    answer: dict[str, Any] = {}
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = _kind(item, where)
        if kind == "function_call_output" or (kind == "message" and item["role"] != "assistant"):
            found += _answer(answer, names, where)
            answer = {}
            found.append(template_message(_other(item, kind), names, where))
            continue
        if (kind == "reasoning" and answer) or (kind == "message" and answer.keys() & {"content", "tool_calls"}):
            found += _answer(answer, names, where)
            answer = {}
        _add(answer, item, kind, where)
    return [*found, *_answer(answer, names, "input")]


def tools_of(given: Any) -> Sequence[Mapping[str, Any]]:
    """The schemas of flat function tools, as chat completions have them."""
    if not isinstance(given, list | tuple):
        raise invalid("tools is not a list. Pass function tools.", "tools")
    for tool in given:
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
            raise RequestError(
                400,
                "unsupported_value",
                f"tools has one of the type {kind!r}; expected {{'type': 'function', 'name': ..., 'parameters': ...}}, "
                f"which the program runs. Pass function tools.",
                "tools",
            )
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}
        for tool in given
    ]


def _kind(item: Any, where: str) -> str:
    kind = None
    if isinstance(item, Mapping):
        kind = item.get("type") or ("message" if "role" in item else None)
    if kind not in _KINDS or (kind == "message" and "role" not in item):
        raise RequestError(
            400,
            "unsupported_value",
            f"{where} is an item of the type {kind!r}; expected {', '.join(_KINDS)}. Send the items of the "
            f"conversation itself.",
            where,
        )
    return str(kind)


def _other(item: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A message that is not of the assistant."""
    if kind == "message":
        return item
    return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}


def _add(answer: dict[str, Any], item: Mapping[str, Any], kind: str, where: str) -> None:
    """Add an item to a message of the assistant."""
    if kind == "message":
        answer["content"] = item.get("content")
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        answer.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
    else:
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
        ):
            raise invalid(f"{where} is a thought without a list of texts. Send the item unchanged.", where)
        answer["reasoning_content"] = "\n".join(part["text"] for part in parts)


def _answer(answer: Mapping[str, Any], names: dict[str, str], where: str) -> list[Message]:
    """A message of the assistant, if it has any item."""
    return [template_message({"role": "assistant", **answer}, names, where)] if answer else []
