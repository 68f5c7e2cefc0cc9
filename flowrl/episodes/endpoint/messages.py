"""The canonical form of a conversation: messages as the chat template reads them, and digests of what counts in them.

Two messages are the same if the policy reads the same: null and absent fields, fields that no template reads, the ids
of tool calls, and white space and the order of keys in their arguments do not count. Text always does; thoughts are
compared apart from it, since a template may drop them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from flowrl.data.text.transcript import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_TEXTS = ("text", "input_text", "output_text")
"""The types of parts that are text."""


class RequestError(Exception):
    """A request that gets an error in OpenAI's format.

    Args:
        status: of HTTP.
        code: such as ``"unsupported_parameter"``, or a code of flowrl's errors.
        param: the field of the request.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param

    @property
    def body(self) -> dict[str, Any]:
        """As JSON-able data."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None) -> RequestError:
    """The error of a field with an invalid value."""
    return RequestError(400, "invalid_value", message, param)


def chained(digest: str, value: Any) -> str:
    """The digest of a sequence that continues one of this digest by a JSON-able value."""
    return xxhash.xxh3_128_hexdigest((digest + json.dumps(value, sort_keys=True)).encode())


def form(message: Message) -> Any:
    """The canonical form of a message that `template_message` returns, without its thought."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"], calls, message.get("name")]


def thoughts_in(messages: Sequence[Message]) -> tuple[str, ...]:
    """The thought of each message of the assistant; empty if it has none."""
    return tuple(one.get("reasoning_content", "") for one in messages if one["role"] == "assistant")


def with_thoughts(messages: Sequence[Message], thoughts: Sequence[str]) -> list[Message]:
    """The messages, of which the first ones of the assistant have these thoughts."""
    remaining = iter(thoughts)
    return [
        {**one, "reasoning_content": thought}
        if one["role"] == "assistant" and (thought := next(remaining, None)) is not None
        else one
        for one in messages
    ]


def template_message(message: Any, names: dict[str, str], where: str = "messages") -> dict[str, Any]:
    """A message as the chat template reads it, with its thought as ``reasoning_content``.

    Args:
        names: of functions by the id of their calls; those of this message are added.
    """
    if not isinstance(message, Mapping) or str(message.get("role")) not in _ROLES:
        roles = ", ".join(_ROLES)
        raise invalid(f"{where} is not a message with one of the roles {roles}. Use these roles.", where)
    role = _ROLES[message["role"]]
    read: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if role == "assistant":
        given = message.get("tool_calls") or []
        if not isinstance(given, list):
            raise invalid(f"{where}.tool_calls is not a list. Send the calls unchanged.", f"{where}.tool_calls")
        if calls := [_call(call, names, f"{where}.tool_calls") for call in given]:
            read["tool_calls"] = calls
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            read["reasoning_content"] = text_of(thought, f"{where}.reasoning_content")
    name = message.get("name") or (names.get(str(message.get("tool_call_id"))) if role == "tool" else None)
    return read | ({"name": str(name)} if name else {})


def text_of(content: Any, where: str) -> str:
    """The text of a content; its parts are lines."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{where} is neither text nor a list of parts. Send text.", where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                400,
                "unsupported_value",
                f"{where} has a part of the type {kind!r}; expected text, since episodes have no images, audio or "
                f"files. Send text.",
                where,
            )
    return "\n".join(part["text"] for part in content)


def arguments_of(written: Any) -> Any:
    """The arguments of a call: an object where they are JSON, and else the text itself, which is then compared."""
    if isinstance(written, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(written)
    return written


def _call(call: Any, names: dict[str, str], where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} has an entry without a function and its name. Send the calls unchanged.", where)
    names[str(call.get("id"))] = function["name"]
    arguments = arguments_of(function.get("arguments") or "{}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
