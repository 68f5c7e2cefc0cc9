"""OpenAI's responses API: requests, answers and their events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.data.text.transcript import Message
from flowrl.episodes.endpoint.answers import Reading
from flowrl.episodes.endpoint.flights import Completion, Stored
from flowrl.episodes.endpoint.messages import RequestError, invalid, template_message
from flowrl.episodes.endpoint.requests import CompletionRequest, Fields, read_fields, refused_value, request_of
from flowrl.episodes.endpoint.response_items import messages_of, tools_of
from flowrl.episodes.endpoint.session import Session
from flowrl.protocols.protocols import Sampling

_LOG_PROBS = "message.output_text.logprobs"
_INCLUDE = (_LOG_PROBS, "reasoning.encrypted_content")  # thoughts are there as text in any case

_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "tools")

_FIELDS = Fields(
    read=frozenset({"model", "input", "instructions", "tools", "max_output_tokens", "stream", "stream_options"})
    | {"previous_response_id", "store", "include", "text"},
    preferences={"reasoning": None, "verbosity": None, "parallel_tool_calls": True},
    refused={
        "tool_choice": ("auto",),
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "conversation": (),
        "prompt": (),
    },
)


def parse(body: Any, sampling: Sampling, strict: bool, stored: Mapping[str, Stored]) -> CompletionRequest:
    """The request of a body; raises `RequestError` if it asks for what is not supported.

    Args:
        stored: conversations by the id of a response.
    """
    if isinstance(body, Mapping) and isinstance(text := body.get("text"), Mapping):
        if (text.get("format") or {"type": "text"}) != {"type": "text"}:
            raise refused_value("text.format", text["format"], ({"type": "text"},))
        body = {**body, "verbosity": text.get("verbosity")}
    body, overridden = read_fields(body, _FIELDS, sampling, strict)
    include = body.get("include", ())
    if not isinstance(include, list | tuple):
        raise invalid("include is not a list. Leave it out.", "include")
    if wrong := next((one for one in include if one not in _INCLUDE), None):
        raise refused_value("include", wrong, _INCLUDE)
    names: dict[str, str] = {}
    messages, first = list[Message](), list[Message]()
    if instructions := body.get("instructions"):
        first = [template_message({"role": "system", "content": instructions}, names, "instructions")]
    if (previous := body.get("previous_response_id")) is not None:
        if not isinstance(previous, str) or previous not in stored:
            raise RequestError(
                400,
                "previous_response_not_found",
                f"There is no stored response {previous!r} in this episode. Send the whole conversation as input, or "
                f"ask for that response without store=False.",
                "previous_response_id",
            )
        messages, names = [*stored[previous].messages], {**stored[previous].names}
    messages += messages_of(body.get("input", []), names)
    if not messages:
        raise invalid("input has no message. Pass the conversation.", "input")
    return request_of(
        body,
        [*first, *messages],
        tools_of(body.get("tools", ())),
        "input",
        ("max_output_tokens",),
        logprobs=_LOG_PROBS in include,
        usage=True,
        overridden=overridden,
        stored=len(first) if body.get("store", True) else None,
        names=names,
        echo={name: body[name] for name in _ECHOED if name in body}
        | {"temperature": sampling.temperature, "top_p": sampling.top_p},
    )


class ModelResponse:
    """The answer to a request, as an object of the type ``response`` or as its events."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self.id = _id("resp")
        self._created = time.time()
        self._output: list[dict[str, Any]] = []  # complete items
        self._item: dict[str, Any] | None = None  # the one whose text is sent
        self._sent = Reading()
        self._number = 0

    @staticmethod
    def parse(body: Any, session: Session) -> CompletionRequest:
        """See `parse`."""
        return parse(body, session.chat.broker.sampling, session.strict, session.stored)

    def data(self, completion: Completion) -> dict[str, Any]:
        """The whole answer."""
        self.end(completion)
        return self._response(completion)

    def begin(self) -> str:
        """The first events."""
        return self._event("response.created", response=self._response()) + self._event(
            "response.in_progress", response=self._response()
        )

    def partial(self, reading: Reading) -> str:
        """The events of what is new in an answer."""
        sent, self._sent = self._sent, reading
        events = list[str]()
        if thought := reading.thought[len(sent.thought) :]:
            events += self._text("reasoning", thought)
        if content := reading.content[len(sent.content) :]:
            events += self._text("message", content)
        return "".join(events)

    def end(self, completion: Completion) -> str:
        """The events of the rest of an answer: text, calls, and its end."""
        events = [self.partial(completion.reading)]
        if completion.content is not None and not completion.reading.content:
            events += self._open("message")
        events += self._close(completion.log_probs or ())
        for call in completion.calls:
            events += self._call(*call)
        how = "incomplete" if completion.finish_reason == "length" else "completed"
        events.append(self._event(f"response.{how}", response=self._response(completion)))
        return "".join(events)

    def error(self, error: RequestError) -> str:
        """The event of an error after the first one."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _text(self, kind: str, text: str) -> list[str]:
        """The events of further text of an item, which begins if it has not."""
        events = list[str]()
        if self._item is None or self._item["type"] != kind:
            events = [*self._close(), *self._open(kind)]
        assert self._item is not None
        self._item["content"][0]["text"] += text
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*events, self._of_part(f"response.{_text_of(kind)}.delta", delta=text, **more)]

    def _open(self, kind: str) -> list[str]:
        part: dict[str, Any] = {"type": _text_of(kind), "text": ""}
        if kind == "message":
            part["annotations"] = []
        more = {"id": _id("rs"), "summary": []} if kind == "reasoning" else {"id": _id("msg"), "role": "assistant"}
        self._item = {"type": kind, "status": "in_progress", **more, "content": []}
        added = self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        self._item["content"] = [part]
        return [added, self._of_part("response.content_part.added", part=part)]

    def _close(self, log_probs: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """The events of an item that is complete."""
        item = self._item
        if item is None:
            return []
        item["status"] = "completed"
        (part,) = item["content"]
        more: dict[str, Any] = {}
        if item["type"] == "message":
            part["logprobs"] = more["logprobs"] = list(log_probs)
        events = [
            self._of_part(f"response.{part['type']}.done", text=part["text"], **more),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._item = None
        return events

    def _call(self, id: str, name: str, arguments: str) -> list[str]:
        item = {"type": "function_call", "id": _id("fc"), "call_id": id, "name": name, "arguments": arguments}
        item["status"] = "completed"
        where = {"item_id": item["id"], "output_index": len(self._output)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        events = [
            self._event("response.output_item.added", output_index=len(self._output), item=begun),
            self._event("response.function_call_arguments.delta", **where, delta=arguments),
            self._event("response.function_call_arguments.done", **where, name=name, arguments=arguments),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        return events

    def _of_part(self, kind: str, **more: Any) -> str:
        assert self._item is not None
        where = {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **where, **more)

    def _event(self, kind: str, **more: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    def _response(self, completion: Completion | None = None) -> dict[str, Any]:
        """The object; without its answer, one in progress."""
        cut = completion is not None and completion.finish_reason == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if completion is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._request.model,
            "output": [] if completion is None else self._output,
            "parallel_tool_calls": True,
            "store": self._request.stored is not None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None if completion is None else _usage(completion),
            **self._request.echo,
        }


def _text_of(kind: str) -> str:
    """The type of the text in an item."""
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _usage(completion: Completion) -> dict[str, Any]:
    tokens = len(completion.response.ids)
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},  # the engine does not tell
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": completion.thought_tokens},
        "total_tokens": completion.prompt_tokens + tokens,
    }
