"""Tests of `server.py`: keys, paths, streams and log-probs over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from flowrl.episodes.endpoint import server
from tests.episodes.endpoint.clients import Client, played
from tests.episodes.scripted import NAME, say
from tests.support.templates import tokenizer_of


def test_a_key_is_that_of_one_episode_while_it_is_played() -> None:
    keys: list[tuple[str, str]] = []

    async def agent(client: Client) -> None:
        keys.append((client.url, client.key))
        wrong = await client.post(headers={"authorization": "Bearer flowrl-wrong"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.post(headers={"authorization": ""})).status_code == 401
        await client.ask()

    episodes, engine = played(agent, say, count=3)
    assert [one.fault for one in episodes] == [None] * 3 and len(engine.requests) == 3
    assert len({key for _, key in keys}) == 3 and len({url for url, _ in keys}) == 1
    for url, key in keys:
        assert url.startswith("http://127.0.0.1:")
        late = httpx.post(f"{url}/chat/completions", json={}, headers={"authorization": f"Bearer {key}"})
        assert late.status_code == 401


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_has_the_same_answer(usage: bool) -> None:
    chunks: list[Any] = []

    async def agent(client: Client) -> None:
        response = await client.post(stream=True, stream_options={"include_usage": usage})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunks.extend(map(json.loads, events))

    (one,), _ = played(agent, say)
    assert one.fault is None
    first, text, last = chunks[:3]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "row-0 says 0"}
    assert first["object"] == "chat.completion.chunk" and last["choices"][0]["finish_reason"] == "stop"
    assert len(chunks) == 3 + usage and (not usage or chunks[3]["usage"]["completion_tokens"] == 13)


def test_log_probs_are_those_of_the_sampled_tokens() -> None:
    async def agent(client: Client) -> None:
        body = (await client.post(logprobs=True)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == "row-0 says 0<|im_end|>"
        assert {token["logprob"] for token in content} == {-0.25}
        assert body["usage"]["completion_tokens"] == len(content)
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + len(content)

    (one,), _ = played(agent, say)
    assert one.fault is None


def test_other_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(client: Client) -> None:
        models = (await client.http.get("/models")).json()
        assert [model["id"] for model in models["data"]] == ["policy"]
        unknown = await client.http.post("/embeddings", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
        broken = await client.http.post("/chat/completions", content=b"{")
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
        nested = await client.http.post("/chat/completions", content=b"[" * 100_000)
        assert nested.status_code == 400
        lone = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        assert (await client.http.post("/chat/completions", content=lone)).status_code == 400
        monkeypatch.setattr(server, "MAX_BODY", 10)
        assert (await client.post()).status_code == 413

    (one,), engine = played(agent, say)
    assert one.fault is None and not engine.requests


def test_what_is_overridden_is_reported() -> None:
    async def agent(client: Client) -> None:
        response = await client.post(temperature=0.3, top_p=0.5)
        assert response.headers["x-flowrl-overridden"] == "temperature, top_p"

    (one,), engine = played(agent, say)
    assert (one.fault, one.chat.counts["overridden"]) == (None, 1)
    assert engine.requests[0].sampling.temperature == 1.0


def test_strict_refuses_it() -> None:
    async def agent(client: Client) -> None:
        response = await client.post(temperature=0.3)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")
        await client.ask(temperature=1.0)

    (one,), engine = played(agent, say, endpoint={"strict": True})
    assert one.fault is None and len(engine.requests) == 1


def test_a_score_by_http_is_the_reward_of_the_last_answer() -> None:
    async def agent(client: Client) -> None:
        early = await client.http.post("/score", json={"score": 1.0})
        assert (early.status_code, early.json()["error"]["code"]) == (400, "episode.reward-before-answer")
        await client.ask()
        assert (await client.http.post("/score", json={"score": 0.5})).status_code == 200
        wrong = await client.http.post("/score", json={"score": "x"})
        assert wrong.json()["error"]["code"] == "episode.invalid-reward"
        await client.ask("and?")
        await client.http.post("/score", json={"score": 2})

    (one,), _ = played(agent, say)
    assert (one.fault, one.chat.rewards) == (None, [0.5, 2.0])
    assert one.chat.transcript is not None
    assert tokenizer_of(NAME).shown(one.chat.transcript.ids).endswith("row-0 says 1<|im_end|>")
