"""OpenAI's chat completions: requests, answers and their chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from flowrl.episodes.endpoint.answers import Reading
from flowrl.episodes.endpoint.flights import Completion
from flowrl.episodes.endpoint.messages import RequestError, invalid, template_message
from flowrl.episodes.endpoint.requests import CompletionRequest, Fields, read_fields, request_of
from flowrl.episodes.endpoint.session import Session
from flowrl.protocols.protocols import Sampling

_FIELDS = Fields(
    read=frozenset(
        {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "logprobs", "stream"}
        | {"stream_options"}
    ),
    preferences={"seed": None, "reasoning_effort": None, "verbosity": None, "parallel_tool_calls": True},
    refused={
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
    },
    ignored=frozenset({"store"}),
)


def parse(body: Any, sampling: Sampling, strict: bool) -> CompletionRequest:
    """The request of a body; raises `RequestError` if it asks for what is not supported."""
    body, overridden = read_fields(body, _FIELDS, sampling, strict)
    tools = body.get("tools", ())
    if not isinstance(tools, list | tuple) or not all(_is_function(tool) for tool in tools):
        raise invalid("tools is not a list of tools of the type function. Pass function tools.", "tools")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages is not a list of at least one message. Pass the conversation.", "messages")
    names: dict[str, str] = {}
    messages = [template_message(message, names, f"messages[{i}]") for i, message in enumerate(given)]
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise invalid("stream_options is not an object. Pass an object, or leave it out.", "stream_options")
    return request_of(
        body,
        messages,
        tools,
        "messages",
        ("max_tokens", "max_completion_tokens"),
        logprobs=bool(body.get("logprobs")),
        usage=bool(options.get("include_usage")),
        overridden=overridden,
    )


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


class ChatCompletion:
    """The answer to a request, as an object of the type ``chat.completion`` or as its chunks."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._sent = Reading()
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._shared = {"id": self.id, "created": int(time.time()), "model": request.model}

    @staticmethod
    def parse(body: Any, session: Session) -> CompletionRequest:
        """See `parse`."""
        return parse(body, session.chat.broker.sampling, session.strict)

    def data(self, completion: Completion) -> dict[str, Any]:
        """The whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.content}
        if completion.reading.thought:
            message["reasoning_content"] = completion.reading.thought
        if completion.calls:
            message["tool_calls"] = [_call(*call) for call in completion.calls]
        choice = {"index": 0, "message": message, "logprobs": self._log_probs(completion)}
        choice["finish_reason"] = completion.finish_reason
        return {**self._shared, "object": "chat.completion", "choices": [choice], "usage": _usage(completion)}

    def begin(self) -> str:
        """The first event."""
        return self._chunk({"role": "assistant", "content": ""})

    def partial(self, reading: Reading) -> str:
        """The events of what is new in an answer."""
        sent, self._sent = self._sent, reading
        thought, content = reading.thought[len(sent.thought) :], reading.content[len(sent.content) :]
        chunks = [{"reasoning_content": thought}] if thought else []
        return "".join(map(self._chunk, [*chunks, *([{"content": content}] if content else [])]))

    def end(self, completion: Completion) -> str:
        """The events of the rest of an answer: text, calls, its end, the usage if requested, and ``[DONE]``."""
        events = [self.partial(completion.reading)]
        for index, call in enumerate(completion.calls):
            events.append(self._chunk({"tool_calls": [{"index": index, **_call(*call)}]}))
        events.append(self._chunk({}, completion.finish_reason, self._log_probs(completion)))
        if self._request.usage:
            events.append(self._event({"choices": [], "usage": _usage(completion)}))
        return "".join(events) + "data: [DONE]\n\n"

    @staticmethod
    def error(error: RequestError) -> str:
        """The event of an error after the first one."""
        return f"data: {json.dumps(error.body)}\n\n"

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None, log_probs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}
        return self._event({"choices": [choice]})

    def _event(self, data: Mapping[str, Any]) -> str:
        return f"data: {json.dumps({**self._shared, 'object': 'chat.completion.chunk', **data})}\n\n"

    def _log_probs(self, completion: Completion) -> dict[str, Any] | None:
        return {"content": completion.log_probs, "refusal": None} if self._request.logprobs else None


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _usage(completion: Completion) -> dict[str, Any]:
    tokens = len(completion.response.ids)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": completion.prompt_tokens + tokens,
    }
