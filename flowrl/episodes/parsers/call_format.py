"""`CallFormat`: how a family of models writes tool calls; and what the formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.data.text.control_tokens import unquoted
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes.environment import InvalidToolCall, ToolCall


class Tools(NamedTuple):
    """What a parser may know of the tools.

    Args:
        schemas: of each tool, as chat templates get them.
        tokenizer: of the policy.
    """

    schemas: Sequence[Mapping[str, Any]] = ()
    tokenizer: ChatTokenizer | None = None

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """The JSON schema of a parameter; empty if no tool has it. References within it are resolved."""
        for schema in self.schemas:
            function = schema["function"]
            if function["name"] == tool:
                parameters = function.get("parameters") or {}  # OpenAI's schemas may omit them
                found = parameters.get("properties", {}).get(name)
                return {"$defs": parameters.get("$defs", {}), **(found if isinstance(found, Mapping) else {})}
        return {}


Parse = Callable[[str, Tools], Sequence[ToolCall]]
"""Parses the calls in an answer; raises `InvalidToolCall` for a malformed call."""


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    Args:
        parse: the calls in an answer.
        write: the text of calls, as a model writes it.
        special: whether special tokens of the tokenizer mark the calls. Answers omit them, so `parse` gets the text
            with its special tokens.
        several: whether an answer may have more than one call.
        begins: with which texts calls begin; none if that is not known.
        refuse_missing: raises `FlowrlError` if `parse` needs what is not installed.
    """

    parse: Parse
    write: Callable[[Sequence[ToolCall]], str]
    special: bool = False
    several: bool = True
    begins: tuple[str, ...] = ()
    refuse_missing: Callable[[], object] = lambda: None

    def calls(self, text: str, ids: Sequence[int], tools: Tools) -> Sequence[ToolCall]:
        """The calls in an answer: in its text, or if special tokens mark them, in the text of its tokens.

        Raises:
            InvalidToolCall: one is malformed.
        """
        if not self.special or tools.tokenizer is None:
            return self.parse(text, tools)
        ended = ids[-1] in tools.tokenizer.ends
        return self.parsed(tools.tokenizer.control_tokens.sampled(ids[:-1] if ended else ids), tools)

    def parsed(self, text: str, tools: Tools) -> Sequence[ToolCall]:
        """The calls in a text; if special tokens mark them, one in which spelled control tokens are quoted.

        Raises:
            InvalidToolCall: one is malformed.
        """
        calls = self.parse(text, tools)
        return [ToolCall(*map(unquoted, call)) for call in calls] if self.special else calls


def call_of(written: object, arguments: Sequence[str] = ("arguments",)) -> ToolCall:
    """The call in an object ``{"name": ..., "arguments": {...}}``.

    Args:
        arguments: names of the entry with the arguments; the first that is there counts.
    """
    expected = f'{{"name": "...", "{arguments[0]}": {{...}}}}'
    if not isinstance(written, dict) or not isinstance(written.get("name"), str):
        raise InvalidToolCall(f"{str(written)[:200]!r} is not a tool call; expected {expected}")
    given: Any = next((written[name] for name in arguments if name in written), {})
    if not isinstance(given, dict):
        raise InvalidToolCall(f"the arguments of {written['name']!r} are {given!r}; expected an object")
    return ToolCall(written["name"], given)


def marked_calls(text: str, section: str, begin: str, head: re.Pattern[str], expected: str) -> list[ToolCall]:
    """The calls of a format whose special tokens mark a section of calls, and the begin of each.

    Args:
        head: of a call, from `begin` to its arguments, which are JSON; the group that matches is the name.
        expected: a call of the format, for errors.

    Raises:
        InvalidToolCall: a call is malformed, or the section has none.
    """
    calls: list[ToolCall] = []
    end = text.find(section)
    while (start := text.find(begin, max(0, end))) >= 0:
        call = head.match(text, start)
        if call is None:
            raise InvalidToolCall(f"{text[start:].strip()[:200]!r} is not a tool call; expected {expected}")
        name = next(filter(None, call.groups())).strip()
        arguments, end = json_at(text, call.end(), expected)
        calls.append(call_of({"name": name, "arguments": arguments}))
    if not calls and end >= 0:
        raise InvalidToolCall(f"{text[end:].strip()[:200]!r} has no tool call; expected {expected}")
    return calls


def json_at(text: str, start: int, expected: str) -> tuple[Any, int]:
    """The JSON value that begins in `text` at `start`, after white space, and where it ends."""
    while text[start : start + 1].isspace():
        start += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates, which no tokenizer encodes
    except (ValueError, RecursionError):
        raise InvalidToolCall(f"{text[start:].strip()[:200]!r} is not a tool call; expected {expected}") from None
    return value, end


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """An argument that a format writes as bare text, by the schema of its parameter.

    It is JSON where the schema allows that type of value, and the text itself otherwise.
    """
    types = _types(schema, schema.get("$defs", {}))
    if types <= {"string"}:
        return text
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # as in `json_at`
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or _type_of(value) in types else text


def _types(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names: of numbers ``"number"``."""
    if "$ref" in schema:
        return _types(definitions.get(schema["$ref"].rpartition("/")[2], {}), definitions)
    several = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    named = schema.get("type", [])
    found = {*named} if isinstance(named, list) else {named}
    found |= {_type_of(value) for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ()))}
    found = {"number" if name == "integer" else name for name in found}
    return found.union(*(_types(each, definitions) for each in several))


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
