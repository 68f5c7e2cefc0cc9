"""Requests of OpenAI's chat completions: what the policy reads of them, and the canonical form of a conversation.

Two messages are the same if the policy reads the same: null and absent fields, fields that no template reads, the ids
of tool calls, and white space and the order of keys in their arguments do not count. Text always does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from flowrl.data.text.transcript import Message
from flowrl.protocols.protocols import Sampling

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that the node sets, as parameters of `Sampling`."""

_PREFERENCES = {"seed": None, "reasoning_effort": None, "verbosity": None, "parallel_tool_calls": True}
"""Further fields that have no effect, with the value that asks for none."""

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "echo": (False,),
}
"""Fields that change an answer in a way that is not supported, with their supported values."""

_READ = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "logprobs", "stream"}
_IGNORED = {"stream_options", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


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


class CompletionRequest(NamedTuple):
    """A valid request.

    Args:
        messages: as the chat template reads them.
        tools: the schemas, for the chat template.
        prefix: digest of the conversation up to its last message of the assistant, and of the tools.
        after: how many messages that is.
        conversation: digest of the whole conversation.
        identity: digest of all that determines the answer: of a retry it is the same.
        overridden: fields about sampling that have no effect.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    prefix: str
    after: int
    conversation: str
    identity: str
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage: bool
    overridden: Sequence[str]


def parse(body: Any, sampling: Sampling, strict: bool) -> CompletionRequest:
    """The request of a body; raises `RequestError` if it asks for what is not supported."""
    if not isinstance(body, Mapping):
        raise _invalid("The body is not a JSON object. Send a request of chat completions.", None)
    body = {key: value for key, value in body.items() if value is not None}
    _refuse_unsupported(body)
    overridden = [*_overridden(body, sampling)]
    if strict and overridden:
        raise RequestError(
            400,
            "unsupported_value",
            f"{overridden[0]}={body[overridden[0]]!r} differs from the sampling of the run. Leave it out, or pass "
            f"Endpoint(strict=False) to override it.",
            overridden[0],
        )
    tools = body.get("tools", ())
    if not isinstance(tools, list | tuple) or not all(_is_function(tool) for tool in tools):
        raise _invalid("tools is not a list of tools of the type function. Pass function tools.", "tools")
    messages = _messages(body.get("messages"))
    after = max((i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if after == len(messages):
        raise _invalid(
            "The last message is one of the assistant, which the policy does not continue. Append a message of the "
            "role user or tool.",
            "messages",
        )
    digests = [chained("", tools)]
    for message in messages:
        digests.append(chained(digests[-1], form(message)))
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise _invalid("stream_options is not an object. Pass an object, or leave it out.", "stream_options")
    most, stop = _max_tokens(body), _stop(body.get("stop", ()))
    return CompletionRequest(
        model=str(body.get("model", "policy")),
        messages=messages,
        tools=tools,
        prefix=digests[after],
        after=after,
        conversation=digests[-1],
        identity=chained(digests[-1], [most, stop]),
        max_tokens=most,
        stop=stop,
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        overridden=overridden,
    )


def chained(digest: str, value: Any) -> str:
    """The digest of a sequence that continues one of this digest by a JSON-able value."""
    return xxhash.xxh3_128_hexdigest((digest + json.dumps(value, sort_keys=True)).encode())


def form(message: Message) -> Any:
    """The canonical form of a message that `template_message` returns."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"], calls, message.get("name"), message.get("reasoning_content")]


def template_message(message: Any, names: dict[str, str], where: str = "messages") -> dict[str, Any]:
    """A message as the chat template reads it.

    Args:
        names: of functions by the id of their calls; those of this message are added.
    """
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        roles = ", ".join(_ROLES)
        raise _invalid(f"{where} is not a message with one of the roles {roles}. Use these roles.", where)
    role = _ROLES[message["role"]]
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if role == "assistant":
        given = message.get("tool_calls") or []
        if not isinstance(given, list):
            raise _invalid(f"{where}.tool_calls is not a list. Send the calls unchanged.", f"{where}.tool_calls")
        if calls := [_call(call, names, f"{where}.tool_calls") for call in given]:
            read["tool_calls"] = calls
        if reasoning := message.get("reasoning_content"):
            read["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    name = message.get("name") or (names.get(str(message.get("tool_call_id"))) if role == "tool" else None)
    return read | ({"name": str(name)} if name else {})


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise _invalid("messages is not a list of at least one message. Pass the conversation.", "messages")
    names: dict[str, str] = {}
    return [template_message(message, names, f"messages[{i}]") for i, message in enumerate(given)]


def _text(content: Any, where: str) -> str:
    """The text of a content; its parts are lines."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _invalid(f"{where} is neither text nor a list of parts. Send text.", where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                400,
                "unsupported_value",
                f"{where} has a part of the type {kind!r}; expected text, since episodes have no images, audio or "
                f"files. Send text.",
                where,
            )
    return "\n".join(part["text"] for part in content)


def _call(call: Any, names: dict[str, str], where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where} has an entry without a function and its name. Send the calls unchanged.", where)
    names[str(call.get("id"))] = function["name"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # then the text itself is compared
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, supported in _REFUSED.items():
        if name in body and body[name] not in supported:
            expected = f"; expected {supported[0]!r}" if supported else ""
            raise RequestError(
                400,
                "unsupported_value" if supported else "unsupported_parameter",
                f"{name}={json.dumps(body[name])[:100]} is not supported{expected}. Leave it out.",
                name,
            )
    known = {*_READ, *_IGNORED, *_SAMPLING, *_PREFERENCES, *_REFUSED}
    if unknown := next((name for name in body if name not in known), None):
        raise RequestError(
            400, "unsupported_parameter", f"The parameter {unknown!r} is not supported. Leave it out.", unknown
        )


def _overridden(body: Mapping[str, Any], sampling: Sampling) -> Iterator[str]:
    for name in _SAMPLING:
        if name in body and body[name] != getattr(sampling, name):
            yield name
    for name, no_effect in _PREFERENCES.items():
        if name in body and body[name] != no_effect:
            yield name


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body]
    if any(type(number) is not int or number < 1 for number in given):
        raise _invalid("max_tokens is not a positive integer. Pass a number of tokens.", "max_tokens")
    return min(given, default=None)


def _stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if not all(isinstance(one, str) and one for one in strings):
        raise _invalid("stop is not a string or a list of strings, none of them empty. Correct it.", "stop")
    return strings


def _invalid(message: str, param: str | None) -> RequestError:
    return RequestError(400, "invalid_value", message, param)
