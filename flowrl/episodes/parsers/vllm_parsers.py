"""Parsers of vLLM's registry, ``parser="vllm:NAME"``: for formats that flowrl does not have.

What they accept depends on the installed version of vLLM. They do not report malformed calls, which are then text.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from flowrl.episodes.environment import ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools, call_of, json_at
from flowrl.episodes.parsers.plain_json import write
from flowrl.errors import DefinitionError, offer
from flowrl.lazy import package

PREFIX = "vllm:"


def of_vllm(name: str) -> CallFormat:
    """The format of a parser in vLLM's registry, which is read at the first call.

    Its `parse` and `refuse_missing` raise `DefinitionError` if vLLM is not installed or has no parser of this name.
    """
    missing = partial(_manager, name)
    return CallFormat(partial(_parse, name), write, special=True, several=False, refuse_missing=missing)


def _manager(name: str) -> Any:
    """vLLM's registry, if it has a parser of this name."""
    package("vllm", "vllm")
    manager: Any = importlib.import_module("vllm.tool_parsers").ToolParserManager
    known = manager.list_registered()
    if name not in known:
        raise DefinitionError(
            f"Unknown parser {PREFIX + name!r}; {offer(name, known, 'vLLM has')}",
            code="tool.unknown-parser",
            parser=PREFIX + name,
            known=tuple(known),
        )
    return manager


def _parse(name: str, text: str, tools: Tools) -> Sequence[ToolCall]:
    manager = _manager(name)
    protocol: Any = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    assert tools.tokenizer is not None
    schemas = [protocol.ChatCompletionToolsParam.model_validate(schema) for schema in tools.schemas]
    request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], tools=schemas)
    parser = manager.get_tool_parser(name)(tools.tokenizer._tokenizer, schemas)
    found = parser.extract_tool_calls(text, request)
    functions = (call.function for call in found.tool_calls or ())
    return [
        call_of({"name": each.name, "arguments": json_at(each.arguments or "{}", 0, "a JSON object")[0]})
        for each in functions  # some parsers pass arguments on as the policy wrote them
    ]
