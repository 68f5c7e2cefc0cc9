"""Formats of tool calls: published examples, calls written and parsed again, typed arguments, and malformed calls.

Tests `__init__.py`, `call_format.py` and the modules of all formats; `tests/engines/test_tool_parsers.py` compares them
with those of vLLM and SGLang.
"""

from __future__ import annotations

import enum
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from flowrl.episodes import InvalidToolCall, Toolbox, ToolCall
from flowrl.episodes.parsers import PARSERS
from flowrl.operators import Interact
from tests.support.errors import raises

WEATHER = ToolCall("get_current_weather", {"location": "San Francisco"})
TOKYO, PARIS = (ToolCall("get_current_weather", {"location": city}) for city in ("Tokyo", "Paris"))


def marked(text: str) -> str:
    """A text with the tokens of DeepSeek, which are in characters of their own."""
    for mark in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        text = text.replace(f"<!{mark}!>", f"<\uff5ctool\u2581{mark.replace('_', chr(0x2581))}\uff5c>")
    return text


EXAMPLES: list[tuple[str, str, list[ToolCall]]] = [
    (  # NousResearch/Hermes-Function-Calling, README
        "hermes",
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>',
        [ToolCall("get_stock_fundamentals", {"symbol": "TSLA"})],
    ),
    ("json", '{"name": "get_current_weather", "arguments": {"location": "San Francisco"}}', [WEATHER]),
    (  # the instructions in the chat template of Qwen3-Coder
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
        "</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
        "multiple lines\n</parameter>\n</function>\n</tool_call>",
        [
            ToolCall(
                "example_function_name",
                {
                    "example_parameter_1": "value_1",
                    "example_parameter_2": "This is the value for the second parameter\nthat can span\nmultiple lines",
                },
            )
        ],
    ),
    (  # zai-org/GLM-4.5, chat template
        "glm",
        "<think>I look.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
        "<arg_key>date</arg_key>\n<arg_value>2024-06-27</arg_value>\n</tool_call>",
        [ToolCall("get_weather", {"city": "Beijing", "date": "2024-06-27"})],
    ),
    (  # GLM 4.7 writes no line ends
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Beijing</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        [ToolCall("get_weather", {"city": "Beijing"}), ToolCall("now", {})],
    ),
    (  # moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [ToolCall("get_weather", {"city": "Beijing"}), ToolCall("now", {})],
    ),
    (  # deepseek-ai/DeepSeek-V3-0324, chat template
        "deepseek",
        marked(
            '<!calls_begin!><!call_begin!>function<!sep!>get_current_weather\n```json\n{"location": "Tokyo"}\n```'
            '<!call_end!>\n<!call_begin!>function<!sep!>get_current_weather\n```json\n{"location": "Paris"}\n```'
            "<!call_end!><!calls_end!>"
        ),
        [TOKYO, PARIS],
    ),
    (  # deepseek-ai/DeepSeek-V3.1, model card
        "deepseek",
        marked(
            '<!calls_begin!><!call_begin!>get_current_weather<!sep!>{"location": "Tokyo"}<!call_end!>'
            '<!call_begin!>get_current_weather<!sep!>{"location": "Paris"}<!call_end!><!calls_end!>'
        ),
        [TOKYO, PARIS],
    ),
    (  # OpenAI's guide to the harmony format, "Receiving tool calls"
        "gpt-oss",
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
        [ToolCall("get_weather", {"location": "San Francisco"})],
    ),
    (  # the same, "Preambles"
        "gpt-oss",
        "<|channel|>analysis<|message|>{long chain of thought}<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "**Action plan**:\n1. Generate an HTML file<|end|><|start|>assistant<|channel|>commentary to=functions."
        'generate_file<|constrain|>json<|message|>{"template": "basic_html", "path": "index.html"}<|call|>',
        [ToolCall("generate_file", {"template": "basic_html", "path": "index.html"})],
    ),
    (  # the order that the harmony renderer writes
        "gpt-oss",
        " to=functions.get_current_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"location":"San Francisco"}<|call|>',
        [WEATHER],
    ),
    (  # meta-llama/llama-models, Llama 3.1, "JSON based tool calling"
        "llama3_json",
        '{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}',
        [ToolCall("get_current_conditions", {"location": "San Francisco, CA", "unit": "Fahrenheit"})],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_current_weather", "parameters": {"location": "Tokyo"}}; '
        '{"name": "get_current_weather", "arguments": {"location": "Paris"}}',
        [TOKYO, PARIS],
    ),
    (  # Mistral's documentation of its tokenizer v3
        "mistral",
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Tokyo"}, "id": "VvvODy9mT"}, '
        '{"name": "get_current_weather", "arguments": {"location": "Paris"}, "id": "D681PevKs"}]',
        [TOKYO, PARIS],
    ),
    (  # tokenizers v11 and v13
        "mistral",
        '[TOOL_CALLS]get_current_weather[CALL_ID]VvvODy9mT[ARGS]{"location": "Tokyo"}'
        '[TOOL_CALLS]get_current_weather[ARGS]{"location": "Paris"}',
        [TOKYO, PARIS],
    ),
]


@pytest.mark.parametrize(("name", "text", "calls"), EXAMPLES)
def test_published_examples(name: str, text: str, calls: list[ToolCall]) -> None:
    assert [*toolbox(name).calls(text)] == calls


