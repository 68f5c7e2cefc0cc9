"""flowrl's parsers of tool calls against those of vLLM and SGLang: published examples, and random calls.

Tests `flowrl/episodes/parsers/vllm_parsers.py` too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes import InvalidToolCall, ToolCall
from flowrl.episodes.parsers import PARSERS, call_format
from flowrl.episodes.parsers.call_format import Tools
from tests.episodes.parsers.test_parsers import EXAMPLES
from tests.support.errors import raises

pytestmark = pytest.mark.engines("vllm", "sglang")

VLLM = {
    "hermes": ["hermes"],
    "qwen3_coder": ["qwen3_coder"],
    "glm": ["glm45"],
    "kimi": ["kimi_k2"],
    "deepseek": ["deepseek_v3", "deepseek_v31"],
    "llama3_json": ["llama3_json"],
    "mistral": ["mistral"],
}
SGLANG = {
    "hermes": ["hermes"],
    "qwen3_coder": ["qwen3_coder"],
    "glm": ["glm45", "glm47"],
    "kimi": ["kimi_k2"],
    "deepseek": ["deepseekv3", "deepseekv31"],
    "gpt-oss": ["gpt-oss"],
    "llama3_json": ["llama3"],
    "mistral": ["mistral"],
}
"""By format, the parsers of that engine; each example is of one of them. Neither engine has `json`, and vLLM parses
gpt-oss by the tokens of its vocabulary."""

UNKNOWN = {
    "vllm": ["[TOOL_CALLS] [{", "[CALL_ID]"],  # of the tokenizer that it gets, it expects the latest format
    "sglang": ["[CALL_ID]", " to=functions.get_current_weather<|channel|>"],
}
"""Texts in the examples that an engine does not parse."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer with the tokens of all formats, which vLLM's parsers look up."""
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
    marks += ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    marks += tuple(
        f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    )
    marks += tuple(f"<|tool_calls_section_{name}|>" for name in ("begin", "end"))
    marks += tuple(f"<|tool_call_{name}|>" for name in ("begin", "end", "argument_begin", "start"))
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(["<eos>", *marks, *symbols])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    folder: Path = tmp_path_factory.mktemp("marks")
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", additional_special_tokens=list(marks)
    ).save_pretrained(folder)
    return ChatTokenizer(str(folder))


def by_vllm(name: str, text: str, tools: Tools) -> Sequence[ToolCall]:
    return call_format(f"vllm:{name}").parse(text, tools)


def by_sglang(name: str, text: str, tools: Tools) -> Sequence[ToolCall]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool.model_validate(schema) for schema in tools.schemas], name)
    return [ToolCall(call.name, json.loads(call.parameters)) for call in parser.parse_non_stream(text)[1]]


PEERS: Mapping[str, tuple[Mapping[str, list[str]], Callable[[str, str, Tools], Sequence[ToolCall]]]] = {
    "vllm": (VLLM, by_vllm),
    "sglang": (SGLANG, by_sglang),
}


def schemas(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
    return [
        {
            "type": "function",
            "function": {
                "name": call.name,
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kinds[type(value)]} for key, value in call.arguments.items()},
                },
            },
        }
        for call in {call.name: call for call in calls}.values()
    ]


@pytest.mark.parametrize("engine", PEERS)
def test_published_examples_have_the_calls_that_an_engine_finds(engine: str, tokenizer: ChatTokenizer) -> None:
    names, parse = PEERS[engine]
    compared = set()
    for name, text, calls in EXAMPLES:
        if name in names and not any(mark in text for mark in UNKNOWN[engine]):
            tools = Tools(schemas(calls), tokenizer)
            assert any([*parse(peer, text, tools)] == calls for peer in names[name]), (name, text)
            compared.add(name)
    assert compared == names.keys() - ({"mistral"} if engine == "vllm" else set())


@pytest.mark.parametrize("engine", PEERS)
def test_calls_that_flowrl_writes_are_those_that_an_engine_finds(engine: str, tokenizer: ChatTokenizer) -> None:
    names, parse = PEERS[engine]
    numbers = random.Random(0)
    for name, peers in names.items():
        if (engine, name) in {("vllm", "mistral"), ("sglang", "gpt-oss")}:
            continue  # another of the forms that the engine knows
        for _ in range(20):
            calls = random_calls(numbers, 3 if PARSERS[name].several else 1)
            tools, text = Tools(schemas(calls), tokenizer), PARSERS[name].write(calls)
            assert [*PARSERS[name].parse(text, tools)] == calls
            assert [*parse(peers[0], text, tools)] == calls, (name, text)


def random_calls(numbers: random.Random, most: int) -> list[ToolCall]:
    values: list[Any] = [
        "x",
        "two words",
        "thé ß",
        'say "hi"',
        "a\nb",
        "{x}",
        12,
        -3,
        True,
        False,
        [1, "x"],
        {"x": [2]},
    ]
    return [
        ToolCall(f"tool_{i}", {f"key_{j}": numbers.choice(values) for j in range(numbers.randint(1, 3))})
        for i in range(numbers.randint(1, most))
    ]


def test_vllms_own_parsers_by_name(tokenizer: ChatTokenizer) -> None:
    call = ToolCall("tool_0", {"key_0": "x"})
    text = 'I call.\n<|tool_call_start|>[tool_0(key_0="x")]<|tool_call_end|>'
    assert [*by_vllm("lfm2", text, Tools(schemas([call]), tokenizer))] == [call]
    with raises("tool.unknown-parser", parser="vllm:hermess"):
        by_vllm("hermess", text, Tools([], tokenizer))


def test_arguments_that_a_parser_of_vllm_does_not_parse_are_an_invalid_call(tokenizer: ChatTokenizer) -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.tool_0:0<|tool_call_argument_begin|>"
        '{"key_0": x}<|tool_call_end|><|tool_calls_section_end|>'
    )
    with pytest.raises(InvalidToolCall, match="expected a JSON object"):
        by_vllm("kimi_k2", text, Tools(schemas([ToolCall("tool_0", {"key_0": "x"})]), tokenizer))
