"""Tests of `messages.py`, `requests.py` and `chat_completions.py`: the same conversations, and refusals by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowrl.episodes.endpoint.chat_completions import parse
from flowrl.episodes.endpoint.messages import RequestError
from flowrl.episodes.endpoint.requests import CompletionRequest
from tests.episodes.scripted import SAMPLING


def asked(*messages: Any, strict: bool = False, **fields: Any) -> CompletionRequest:
    return parse({"model": "m", "messages": list(messages), **fields}, SAMPLING, strict)


def called(arguments: str, call: str = "c1", **fields: Any) -> list[dict[str, Any]]:
    """A conversation with a tool call and its result."""
    calls = [{"id": call, "type": "function", "function": {"name": "look", "arguments": arguments}}]
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": calls, **fields},
        {"role": "tool", "tool_call_id": call, "content": "a wall"},
    ]


SAME = called('{"a": 1, "b": [2]}')


@pytest.mark.parametrize(
    "other",
    [
        called('{"b":[2],"a":1}'),
        called('{"a": 1, "b": [2]}', call="another"),
        called('{"a": 1, "b": [2]}', content=None),
        called('{"a": 1, "b": [2]}', content="", refusal=None, annotations=[], audio=None),
        [{"role": "user", "content": [{"type": "text", "text": "go"}]}, *SAME[1:]],
        [*SAME[:2], {**SAME[2], "name": "look"}],
    ],
)
def test_what_the_policy_does_not_read_is_ignored(other: list[Any]) -> None:
    assert asked(*other).conversation == asked(*SAME).conversation
    assert asked(*other).prefix == asked(*SAME).prefix


@pytest.mark.parametrize(
    "other",
    [
        called('{"a": 1, "b": [3]}'),
        called('{"a": 1, "b": [2]}', content=" "),
        [{"role": "user", "content": "go "}, *SAME[1:]],
        [{"role": "system", "content": "go"}, *SAME[1:]],
        [*SAME[:2], {**SAME[2], "content": "a  wall"}],
        [{"role": "user", "content": "go", "name": "Ada"}, *SAME[1:]],
    ],
)
def test_text_is_never_ignored(other: list[Any]) -> None:
    assert asked(*other).conversation != asked(*SAME).conversation


def test_other_tools_are_another_conversation() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert asked(*SAME, tools=[tool]).prefix != asked(*SAME).prefix
    assert asked(*SAME, tools=[]).prefix == asked(*SAME, tools=None).prefix == asked(*SAME).prefix


def test_the_prefix_ends_with_the_last_message_of_the_assistant() -> None:
    short = asked(*SAME)
    longer = asked(*SAME, {"role": "assistant", "content": "x"}, {"role": "user", "content": "?"})
    assert (short.after, longer.after) == (2, 4)
    assert asked(*SAME[:2], {"role": "user", "content": "else"}).prefix == short.prefix != longer.prefix


def test_templates_get_arguments_as_objects_and_names_of_tools() -> None:
    _, call, result = asked(*SAME).messages
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "look", "arguments": {"a": 1, "b": [2]}}}]
    assert result == {"role": "tool", "content": "a wall", "name": "look"}
    (first,) = asked({"role": "developer", "content": "be brief"}).messages
    assert first == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "look"}}),
        ("logit_bias", {"5": 1}),
        ("top_logprobs", 3),
        ("functions", []),
        ("audio", {}),
        ("unheard_of", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        asked({"role": "user", "content": "go"}, **{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert caught.value.code in ("unsupported_value", "unsupported_parameter")
    assert caught.value.body["error"].keys() == {"message", "type", "param", "code"}
    asked({"role": "user", "content": "go"}, **{field: None})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0]"),
        ([{"role": ["user"], "content": "x"}], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "messages"),
        ([], "messages"),
        ("text", "messages"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": 5}], "messages[1].tool_calls"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"messages": messages}, SAMPLING, strict=False)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_invalid_stream_options_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        asked({"role": "user", "content": "go"}, stream_options=[1])
    assert (caught.value.status, caught.value.param) == (400, "stream_options")


def test_sampling_is_the_nodes() -> None:
    go = {"role": "user", "content": "go"}
    assert not asked(go, temperature=1, top_p=1.0, seed=None, parallel_tool_calls=True, strict=True).overridden
    assert asked(go, temperature=0.2, seed=7).overridden == ["temperature", "seed"]
    with pytest.raises(RequestError) as caught:
        asked(go, temperature=0.2, strict=True)
    assert (caught.value.param, caught.value.code) == ("temperature", "unsupported_value")


def test_the_smaller_maximum_counts() -> None:
    one = asked({"role": "user", "content": "go"}, max_tokens=9, max_completion_tokens=5, stop=["x", "y"])
    assert (one.max_tokens, one.stop) == (5, ("x", "y"))
    assert one.identity != asked({"role": "user", "content": "go"}).identity
    for wrong in ({"max_tokens": 0}, {"max_tokens": True}, {"stop": [""]}, {"stop": 3}):
        with pytest.raises(RequestError):
            asked({"role": "user", "content": "go"}, **wrong)
    assert json.loads(json.dumps(one.messages)) == [{"role": "user", "content": "go"}]