@pytest.mark.parametrize("name", PARSERS)
def test_answers_without_calls(name: str) -> None:
    for text in (
        "",
        "42",
        "It is {17 + 25}.",
        '{"sum": 42}',
        "[1, 2]",
        "call add(17, 25)",
        "<think>\n\n</think>\n\n42",
    ):
        assert not toolbox(name).calls(text)


MALFORMED = {
    "hermes": ["<tool_call>[1", "<tool_call></tool_call>", '<tool_call>{"name": "add", "arguments": 1}</tool_call>'],
    "json": ['{"name": 1}', '{"name": "add", "arguments": []}'],
    "qwen3_coder": [
        "<tool_call>add</tool_call>",
        "<tool_call>\n<function=add>\nseventeen\n</function>\n</tool_call>",
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    ],
    "glm": [
        "<tool_call></tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
    ],
    "kimi": [
        "<|tool_calls_section_begin|>add",
        "<|tool_call_begin|>functions.add:0{}",
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{<|tool_call_end|>",
    ],
    "deepseek": [
        marked("<!calls_begin!>add"),
        marked("<!call_begin!>add"),
        marked("<!call_begin!>add<!sep!>[1]<!call_end!>"),
    ],
    "gpt-oss": [
        "<|channel|>commentary to=functions.add",
        "<|channel|>commentary to=functions.add json<|message|>17<|call|>",
        "<|channel|>commentary to=functions.add json<|message|>{<|call|>",
    ],
    "llama3_json": ["<|python_tag|>print(1)", '{"name": "add", "parameters": {', '{"name": "add", "parameters": 1}'],
    "mistral": ["[TOOL_CALLS]add", "[TOOL_CALLS] []", '[TOOL_CALLS] ["add"]', "[TOOL_CALLS]add[ARGS]{"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_malformed_calls_are_invalid_and_say_what_is_expected(name: str, text: str) -> None:
    with pytest.raises(InvalidToolCall, match="expected"):
        toolbox(name).calls(text)


@pytest.mark.parametrize("name", PARSERS)
def test_text_that_no_tokenizer_encodes_is_invalid_or_no_call(name: str) -> None:
    text = PARSERS[name].write([ToolCall("add", {"a": "HERE"})]).replace("HERE", "\\ud800")
    try:
        found = toolbox(name).calls(text)
    except InvalidToolCall:
        return
    for call in found:
        json.dumps(call.arguments, ensure_ascii=False).encode()


NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<>\r"), max_size=12)  # bare text has no escapes
VALUES = TEXTS.map(str.strip) | st.integers() | st.booleans() | st.lists(TEXTS, max_size=2) | st.none()


@pytest.mark.parametrize("name", PARSERS)
@given(calls=st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3))
def test_calls_that_a_format_writes_are_parsed_again(name: str, calls: list[ToolCall]) -> None:
    """Formats with bare text know the types of arguments from the schemas."""
    calls = calls if PARSERS[name].several else calls[:1]
    calls = [call for i, call in enumerate(calls) if call.name not in {earlier.name for earlier in calls[:i]}]
    tools = toolbox(name)
    tools.__dict__["schemas"] = [schema_of(call) for call in calls]
    assert [*tools.calls(PARSERS[name].write(calls))] == calls


def schema_of(call: ToolCall) -> dict[str, Any]:
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array", type(None): "null"}
    properties = {key: {"type": kinds[type(value)]} for key, value in call.arguments.items()}
    return {"type": "function", "function": {"name": call.name, "parameters": {"properties": properties}}}


class Point(BaseModel):
    x: int


class Color(enum.Enum):
    RED = "red"


def typed(
    text: str,
    number: float,
    flag: bool,
    items: list[int],
    point: Point,
    color: Color,
    either: int | str,
    maybe: str | None,
    size: Literal[1, 2],
) -> None:
    """All kinds of parameters."""


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        *(("text", each, each) for each in ("12", "true", "null", '{"a": 1}', ' "quoted" ', "")),
        *(("number", "12", 12), ("number", "1e3", 1000.0), ("number", "twelve", "twelve")),
        *(("flag", "true", True), ("flag", "True", "True")),
        *(("items", "[1, 2]", [1, 2]), ("items", "[1, 2", "[1, 2")),
        ("items", '["\\ud800"]', '["\\ud800"]'),  # no tokenizer encodes half of a surrogate pair
        *(("point", '{"x": 3}', {"x": 3}), ("color", "red", "red"), ("size", "2", 2)),
        *(("either", "12", 12), ("either", "x", "x"), ("maybe", "null", None), ("maybe", "12", "12")),
        ("unknown", "12", "12"),
    ],
)
def test_bare_arguments_have_the_type_of_the_schema(name: str, parameter: str, text: str, value: object) -> None:
    tools = Toolbox([typed], name)
    (call,) = tools.calls(PARSERS[name].write([ToolCall("typed", {parameter: text})]))
    assert call.arguments == {parameter: value} and type(call.arguments[parameter]) is type(value)


@pytest.mark.parametrize("make", [lambda: toolbox("xml"), lambda: Interact(tools=[typed], parser="xml")])
def test_unknown_parsers_are_refused(make: Any) -> None:
    with raises("tool.unknown-parser", parser="xml", known=tuple(PARSERS)):
        make()


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def toolbox(parser: str) -> Toolbox:
    return Toolbox([add], parser)
