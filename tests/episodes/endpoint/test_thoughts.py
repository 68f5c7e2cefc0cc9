"""Tests of `session.py` and `flowrl/data/text/answers.py`: thoughts as `reasoning_content`, under the chat templates
that TRL ships."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.episodes.play import EpisodeResult
from tests.data.text.test_answers import sampled, tokenizer_of
from tests.episodes.endpoint.clients import Client, played
from tests.episodes.endpoint.test_session import LOOK, assert_exact
from tests.episodes.scripted import Scripted

DROPPING = ["qwen3", "deepseek_r1_distill", "gptoss", "glm4moe", "nemotron_3_super"]
"""Templates that drop the thoughts of earlier turns once the user replies."""
KEEPING = ["qwen3_8", "qwen3_training", "deepseek_r1_distill_training", "muse_glimmer"]
GO = {"role": "user", "content": "go"}


def thought_of(turn: int) -> str:
    return f"I think about {turn}."


def episode(template: str, keeps: bool, turns: int = 3, **settings: Any) -> tuple[EpisodeResult, Scripted]:
    """An episode of a client that returns the thoughts of the policy, or drops them."""
    tokenizer = tokenizer_of(template)
    prompt = tokenizer.conversation_text([GO], add_generation_prompt=True)

    async def agent(client: Client) -> None:
        for turn in range(turns):
            message = await client.ask(None if turn == 0 else f"and {turn}?")
            assert message == {"role": "assistant", "content": f"It is {turn}.", "reasoning_content": thought_of(turn)}
            if not keeps:
                del message["reasoning_content"]

    def script(name: str, turn: int) -> str:
        return sampled(template, prompt, thought_of(turn), f"It is {turn}.")

    settings = {"rewrites": "segment", "tokenizer": tokenizer, "check": "loose", "context": 4000, **settings}
    (one,), engine = played(agent, script, **settings)
    return one, engine


@pytest.mark.parametrize("template", DROPPING + KEEPING)
def test_a_client_that_returns_thoughts_continues_or_rewrites_as_the_template(template: str) -> None:
    one, engine = episode(template, keeps=True)
    assert (one.fault, len(one.chat.rewards)) == (None, 3)
    assert len(one.chat.segments) == (1 if template in KEEPING else 3)
    assert_exact(one, engine, "row-0")


@pytest.mark.parametrize("template", DROPPING)
def test_dropped_thoughts_are_equal_where_the_template_drops_them(template: str) -> None:
    one, engine = episode(template, keeps=False)
    _, kept = episode(template, keeps=True)
    assert one.fault is None and [request.ids for request in engine.requests] == [each.ids for each in kept.requests]
    assert_exact(one, engine, "row-0")
    assert thought_of(0) not in tokenizer_of(template).shown(engine.requests[1].ids)


@pytest.mark.parametrize("template", KEEPING)
def test_and_begin_a_segment_where_it_keeps_them(template: str) -> None:
    one, engine = episode(template, keeps=False)
    assert (one.fault, len(one.chat.segments)) == (None, 3)
    assert [segment.inherited for segment in one.chat.segments] == [0, 0, 0]
    assert_exact(one, engine, "row-0")
    tokenizer = tokenizer_of(template)
    said = [GO, {"role": "assistant", "content": "It is 0."}, {"role": "user", "content": "and 1?"}]
    assert engine.requests[1].ids == tokenizer.prompt_ids(said)
    assert thought_of(0) not in tokenizer.shown(engine.requests[1].ids)


@pytest.mark.parametrize(
    ("template", "keeps", "code"),
    [
        ("qwen3", True, "tokenizer.rewritten-turns"),
        ("qwen3", False, "tokenizer.rewritten-turns"),
        ("qwen3_8", False, "episode.rewritten-context"),
    ],
)
def test_without_segments_it_is_refused(template: str, keeps: bool, code: str) -> None:
    tokenizer = tokenizer_of(template)
    prompt = tokenizer.conversation_text([GO], add_generation_prompt=True)

    async def agent(client: Client) -> None:
        message = await client.ask()
        if not keeps:
            del message["reasoning_content"]
        client.messages.append({"role": "user", "content": "and?"})
        response = await client.post()
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)

    text = sampled(template, prompt, "Hm.", "It is.")
    (one,), _ = played(agent, lambda name, turn: text, tokenizer=tokenizer, check="loose")
    assert (one.fault, len(one.chat.rewards)) == (None, 1)


def called(template: str) -> str:
    """An answer with a thought and a call."""
    if template.startswith("gptoss"):
        return (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
            '<|message|>{"at": 1}<|call|>'
        )
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    return f"<think>\nHm, <tool_call> it is.\n</think>\n\n{call}"


@pytest.mark.parametrize(("template", "parser"), [("qwen3", "hermes"), ("gptoss", "gpt-oss")])
@pytest.mark.parametrize("keeps", [True, False])
def test_thoughts_before_calls_stay_until_the_user_replies(template: str, parser: str, keeps: bool) -> None:
    """Both templates keep a thought while tools answer, so a client that drops it there begins a segment."""
    tokenizer = tokenizer_of(template)
    answers = [called(template), sampled(template, "", "Hm.", "A wall.")]

    async def agent(client: Client) -> None:
        message = await client.ask(tools=[LOOK])
        assert message["reasoning_content"].startswith("Hm") and message["content"] is None
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at": 1}'}
        if not keeps:
            del message["reasoning_content"]
        client.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a wall"})
        assert (await client.ask(tools=[LOOK]))["content"] == "A wall."

    settings: dict[str, Any] = {"rewrites": "segment", "tokenizer": tokenizer, "check": "loose", "context": 9000}
    (one,), engine = played(agent, lambda name, turn: answers[turn], endpoint={"parser": parser}, **settings)
    assert (one.fault, one.chat.tool_calls) == (None, 1)
    assert len(one.chat.segments) == (1 if keeps else 2)
    assert_exact(one, engine, "row-0")


def test_thoughts_of_no_thinking_template_are_text() -> None:
    async def agent(client: Client) -> None:
        assert (await client.ask())["content"] == "<think>Hm.</think>Yes."

    (one,), _ = played(agent, lambda name, turn: "<think>Hm.</think>Yes.")
    assert one.fault is None


@pytest.mark.parametrize("api", ["chat", "stream", "responses"])
def test_the_client_of_openai_returns_thoughts(api: str) -> None:
    """Its messages and items keep them, and its streams have them as deltas."""
    openai = pytest.importorskip("openai", reason="needs pip install openai")
    template = "qwen3_8"
    tokenizer = tokenizer_of(template)
    prompt = tokenizer.conversation_text([GO], add_generation_prompt=True)

    async def answer(client: Any, said: list[Any]) -> list[Any]:
        if api == "responses":
            made = await client.responses.create(model="m", input=said)
            assert made.output[0].content[0].text == "Hm." and made.output_text == "It is."
            return list(made.output)
        if api == "chat":
            made = await client.chat.completions.create(model="m", messages=said)
            return [made.choices[0].message]
        chunks = [chunk async for chunk in await client.chat.completions.create(model="m", messages=said, stream=True)]
        parts = [chunk.choices[0].delta for chunk in chunks]
        thought = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
        content = "".join(part.content or "" for part in parts)
        return [{"role": "assistant", "content": content, "reasoning_content": thought}]

    async def agent(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=client.url, api_key=client.key) as own:
            said: list[Any] = [GO]
            for _ in range(3):
                said += [*await answer(own, said), {"role": "user", "content": "and?"}]

    text = sampled(template, prompt, "Hm.", "It is.")
    settings: dict[str, Any] = {"rewrites": "segment", "tokenizer": tokenizer, "check": "loose", "context": 4000}
    (one,), engine = played(agent, lambda name, turn: text, **settings)
    assert (one.fault, len(one.chat.segments), len(one.chat.rewards)) == (None, 1, 3)
    assert_exact(one, engine, "row-0")
