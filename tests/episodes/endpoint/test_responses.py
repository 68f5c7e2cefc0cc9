"""Tests of `responses.py` and `response_items.py`: the responses API over HTTP, on the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowrl.episodes.endpoint.messages import RequestError
from flowrl.episodes.endpoint.responses import parse
from tests.data.text.test_answers import sampled, tokenizer_of
from tests.episodes.endpoint.clients import Client, played
from tests.episodes.endpoint.test_session import CALL, LOOK, assert_exact
from tests.episodes.scripted import SAMPLING, say

FLAT = {"type": "function", **LOOK["function"]}  # type: ignore[dict-item]


async def respond(client: Client, given: Any, **fields: Any) -> dict[str, Any]:
    response = await client.http.post("/responses", json={"model": "m", "input": given, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text(response: dict[str, Any]) -> str:
    (message,) = (item for item in response["output"] if item["type"] == "message")
    return str(message["content"][0]["text"])


def test_a_stateless_conversation_continues_the_recorded_tokens() -> None:
    async def agent(client: Client) -> float:
        items: list[Any] = [{"role": "user", "content": "go"}]
        for turn in range(3):
            response = await respond(client, items, instructions="Be brief.", store=False)
            assert (response["status"], text(response)) == ("completed", f"row-0 says {turn}")
            assert response["usage"]["output_tokens"] == 13 and response["instructions"] == "Be brief."
            items += [*response["output"], {"role": "user", "content": [{"type": "input_text", "text": "and?"}]}]
        return 1.0

    (one,), engine = played(agent, say)
    assert (one.fault, one.chat.rewards, len(one.chat.segments)) == (None, [0.0, 0.0, 1.0], 1)
    assert [m["role"] for m in one.chat.messages[:3]] == ["system", "user", "assistant"]
    assert_exact(one, engine, "row-0")


def test_a_stored_response_is_continued_by_its_id() -> None:
    async def agent(client: Client) -> None:
        first = await respond(client, "go")
        second = await respond(client, "and?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        branch = await respond(client, "else?", previous_response_id=first["id"], store=False)
        unknown = await client.http.post("/responses", json={"input": "x", "previous_response_id": branch["id"]})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "previous_response_not_found")
        again = await client.post(  # chat completions continue the same tokens
            [
                *client.messages,
                *({"role": "assistant", "content": text(first)}, {"role": "user", "content": "and?"}),
                *({"role": "assistant", "content": text(second)}, {"role": "user", "content": "more?"}),
            ]
        )
        assert again.status_code == 200

    (one,), engine = played(agent, say, rewrites="segment")
    assert (one.fault, [len(segment.own) for segment in one.chat.segments]) == (None, [2, 1, 1])
    assert [segment.inherited for segment in one.chat.segments] == [0, 1, 2]
    assert_exact(one, engine, "row-0")


def test_calls_and_their_results_are_items() -> None:
    async def agent(client: Client) -> None:
        items: list[Any] = [{"type": "message", "role": "user", "content": "go"}]
        response = await respond(client, items, tools=[FLAT])
        message, call = response["output"]
        assert (message["content"][0]["text"], call["name"]) == ("I look. ", "look")
        assert json.loads(call["arguments"]) == {"b": 1, "a": [2]} and response["tools"] == [FLAT]
        call["arguments"] = '{"a":[2],"b":1}'
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a wall"}
        assert text(await respond(client, [*items, *response["output"], result], tools=[FLAT])) == "a wall"

    (one,), engine = played(agent, lambda name, turn: ["I look. " + CALL, "a wall"][turn], rewrites="segment")
    assert (one.fault, one.chat.tool_calls, len(one.chat.segments)) == (None, 1, 1)
    assert one.chat.messages[2] == {"role": "tool", "content": "a wall", "name": "look"}
    assert_exact(one, engine, "row-0")


@pytest.mark.parametrize("keeps", [True, False])
def test_thoughts_are_items(keeps: bool) -> None:
    template = "qwen3_8"  # keeps thoughts
    tokenizer = tokenizer_of(template)
    prompt = tokenizer.conversation_text([{"role": "user", "content": "go"}], add_generation_prompt=True)

    async def agent(client: Client) -> None:
        items: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            response = await respond(client, items)
            thought, message = response["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("Hm."))
            items += [*([thought] if keeps else []), message, {"role": "user", "content": "and?"}]

    said = sampled(template, prompt, "Hm.", "It is.")
    settings: dict[str, Any] = {"rewrites": "segment", "tokenizer": tokenizer, "check": "loose", "context": 4000}
    (one,), engine = played(agent, lambda name, turn: said, **settings)
    assert (one.fault, len(one.chat.segments)) == (None, 1 if keeps else 2)
    assert_exact(one, engine, "row-0")


def test_an_answer_that_its_length_ends_is_incomplete() -> None:
    async def agent(client: Client) -> None:
        response = await respond(client, "go", max_output_tokens=3, include=["message.output_text.logprobs"])
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        (message,) = response["output"]
        assert [token["logprob"] for token in message["content"][0]["logprobs"]] == [-0.25] * 3

    (one,), engine = played(agent, say)
    assert one.fault is None and engine.requests[0].sampling.max_new_tokens == 3


def test_events_are_those_of_the_whole_response() -> None:
    async def agent(client: Client) -> None:
        body = {"model": "m", "input": "go", "tools": [FLAT], "stream": True}
        response = await client.http.post("/responses", json=body)
        events = [json.loads(one.partition("data: ")[2]) for one in response.text.strip().split("\n\n")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"].removeprefix("response.") for event in events] == [
            *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
            *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
        ]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done and events[0]["response"]["output"] == []
        assert events[-1]["response"]["id"] == events[0]["response"]["id"]

    (one,), _ = played(agent, lambda name, turn: "I look. " + CALL)
    assert one.fault is None


def asked(given: Any = "go", **fields: Any) -> Any:
    return parse({"model": "m", "input": given, **fields}, SAMPLING, False, {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": 5}, "include"),
        ({"previous_response_id": ["resp_1"]}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": 3}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"given": 3}, "input"),
        ({"given": []}, "input"),
        ({"given": [{"type": "web_search_call"}]}, "input[0]"),
        ({"given": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"given": [{"type": "reasoning", "summary": 3}]}, "input[0]"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"given": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "input"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_preferences_are_overridden() -> None:
    one = asked(temperature=0.3, reasoning={"effort": "high"}, text={"verbosity": "low"}, user="x", metadata={})
    assert set(one.overridden) == {"temperature", "reasoning", "verbosity"}


def test_neighboring_items_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    one = asked(
        [
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": "go"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            call,
            {**call, "call_id": "d"},
            {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "wall"}]},
        ]
    )
    first, _, answer, result = one.messages
    assert first["role"] == "system" and len(answer["tool_calls"]) == 2
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    assert result == {"role": "tool", "content": "wall", "name": "look"}
