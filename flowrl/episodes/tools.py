"""Tools: typed functions that the policy may call, with schemas from their signatures."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes.calls import call_user_code
from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers import Parser, call_format
from flowrl.episodes.parsers.call_format import Tools
from flowrl.errors import DefinitionError, EpisodeError, offer


class _Raised(Exception):
    """Wraps what a function raised, as opposed to errors in its arguments."""


def _wrap_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its own errors wrapped in `_Raised`."""

    @functools.wraps(function)
    def wrapped(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except Exception as error:
            raise _Raised from error

    return wrapped


class Tool:
    """A typed function that the policy may call; its docstring is the description.

    Args:
        function: plain or a coroutine; each parameter is annotated and can be passed by name.

    Raises:
        DefinitionError: it is a class, or a parameter has no annotation, cannot be passed by name, or has a type that
            JSON cannot represent.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if isinstance(function, type):
            raise DefinitionError(
                f"The tool {function.__name__} is a class; expected a function. Pass a function or a method.",
                code="tool.invalid",
                tool=function.__name__,
            )
        self.name, self.function = function.__name__, function
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise DefinitionError(
                    f"The tool {self.name} has the parameter {parameter}; expected parameters that can be passed by "
                    f"name. Write them out.",
                    code="tool.invalid-parameter",
                    tool=self.name,
                    parameter=parameter.name,
                )
            if parameter.annotation is parameter.empty:
                raise DefinitionError(
                    f"The parameter {parameter.name} of the tool {self.name} has no annotation, which the schema "
                    f"needs. Annotate it, for example `{parameter.name}: str`.",
                    code="tool.invalid-parameter",
                    tool=self.name,
                    parameter=parameter.name,
                )
        self._description = inspect.getdoc(function) or ""
        try:
            self._validated = validate_call(_wrap_errors(function))
            self._parameters = TypeAdapter(cast(Any, function)).json_schema()
        except PydanticUserError as error:
            raise DefinitionError(
                f"The tool {self.name}{inspect.signature(function)} has a parameter that JSON cannot represent "
                f"({str(error).partition('. ')[0]}). Use types such as str, int, float, bool, list[str] or "
                f"dict[str, int].",
                code="tool.invalid-parameter",
                tool=self.name,
            ) from error
        self.blocks = not inspect.iscoroutinefunction(function)
        """Whether a call blocks its thread."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates expect it in ``tools``."""
        described = {"name": self.name, "description": self._description, "parameters": self._parameters}
        return {"type": "function", "function": described}

    def bound(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """The call with these arguments; it raises `InvalidToolCall` if they do not fit the function."""

        def call() -> Any:
            try:
                return self._validated(**arguments)
            except ValidationError as error:
                faults = (f"{'.'.join(map(str, f['loc'])) or 'arguments'}: {f['msg']}" for f in error.errors())
                raise InvalidToolCall(f"{self.name} does not take these arguments ({'; '.join(faults)})") from error
            except _Raised as raised:
                raise cast(Exception, raised.__cause__) from None

        return call


RemoteCall = Callable[[Tool, Mapping[str, Any]], Awaitable[Any]]
"""Calls a tool in another process."""


class Toolbox:
    """The tools of an episode.

    Args:
        tools: functions, or `Tool`s.
        parser: the format of calls: a name in `flowrl.episodes.parsers.PARSERS`, ``"vllm:NAME"``, or your own function.
        remote_call: calls a tool that blocks, and returns its result; None calls it in a thread.

    Raises:
        DefinitionError: two tools have one name, or the parser is unknown.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        parser: str | Parser,
        remote_call: RemoteCall | None = None,
    ) -> None:
        made = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            names = [tool.name for tool in made]
            name = max(names, key=names.count)
            raise DefinitionError(
                f"Two tools have the name {name!r}. Rename one of the functions.", code="tool.invalid", tool=name
            )
        self.format = call_format(parser)
        """How the policy writes calls."""
        self._remote_call = remote_call

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of all tools, for the chat template: ``template_kwargs={"tools": toolbox.schemas}``."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def names(self) -> list[str]:
        """The names of all tools, in order."""
        return list(self._tools)

    def example(self, calls: int = 1) -> str:
        """Calls of the first tool in the format of the parser; for your own parser, the JSON alone."""
        return self.format.write([ToolCall(self.names[0], {})] * calls)

    def calls(self, text: str, tokenizer: ChatTokenizer | None = None) -> Sequence[ToolCall]:
        """The calls in an answer.

        Args:
            text: with special tokens if the format has some.
            tokenizer: of the policy, which parsers of vLLM need.

        Raises:
            InvalidToolCall: one is malformed.
        """
        return self.format.parse(text, Tools(self.schemas, tokenizer))

    def find(self, call: ToolCall) -> Tool:
        """The tool of a call.

        Raises:
            InvalidToolCall: there is none of that name.
        """
        if call.name not in self._tools:
            raise InvalidToolCall(f"there is no tool {call.name!r}; {offer(call.name, self._tools, 'there are')}")
        return self._tools[call.name]

    async def run(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; returns its result.

        Raises:
            InvalidToolCall: the arguments do not fit.
        """
        if tool.blocks and self._remote_call is not None:
            return await self._remote_call(tool, arguments)
        return await call_user_code(tool.bound(arguments), tool.blocks)


def template_arguments(
    tokenizer: ChatTokenizer, toolbox: Toolbox | None, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments of the chat template: the given ones, and the tools if the template reads them."""
    read = toolbox is not None and tokenizer.template_reads("tools")
    return {"tools": toolbox.schemas, **given} if toolbox is not None and read else given


def result_text(result: object) -> str:
    """What a tool returned, as text for the policy: a string unchanged, anything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"A tool returned {result!r}; expected text or what JSON can represent ({error}). Return a string.",
            code="tool.invalid-result",
            found=repr(result),
        ) from error
