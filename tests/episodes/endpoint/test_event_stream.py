"""Tests of `event_stream.py` and `flights.py`: clients that read an answer while the policy samples it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from flowrl.backends import TorchRollout, TorchScorer
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.episodes import Endpoint, Row
from flowrl.operators import Interact
from tests.episodes import scripted
from tests.episodes.endpoint.clients import Client, played
from tests.episodes.endpoint.test_clients import CONTEXT
from tests.episodes.endpoint.test_session import assert_exact
from tests.episodes.scripted import SAMPLING, Scripted, say
from tests.operators.engines.test_interact import prompts_of


class Partial(Scripted):
    """A policy whose tokens can be read while it samples; it stops after some steps until it is released."""

    made: ClassVar[list[Partial]] = []

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.held_at: int | None = None
        Partial.made.append(self)

    def step(self) -> list[str]:
        return [] if self.steps == self.held_at else super().step()

    def sampled_so_far(self, name: str, start: int) -> list[int]:
        ids, count = self._under_way.get(name, ([], 0))
        return ids[start:count]


@pytest.fixture(autouse=True)
def _partial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "Scripted", Partial)


async def deltas(
    client: Client, path: str = "/chat/completions", **fields: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a streamed answer, as they arrive."""
    body = {"model": "m", "messages": client.messages, "stream": True, **fields}
    async with client.http.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def text_of(event: dict[str, Any]) -> str:
    return str(event["choices"][0]["delta"].get("content") or "")


def test_a_client_reads_tokens_while_the_policy_samples() -> None:
    async def agent(client: Client) -> None:
        engine = Partial.made[-1]
        engine.held_at = 6
        text = ""
        async for event in deltas(client):
            text += text_of(event)
            if text == "row-0 "[: engine.held_at]:  # the policy waits until the client has read so much
                engine.held_at = None
        assert text == "row-0 says 0"
        client.messages.append({"role": "assistant", "content": text})
        await client.ask("and?")

    (one,), engine = played(agent, say)
    assert (one.fault, len(one.chat.rewards), len(one.chat.segments)) == (None, 2, 1)
    assert_exact(one, engine, "row-0")


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_a_client_that_closes_the_connection_abandons_the_answer(path: str) -> None:
    async def agent(client: Client) -> None:
        engine = Partial.made[-1]
        engine.held_at = 6
        fields: dict[str, Any] = {} if path == "/chat/completions" else {"messages": None, "input": "go"}
        events = deltas(client, path, **fields)
        async for event in events:
            if event.get("delta") or ("choices" in event and text_of(event)):
                break
        await events.aclose()
        while "row-0" not in engine.dropped:  # the engine computes no more of it
            await asyncio.sleep(0)
        engine.held_at = None
        await client.ask()

    (one,), _ = played(agent, say)
    assert (one.fault, len(one.chat.rewards), one.chat.counts["abandoned"]) == (None, 1, 1)
    assert [message["content"] for message in one.chat.messages] == ["go", "row-0 says 1"]


def test_a_refused_stream_is_an_error_of_http() -> None:
    async def agent(client: Client) -> None:
        await client.ask()
        response = await client.post([{"role": "user", "content": "all anew"}], stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "episode.rewritten-context")

    (one,), _ = played(agent, say)
    assert one.fault is None


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_an_error_after_the_first_token_is_an_event(path: str) -> None:
    """The episode of a stream ends while the policy samples."""
    streams: list[asyncio.Task[list[dict[str, Any]]]] = []

    async def agent(client: Client) -> None:
        if client.row.row_id == "row-1":
            while not streams:
                await asyncio.sleep(0)
            last = (await streams[0])[-1]
            assert last.get("error", last)["code"] == "invalid_api_key"
            return
        begun = asyncio.Event()

        async def read() -> list[dict[str, Any]]:
            events = []
            own = Client(client.url, client.key, client.row)
            fields: dict[str, Any] = {} if path == "/chat/completions" else {"messages": None, "input": "go"}
            async with own.http:
                async for event in deltas(own, path, **fields):
                    events.append(event)
                    if event.get("delta") or ("choices" in event and text_of(event)):
                        begun.set()
            return events

        Partial.made[-1].held_at = 6
        streams.append(asyncio.create_task(read()))
        await begun.wait()

    episodes, _ = played(agent, say, count=2)
    assert [one.fault for one in episodes] == [None, None]


def test_the_engine_of_torch_gives_tokens(tiny: str) -> None:
    engine: Any = TorchRollout(tiny, frozen=True, device="cpu").build(CONTEXT)
    chunks: list[int] = []

    async def agent(url: str, key: str, row: Row) -> float:
        client = Client(url, key, row)
        async with client.http:
            for turn in range(2):
                texts = [text async for event in deltas(client) if (text := text_of(event))]
                chunks.append(len(texts))
                client.messages.append({"role": "assistant", "content": "".join(texts)})
                client.messages.append({"role": "user", "content": f"{turn}?"})
        return 1.0

    operator = Interact(Endpoint(agent), rollout=engine, context=300, max_new_tokens=8, rewrites="segment")
    batch = operator(prompts_of(engine.tokenizer, 3), key=Key.of(5), metrics=(metrics := Metrics()))
    scorer = TorchScorer(tiny, device="cpu").build(CONTEXT)
    assert (batch.rollout_log_probs - scorer.log_probs(batch)).abs().max() < 1e-4
    assert metrics.compute()["episodes/segments"] == 1 and max(chunks) > 3


def test_long_answers_have_fewer_deltas_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading takes time that grows with the answer, so their number must not."""
    words = 3000 * "x"

    async def agent(client: Client) -> None:
        texts = [text async for event in deltas(client) if (text := text_of(event))]
        assert "".join(texts) == words and 200 < len(texts) < 1000

    monkeypatch.setattr(scripted, "SAMPLING", replace(SAMPLING, max_new_tokens=4000))
    (one,), _ = played(agent, lambda name, turn: words, context=5000)
    assert one.fault is None
