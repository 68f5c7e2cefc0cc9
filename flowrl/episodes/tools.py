"""Tools: typed functions that the policy may call, their schema from their signature."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes.calls import called
from flowrl.episodes.environment import ToolCall
from flowrl.errors import DefinitionError, EpisodeError, offer

Parser = Callable[[str], Sequence[ToolCall]]
"""The calls in a text; it raises `InvalidToolCall` for what looks like one and cannot be read."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> list[ToolCall]:
    """Calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number.

    Raises:
        InvalidToolCall: what stands there is no call.
    """
    return [_call(written) for written in _HERMES.findall(text)]


def whole_json(text: str) -> list[ToolCall]:
    """A call as the whole of an answer: ``{"name": ..., "arguments": {...}}``; other texts hold none.

    Raises:
        InvalidToolCall: an object with a name that is no call.
    """
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [_call(text)] if isinstance(written, dict) and "name" in written else []


PARSERS: Mapping[str, Parser] = {"hermes": hermes, "json": whole_json}


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False).encode()  # refuses half characters, which no tokeniser takes
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise InvalidToolCall(f'{text.strip()[:200]!r} is no call; expected {{"name": "...", "arguments": {{...}}}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise InvalidToolCall(f"the arguments of {call['name']!r} are {arguments!r}; expected an object")
    return ToolCall(call["name"], arguments)


class InvalidToolCall(ValueError):
    """A call that no tool takes: the policy's fault, which it is told of."""


class _Raised(Exception):
    """What a function raised, told apart from what is wrong with its arguments."""


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose own errors cannot be taken for faults of its arguments."""

    @functools.wraps(function)
    def apart(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except Exception as error:
            raise _Raised from error

    return apart


class Tool:
    """A typed function that the policy may call; its docstring tells the policy what it is for.

    Args:
        function: plain or a coroutine; each parameter annotated, and given by name.

    Raises:
        DefinitionError: a class, or a parameter without annotation, that cannot be given by name, or of a type that
            JSON does not have.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if isinstance(function, type):
            raise DefinitionError(f"the tool {function.__name__} is a class; expected a function, or its method.")
        self.name, self.function = function.__name__, function
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise DefinitionError(f"the tool {self.name} takes {parameter}; expected parameters given by name.")
            if parameter.annotation is parameter.empty:
                raise DefinitionError(
                    f"{parameter.name} of the tool {self.name} has no annotation, so its schema is unknown; write "
                    f"`{parameter.name}: str`."
                )
        self._description = inspect.getdoc(function) or ""
        try:
            self._validated = validate_call(_apart(function))
            self._parameters = TypeAdapter(cast(Any, function)).json_schema()
        except PydanticUserError as error:
            raise DefinitionError(
                f"the tool {self.name}{inspect.signature(function)} takes what JSON cannot say "
                f"({str(error).partition('. ')[0]}); expected parameters such as str, int, float, bool, list[str] or "
                f"dict[str, int]."
            ) from error
        self.blocks = not inspect.iscoroutinefunction(function)
        """Whether a call holds up its thread."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates take it under ``tools``."""
        described = {"name": self.name, "description": self._description, "parameters": self._parameters}
        return {"type": "function", "function": described}

    def bound(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """The call with these arguments, which raises `InvalidToolCall` where they are not what the function takes."""

        def call() -> Any:
            try:
                return self._validated(**arguments)
            except ValidationError as error:
                faults = (f"{'.'.join(map(str, f['loc'])) or 'arguments'}: {f['msg']}" for f in error.errors())
                raise InvalidToolCall(f"{self.name} does not take these arguments ({'; '.join(faults)})") from error
            except _Raised as raised:
                raise cast(Exception, raised.__cause__) from None

        return call


Elsewhere = Callable[[Tool, Mapping[str, Any]], Awaitable[Any]]
"""Calls a tool in another place."""


class Toolbox:
    """The tools of an episode.

    Args:
        tools: functions, or `Tool`s.
        parser: how calls are written: ``"hermes"``, ``"json"``, or a function of your own.
        elsewhere: calls a tool that blocks, and gives what it returns; None does so in a thread.

    Raises:
        DefinitionError: two tools of one name, or a parser that there is not.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        parser: Literal["hermes", "json"] | Parser,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        made = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            names = [tool.name for tool in made]
            raise DefinitionError(f"two tools are called {max(names, key=names.count)!r}; give each a name of its own.")
        if not callable(parser) and parser not in PARSERS:
            raise DefinitionError(f"the parser {parser!r} is not known; {offer(parser, PARSERS, 'there are')}")
        self._parse = parser if callable(parser) else PARSERS[parser]
        self._elsewhere = elsewhere

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools, for the chat template: ``template_kwargs={"tools": toolbox.schemas}``."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def names(self) -> list[str]:
        """Of all tools, in their order."""
        return list(self._tools)

    @property
    def example(self) -> str:
        """A call of the first tool as the parser reads it; by one of your own, the call alone."""
        call = json.dumps({"name": self.names[0], "arguments": {}})
        return f"<tool_call>\n{call}\n</tool_call>" if self._parse is hermes else call

    def calls(self, text: str) -> Sequence[ToolCall]:
        """The calls in what the policy wrote.

        Raises:
            InvalidToolCall: something looks like a call, and is none.
        """
        return self._parse(text)

    def find(self, call: ToolCall) -> Tool:
        """The tool that is called.

        Raises:
            InvalidToolCall: there is none of that name.
        """
        if call.name not in self._tools:
            raise InvalidToolCall(f"there is no tool {call.name!r}; {offer(call.name, self._tools, 'there are')}")
        return self._tools[call.name]

    async def run(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """What a tool returns.

        Raises:
            InvalidToolCall: it takes other arguments.
        """
        if tool.blocks and self._elsewhere is not None:
            return await self._elsewhere(tool, arguments)
        return await called(tool.bound(arguments), tool.blocks)


def template_arguments(
    tokenizer: ChatTokenizer, toolbox: Toolbox | None, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments of the chat template: those that were given, and the tools, where it has a use for them."""
    told = toolbox is not None and tokenizer.template_reads("tools")
    return {"tools": toolbox.schemas, **given} if toolbox is not None and told else given


def said(result: object) -> str:
    """What a tool returned, as the text that the policy reads: a str as it is, else JSON.

    Raises:
        EpisodeError: it is neither text nor JSON.
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"a tool returned {result!r}, which is neither text nor JSON ({error}).") from error
