"""`CompletionRequest`: what a request asks the policy, of OpenAI's chat completions or responses alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.data.text.transcript import Message
from flowrl.episodes.endpoint.messages import RequestError, chained, form, invalid, thoughts_in
from flowrl.protocols.protocols import Sampling

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that the node sets, as parameters of `Sampling`."""

_IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}


class Fields(NamedTuple):
    """The fields of an API, besides those of both.

    Args:
        read: fields that have an effect.
        preferences: fields about sampling that have none, with the value that asks for none.
        refused: fields that change an answer in a way that is not supported, with their supported values.
        ignored: fields that do not concern the policy.
    """

    read: frozenset[str]
    preferences: Mapping[str, Any]
    refused: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str] = frozenset()


class CompletionRequest(NamedTuple):
    """A valid request.

    Args:
        messages: as `template_message` returns them.
        tools: the schemas, for the chat template.
        prefix: digest of the conversation up to its last message of the assistant, and of the tools; without thoughts.
        after: how many messages that is.
        thoughts: of the messages of the assistant.
        conversation: digest of the whole conversation, without thoughts.
        identity: digest of all that determines the answer: of a retry it is the same.
        overridden: fields about sampling that have no effect.
        stored: of the responses API, how many of the first messages a later response does not continue, which are its
            instructions; None if none may continue this one.
        names: of functions by the id of their calls.
        echo: fields of the body that the answer repeats.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    prefix: str
    after: int
    thoughts: tuple[str, ...]
    conversation: str
    identity: str
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage: bool
    overridden: Sequence[str]
    stored: int | None = None
    names: Mapping[str, str] = {}
    echo: Mapping[str, Any] = {}


def read_fields(body: Any, fields: Fields, sampling: Sampling, strict: bool) -> tuple[Mapping[str, Any], list[str]]:
    """The fields of a body that are not null, and the names of those about sampling that have no effect.

    Raises:
        RequestError: it has a field that is not supported, or with `strict` one that has no effect.
    """
    if not isinstance(body, Mapping):
        raise invalid("The body is not a JSON object. Send a request of OpenAI's API.", None)
    body = {key: value for key, value in body.items() if value is not None}
    _refuse_unsupported(body, fields)
    overridden = [*_overridden(body, fields, sampling)]
    if strict and overridden:
        raise RequestError(
            400,
            "unsupported_value",
            f"{overridden[0]}={body[overridden[0]]!r} differs from the sampling of the run. Leave it out, or pass "
            f"Endpoint(strict=False) to override it.",
            overridden[0],
        )
    return body, overridden


def request_of(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    where: str,
    most: Sequence[str],
    **more: Any,
) -> CompletionRequest:
    """The request of valid fields and messages, with its digests.

    Args:
        where: the field with the messages.
        most: fields that bound the tokens of an answer.
        more: further fields of the request.

    Raises:
        RequestError: the policy would continue a message of the assistant; or a field has an invalid value.
    """
    after = max((i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if after == len(messages):
        raise invalid(
            "The last message is one of the assistant, which the policy does not continue. Append a message of the "
            "role user or tool.",
            where,
        )
    digests = [chained("", tools)]
    for message in messages:
        digests.append(chained(digests[-1], form(message)))
    thoughts, tokens, stop = thoughts_in(messages), _max_tokens(body, most), _stop(body.get("stop", ()))
    return CompletionRequest(
        model=str(body.get("model", "policy")),
        messages=messages,
        tools=tools,
        prefix=digests[after],
        after=after,
        thoughts=thoughts,
        conversation=digests[-1],
        identity=chained(digests[-1], [thoughts, tokens, stop]),
        max_tokens=tokens,
        stop=stop,
        stream=bool(body.get("stream")),
        **more,
    )


def refused_value(name: str, value: Any, supported: Sequence[Any]) -> RequestError:
    """The error of a field, or of this value of it, that is not supported."""
    expected = f"; expected {supported[0]!r}" if supported else ""
    return RequestError(
        400,
        "unsupported_value" if supported else "unsupported_parameter",
        f"{name}={json.dumps(value)[:100]} is not supported{expected}. Leave it out.",
        name,
    )


def _refuse_unsupported(body: Mapping[str, Any], fields: Fields) -> None:
    for name, supported in fields.refused.items():
        if name in body and body[name] not in supported:
            raise refused_value(name, body[name], supported)
    known = {*fields.read, *fields.ignored, *fields.preferences, *fields.refused, *_SAMPLING, *_IGNORED}
    if unknown := next((name for name in body if name not in known), None):
        raise RequestError(
            400, "unsupported_parameter", f"The parameter {unknown!r} is not supported. Leave it out.", unknown
        )


def _overridden(body: Mapping[str, Any], fields: Fields, sampling: Sampling) -> Iterator[str]:
    for name in _SAMPLING:
        if name in body and body[name] != getattr(sampling, name):
            yield name
    for name, no_effect in fields.preferences.items():
        if name in body and body[name] != no_effect:
            yield name


def _max_tokens(body: Mapping[str, Any], names: Sequence[str]) -> int | None:
    given = [body[name] for name in names if name in body]
    if any(type(number) is not int or number < 1 for number in given):
        raise invalid(f"{names[0]} is not a positive integer. Pass a number of tokens.", names[0])
    return min(given, default=None)


def _stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if not all(isinstance(one, str) and one for one in strings):
        raise invalid("stop is not a string or a list of strings, none of them empty. Correct it.", "stop")
    return strings
