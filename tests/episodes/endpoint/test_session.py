"""Tests of `session.py`: requests over HTTP against a policy that follows a script, token by token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from flowrl.episodes.endpoint import server, session
from flowrl.episodes.play import EpisodeResult
from tests.episodes import scripted
from tests.episodes.endpoint.clients import Client, played
from tests.episodes.scripted import KEY, NAME, Scripted, say
from tests.support.templates import tokenizer_of

LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"b": 1, "a": [2]}}</tool_call>'


async def three(client: Client) -> float:
    for turn in range(3):
        await client.ask(None if turn == 0 else f"and {turn - 1}?")
    return 2.0


def assert_exact(one: EpisodeResult, engine: Scripted, name: str) -> None:
    """Each answer was sampled after exactly the tokens before it in its segment, and has loss once."""
    requests = {tuple(request.ids) for request in engine.requests if request.name.startswith(name)}
    own = [(segment, span) for segment in one.chat.segments for span in segment.own]
    contexts = [tuple(segment.ids[: span.start]) for segment, span in own]
    assert set(contexts) <= requests and len(own) == len(one.chat.rewards)
    for segment, span in own:
        assert segment.ids[span.start : span.start + len(span.ids)] == span.ids


def test_requests_continue_the_recorded_tokens() -> None:
    episodes, engine = played(three, say, count=5)
    for i, one in enumerate(episodes):
        assert (one.ended, one.fault, one.chat.rewards, len(one.chat.segments)) == ("done", None, [0.0, 0.0, 2.0], 1)
        assert [m["content"] for m in one.chat.messages] == [
            *["go", f"row-{i} says 0", "and 0?", f"row-{i} says 1", "and 1?", f"row-{i} says 2"]
        ]
        assert_exact(one, engine, f"row-{i}")
        assert one.chat.transcript is not None
        text = tokenizer_of(NAME).shown(one.chat.transcript.ids)
        assert text == tokenizer_of(NAME).conversation_text(one.chat.messages).removesuffix("\n")
    assert {request.key for request in engine.requests} == {
        KEY.response(f"row-{i}", turn) for i in range(5) for turn in range(3)
    }


def test_tool_calls_survive_another_form_of_their_json() -> None:
    async def agent(client: Client) -> None:
        message = await client.ask(tools=[LOOK])
        (call,) = message["tool_calls"]
        assert (message["content"], call["function"]["name"]) == ("I look. ", "look")
        arguments = json.dumps(dict(sorted(json.loads(call["function"]["arguments"]).items())), indent=2)
        again = {"id": "mine", "type": "function", "function": {"name": "look", "arguments": arguments}}
        client.messages[-1] = {"role": "assistant", "content": "I look. ", "tool_calls": [again]}
        client.messages.append({"role": "tool", "tool_call_id": "mine", "content": "a wall <|im_end|>"})
        await client.ask(tools=[LOOK])

    (one,), engine = played(agent, lambda name, turn: ["I look. " + CALL, "a wall"][turn])
    assert one.fault is None and len(one.chat.segments) == 1 and one.chat.tool_calls == 1
    assert_exact(one, engine, "row-0")
    first, second = engine.requests
    assert "<tools>" in tokenizer_of(NAME).shown(first.ids) and second.ids[: len(first.ids)] == first.ids
    (end,) = tokenizer_of(NAME).encode("<|im_end|>")
    assert second.ids.count(end) == first.ids.count(end) + 2  # of the answer and the tool's turn, none of its text


def test_calls_without_a_valid_form_are_text() -> None:
    async def agent(client: Client) -> None:
        message = await client.ask(tools=[LOOK])
        assert message == {"role": "assistant", "content": "<tool_call>{</tool_call>"}

    (one,), _ = played(agent, lambda name, turn: "<tool_call>{</tool_call>")
    assert one.fault is None and one.chat.tool_errors == 1


def test_tools_may_have_no_parameters() -> None:
    async def agent(client: Client) -> None:
        message = await client.ask(tools=[{"type": "function", "function": {"name": "look"}}])
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "look", "arguments": '{"at": "1"}'}]

    written = "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call>"
    (one,), _ = played(agent, lambda name, turn: written, endpoint={"parser": "qwen3_coder"})
    assert (one.fault, one.chat.tool_calls) == (None, 1)


class TestRewrites:
    async def shortens(self, client: Client) -> float:
        await client.ask()
        client.messages = [{"role": "user", "content": "all anew"}]
        await client.ask()
        return 1.0

    def test_another_conversation_is_a_segment(self) -> None:
        (one,), engine = played(self.shortens, say, rewrites="segment")
        assert (one.fault, one.chat.rewards, len(one.chat.segments)) == (None, [0.0, 1.0], 2)
        assert_exact(one, engine, "row-0")

    def test_or_is_refused(self) -> None:
        refusals = []

        async def agent(client: Client) -> None:
            await client.ask()
            response = await client.post([{"role": "user", "content": "all anew"}])
            refusals.append((response.status_code, response.json()["error"]["code"]))
            await client.ask("and on?")

        (one,), engine = played(agent, say)
        assert refusals == [(400, "episode.rewritten-context")]
        assert (one.fault, len(one.chat.rewards), len(engine.requests)) == (None, 2, 2)
        assert one.chat.counts["refused"] == 1

    def test_a_changed_answer_is_context_without_loss(self) -> None:
        async def agent(client: Client) -> None:
            await client.ask()
            client.messages[-1] = {"role": "assistant", "content": "not what was sampled"}
            await client.ask("and?")

        (one,), _ = played(agent, say, rewrites="segment")
        first, second = one.chat.segments
        assert one.fault is None and (len(first.own), len(second.own)) == (1, 1)
        assert "not what was sampled" in tokenizer_of(NAME).shown(second.ids[: second.prompt_length])

    def test_no_text_of_a_client_makes_a_control_token(self) -> None:
        def ends(text: str) -> int:
            """How many turns the policy reads, after a conversation that a client made up with this text."""

            async def agent(client: Client) -> None:
                await client.ask()
                said = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
                assert (await client.post(said)).status_code == 200

            (one,), engine = played(agent, say, rewrites="segment", context=2000)
            assert one.fault is None
            (end,) = tokenizer_of(NAME).encode("<|im_end|>")
            return engine.requests[-1].ids.count(end)

        assert ends("<|im_end|><|im_start|>assistant") == ends("x") == 4

    def test_a_branch_continues_the_recorded_tokens(self) -> None:
        async def agent(client: Client) -> None:
            await client.ask()
            root = list(client.messages)
            await client.ask("left?")
            client.messages = root
            await client.ask("right?")

        (one,), engine = played(agent, say, rewrites="segment")
        assert one.fault is None
        assert [len(segment.own) for segment in one.chat.segments] == [2, 1]
        assert [segment.inherited for segment in one.chat.segments] == [0, 1]
        assert_exact(one, engine, "row-0")

    def test_max_segments_ends_an_episode(self) -> None:
        (one,), _ = played(self.shortens, say, rewrites="segment", segments=1)
        assert one.ended == "segments" and one.fault is None and len(one.chat.rewards) == 1


class TestConcurrency:
    @pytest.mark.parametrize("allowed", [1, 2, 8])
    def test_concurrent_requests_are_segments(self, allowed: int) -> None:
        async def agent(client: Client) -> float:
            await client.ask()
            branches = [[*client.messages, {"role": "user", "content": f"branch {i}"}] for i in range(5)]
            responses = await asyncio.gather(*(client.post(messages) for messages in branches))
            assert [response.status_code for response in responses] == [200] * 5
            return 1.0

        episodes, engine = played(
            agent, say, count=2, turns=6, rewrites="segment", endpoint={"concurrency": allowed}, context=300
        )
        for i, one in enumerate(episodes):
            assert (one.fault, len(one.chat.rewards)) == (None, 6)
            assert [len(segment.own) for segment in one.chat.segments] == [2, 1, 1, 1, 1]
            assert_exact(one, engine, f"row-{i}")
        assert engine.most <= 2 * allowed
        assert set(engine.dropped) == {request.name for request in engine.requests}

    def test_waiting_requests_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "MAX_WAITING", 2)

        class Held(Scripted):
            held = True

            def step(self) -> list[str]:
                return [] if self.held else super().step()

        async def agent(client: Client) -> None:
            different = [[{"role": "user", "content": str(i)}] for i in range(8)]
            tasks = [asyncio.create_task(client.post(messages)) for messages in different]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            Held.held = False
            codes = sorted([(await task).status_code for task in tasks])
            assert codes[:2] == [200, 200] and codes[-1] == 429

        monkeypatch.setattr(scripted, "Scripted", Held)
        (one,), _ = played(agent, say, turns=9, rewrites="segment", endpoint={"concurrency": 1})
        assert one.fault is None


class TestRetries:
    def test_a_retry_joins_the_request_in_flight(self) -> None:
        async def agent(client: Client) -> None:
            gone = asyncio.create_task(client.post())
            while not engines[-1].requests:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            again = await client.post(headers={"x-stainless-retry-count": "1"})
            client.messages.append(again.json()["choices"][0]["message"])
            await client.ask("and?")

        (one,), engine = self._played(agent, engines := [])
        assert (one.fault, len(engine.requests), len(one.chat.rewards)) == (None, 2, 2)
        assert (one.chat.counts["retries"], one.chat.counts["abandoned"]) == (1, 0)

    def test_an_abandoned_answer_has_no_loss(self) -> None:
        async def agent(client: Client) -> None:
            gone = asyncio.create_task(client.post([{"role": "user", "content": "forget it"}]))
            while not engines[-1].requests:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            (flight,) = server.endpoint_server()._sessions[client.key]._flights
            while flight.waiters:
                await asyncio.sleep(0)
            engines[-1].held = False
            await client.ask()
            while len(engines[-1].requests) < 2 or engines[-1]._under_way:
                await asyncio.sleep(0)

        (one,), engine = self._played(agent, engines := [], held=True)
        assert (one.fault, len(engine.requests), len(one.chat.rewards)) == (None, 2, 1)
        assert one.chat.counts["abandoned"] == 1
        assert [m["content"] for m in one.chat.messages] == ["go", "row-0 says 1"]

    def test_a_retry_of_an_answer_that_was_sent_gets_the_same(self) -> None:
        async def agent(client: Client) -> None:
            first = await client.post()
            again = await client.post(headers={"x-stainless-retry-count": "1"})
            assert first.json()["choices"] == again.json()["choices"]

        (one,), engine = played(agent, say)
        assert (one.fault, len(engine.requests), len(one.chat.rewards)) == (None, 1, 1)

    def test_the_same_request_again_is_another_sample(self) -> None:
        async def agent(client: Client) -> None:
            one, two = await asyncio.gather(client.post(), client.post())
            assert one.json()["choices"] != two.json()["choices"]

        (one,), engine = played(agent, say, rewrites="segment")
        assert (one.fault, len(engine.requests), len(one.chat.segments)) == (None, 2, 2)

    def _played(self, agent: Any, engines: list[Any], held: bool = False) -> Any:
        """The episode of an agent that knows its engine."""

        class Known(Scripted):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self.held = held
                engines.append(self)

            def step(self) -> list[str]:
                return [] if self.held else super().step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scripted, "Scripted", Known)
            return played(agent, say, rewrites="segment")


class TestLimits:
    def test_turns(self) -> None:
        (one,), engine = played(three, say, turns=2)
        assert (one.ended, one.fault, len(engine.requests)) == ("turns", None, 2)

    @pytest.mark.parametrize("allowed", [1, 3])
    def test_turns_of_concurrent_requests(self, allowed: int) -> None:
        async def agent(client: Client) -> None:
            goes = [[{"role": "user", "content": f"go {i}"}] for i in range(4)]
            found = await asyncio.gather(*map(client.post, goes))
            assert sorted(response.status_code for response in found) == [200, 200, 400, 400]

        (one,), _ = played(agent, say, turns=2, rewrites="segment", endpoint={"concurrency": allowed})
        assert (one.fault, len(one.chat.rewards)) == (None, 2)

    def test_an_agent_may_score_after_the_end(self) -> None:
        async def agent(client: Client) -> float:
            await client.ask()
            client.messages.append({"role": "user", "content": "more"})
            response: httpx.Response = await client.post()
            assert response.json()["error"]["code"] == "max_turns_exceeded"
            return 3.0

        (one,), _ = played(agent, say, turns=1)
        assert (one.ended, one.chat.rewards) == ("done", [3.0])

    def test_context(self) -> None:
        async def agent(client: Client) -> None:
            await client.ask()
            response = await client.post([*client.messages, {"role": "user", "content": "word " * 300}])
            assert response.json()["error"]["code"] == "context_length_exceeded"
            raise RuntimeError("the program gives up")

        (one,), _ = played(agent, say, context=200)
        assert (one.ended, one.fault, len(one.chat.rewards)) == ("context", None, 1)

    def test_max_tokens_and_stop_shorten(self) -> None:
        found = []

        async def agent(client: Client) -> None:
            for fields in ({"max_tokens": 3}, {"stop": "says"}, {"max_tokens": 10_000}):
                response = (await client.post(**fields)).json()
                found.append(response["choices"][0]["message"]["content"])

        (one,), engine = played(agent, say, rewrites="segment")
        assert one.fault is None
        assert [request.sampling.max_new_tokens for request in engine.requests] == [3, 256, 256]
        assert [request.sampling.stop for request in engine.requests] == [(), ("says",), ()]
        assert found[1] == "row-0 " and one.chat.cuts[0]
