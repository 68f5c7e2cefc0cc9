"""Published layouts of demonstrations and preferences, as a prompt and its responses.

- ``prompt`` with ``response``, ``completion``, ``chosen`` or ``rejected``: text, or lists of messages. A text prompt is
  one user message. A response in messages begins and ends with the assistant.
- ``messages``: a conversation that ends with the assistant.
- ``chosen`` and ``rejected`` as whole conversations, with or without ``prompt``: the messages that both begin with are
  the prompt.
- ``text``: a document without turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from flowrl.data.files import parse_json
from flowrl.data.proto.column_math import short
from flowrl.data.sources.prompt_rows import as_messages, messages_of
from flowrl.errors import DataError

Messages = list[dict[str, Any]]
Response = str | Messages


def conversation(where: str, record: Mapping[str, Any], last_only: bool) -> dict[str, Any]:
    """A record with ``messages`` as one with prompt and response.

    Args:
        last_only: whether only the last message is the response; otherwise the first of the assistant begins it.
    """
    messages = record["messages"]
    if both := [key for key in ("prompt", "response", "completion") if record.get(key) is not None]:
        raise DataError(
            f"{where}: the row has both messages and {both[0]}. Keep either messages, or prompt and response: pass "
            f"columns={{'messages': None}} or columns={{'{both[0]}': None}}.",
            code="prompts.bad-messages",
            where=where,
            key=both[0],
        )
    if not isinstance(messages, list) or len(messages) < 2:
        raise DataError(
            f"{where}: messages is {short(messages, 200)}. Expected a list of at least two messages, the last one "
            f"of the assistant.",
            code="prompts.bad-messages",
            where=where,
            found=short(messages, 200),
        )
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant" and set(roles[:i]) & {"user", "tool"}]
    first = len(messages) - 1 if last_only or not answers else answers[0]
    return {**record, "prompt": messages[:first], "response": messages[first:]}


def pair(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A record whose ``chosen`` and ``rejected`` are whole conversations as one with their common prompt."""
    sides = [record.get("chosen"), record.get("rejected")]
    if not all(isinstance(side, list) and side and _role(side[0]) not in (None, "assistant") for side in sides):
        return dict(record)
    chosen, rejected = (messages_of(where, record[name], name) for name in ("chosen", "rejected"))
    common = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    while common and not _role(chosen[common]) == _role(rejected[common]) == "assistant":
        common -= 1
    prompt = record.get("prompt")
    given = None if prompt is None else messages_of(where, as_messages(prompt))
    if not common or (given is not None and chosen[:common][-len(given) :] != given):
        _refuse_pair(where, chosen, given)
    return {**record, "prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _refuse_pair(where: str, chosen: Messages, prompt: Messages | None) -> NoReturn:
    what = "share no prompt" if prompt is None else "do not begin with the row's prompt"
    raise DataError(
        f"{where}: chosen and rejected are conversations that {what}: chosen is {short(chosen, 200)}. Expected the "
        f"same messages in both up to an answer of the assistant; correct the row, or pass map='file.py:function'.",
        code="prompts.bad-messages",
        where=where,
        found=short(chosen, 200),
    )


def response_of(where: str, name: str, response: Any) -> Response:
    """A response: text, or messages of which the first and the last are the assistant's."""
    if isinstance(response, str) and response.strip():
        return response
    if isinstance(response, list) and response and _role(response[0]) == _role(response[-1]) == "assistant":
        written = (message for message in response if _role(message) == "assistant")
        if all(message.get("content") or message.get("tool_calls") for message in written):
            return messages_of(where, response, name)
    raise DataError(
        f"{where}: {name} is {short(response, 200)}. Expected non-empty text, or a list of messages that begins and "
        f'ends with the assistant: [{{"role": "assistant", "content": "..."}}].',
        code="prompts.bad-response",
        where=where,
        key=name,
        found=short(response, 200),
    )


def text_of(response: Response) -> str:
    """The text of a response; of messages, that of the last."""
    return response if isinstance(response, str) else str(response[-1].get("content", ""))


def characters_of(response: Response) -> int:
    """Number of characters that a chat template renders."""
    if isinstance(response, str):
        return len(response)
    return sum(len(str(message.get(key, ""))) for message in response for key in ("content", "tool_calls"))


def refuse_same(where: str, chosen: Response, rejected: Response) -> None:
    """Refuse a pair of equal responses."""
    same = chosen == rejected
    if same or (isinstance(chosen, str) != isinstance(rejected, str) and text_of(chosen) == text_of(rejected)):
        raise DataError(
            f"{where}: chosen and rejected are the same text, {short(text_of(chosen), 80)}, so neither is preferred. "
            f"Remove the row, or leave it out: map='file.py:function', which returns None for it.",
            code="prompts.identical-pair",
            where=where,
        )


def label_of(where: str, label: Any) -> bool:
    """Whether a response is desirable."""
    if not isinstance(label, bool):
        raise DataError(
            f"{where}: label is {short(label, 80)}. Expected true (desirable) or false; map others: "
            f"map='file.py:function'.",
            code="prompts.wrong-type",
            where=where,
            key="label",
            found=short(label, 80),
        )
    return label


def margin_of(where: str, margin: Any) -> float:
    """The margin of a pair; 0 if it is None."""
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(
            f"{where}: margin is {short(margin, 80)}. Expected a finite number; leave the key out to read none: "
            f"columns={{'margin': None}}.",
            code="prompts.wrong-type",
            where=where,
            key="margin",
            found=short(margin, 80),
        )
    return float(margin)


def tools_of(where: str, tools: Any) -> list[Any]:
    """The tools of a conversation: a list, or the JSON of one."""
    try:
        found = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise DataError(
            f"{where}: tools is {short(tools, 200)}. Expected a list of JSON schemas, or its JSON; correct or remove "
            f"it.",
            code="prompts.wrong-type",
            where=where,
            key="tools",
            found=short(tools, 200),
        )
    return found
