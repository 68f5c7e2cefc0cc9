"""Clients of PyPI at the endpoint of the real engine: what is trained is what was sampled, token by token.

They cover `flowrl/episodes/endpoint/server.py` and `session.py`. A client that is not installed is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrl import Key
from flowrl.backends import TorchRollout, TorchScorer
from flowrl.data.metrics import Metrics
from flowrl.data.segments import begins
from flowrl.episodes import Endpoint, Row
from flowrl.operators import Interact
from flowrl.protocols.protocols import Request, Response
from flowrl.records import EpisodeBatch
from flowrl.run.engine.build import EngineBuilder
from tests.episodes.endpoint.clients import Client
from tests.operators.engines.test_interact import prompts_of

CONTEXT = EngineBuilder({}, seed=0)


class Recorded:
    """An engine that records what it was asked and what it sampled, by request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sampled: list[tuple[Request, Response]] = []
        self._requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        self._requests[request.name] = request
        self._engine.submit(request)

    def step(self) -> list[str]:
        ended: list[str] = self._engine.step()
        return ended

    def drop(self, name: str) -> None:
        self._engine.drop(name)

    def sampled_so_far(self, name: str, start: int) -> list[int]:
        ids: list[int] = self._engine.sampled_so_far(name, start)
        return ids

    def take(self, name: str) -> Response:
        response: Response = self._engine.take(name)
        self.sampled.append((self._requests[name], response))
        return response


@pytest.fixture(scope="module")
def engine(tiny: str) -> Any:
    return TorchRollout(tiny, frozen=True, device="cpu").build(CONTEXT)


def of_httpx() -> Callable[..., Any]:
    async def agent(url: str, key: str, row: Row) -> float:
        client = Client(url, key, row)
        async with client.http:
            for turn in range(3):
                await client.ask(None if turn == 0 else f"{turn}?")
        return 1.0

    return agent


def of_openai() -> Callable[..., Any]:
    openai = pytest.importorskip("openai", reason="needs pip install openai")

    async def agent(url: str, key: str, row: Row) -> float:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            messages: list[Any] = list(row.messages)
            for turn in range(3):
                made = await client.chat.completions.create(model="m", messages=messages, logprobs=True)
                choice = made.choices[0]
                assert len(choice.logprobs.content) == made.usage.completion_tokens
                messages += [choice.message, {"role": "user", "content": f"{turn}?"}]
            chunks = await client.chat.completions.create(model="m", messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
            await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
        return 1.0

    return agent


def of_responses() -> Callable[..., Any]:
    """The responses API: stateless, by a stored response, and as events."""
    openai = pytest.importorskip("openai", reason="needs pip install openai")

    async def agent(url: str, key: str, row: Row) -> float:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            items: list[Any] = [{"role": "user", "content": row.messages[0]["content"]}]
            made = await client.responses.create(model="m", input=items, store=False)
            items += [*made.output, {"role": "user", "content": "0?"}]
            second = await client.responses.create(model="m", input=items)
            assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
            fields = {"model": "m", "input": "1?", "previous_response_id": second.id}
            async with client.responses.stream(**fields) as stream:
                events = [event async for event in stream]
            third = events[-1].response  # completed, or incomplete if its length has ended it
            assert third.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
            stream = await client.responses.create(
                model="m", input="2?", previous_response_id=third.id, max_output_tokens=2, stream=True
            )
            last = [event async for event in stream][-1]
            assert last.type in ("response.completed", "response.incomplete")
        return 1.0

    return agent


def of_langchain() -> Callable[..., Any]:
    langchain = pytest.importorskip("langchain_openai", reason="needs pip install langchain-openai")

    def agent(url: str, key: str, row: Row) -> float:
        model = langchain.ChatOpenAI(base_url=url, api_key=key, model="m", temperature=0.1)
        messages: list[Any] = [("user", row.messages[0]["content"])]
        for turn in range(3):
            messages += [model.invoke(messages), ("user", f"{turn}?")]
        return 1.0

    return agent


def of_litellm() -> Callable[..., Any]:
    litellm = pytest.importorskip("litellm", reason="needs pip install litellm")

    def agent(url: str, key: str, row: Row) -> float:
        messages: list[Any] = list(row.messages)
        for turn in range(3):
            made = litellm.completion("openai/m", messages, api_base=url, api_key=key)
            messages += [made.choices[0].message.model_dump(), {"role": "user", "content": f"{turn}?"}]
        return 1.0

    return agent


def of_smolagents() -> Callable[..., Any]:
    smolagents = pytest.importorskip("smolagents", reason="needs pip install smolagents")

    def agent(url: str, key: str, row: Row) -> float:
        model = smolagents.OpenAIServerModel("m", api_base=url, api_key=key)
        messages: list[Any] = list(row.messages)
        for turn in range(3):
            made = model.generate([{**message} for message in messages])
            messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": f"{turn}?"}]
        return 1.0

    return agent


def assert_trained_is_sampled(batch: EpisodeBatch, engine: Recorded) -> None:
    """The tokens on the mask are the sampled ones, each once and after its own context; all else is off the mask."""
    width = batch.responses.shape[1]
    for i in range(len(batch.turns)):
        expected = [(r.ids, a) for r, a in engine.sampled if r.name.partition("~")[0] == str(i)]
        found = []
        starts = begins(batch.attention_mask, batch.position_ids)[i].nonzero().flatten().tolist()
        there = batch.attention_mask[i].nonzero().flatten().tolist()
        for turn in range(int(batch.turns[i])):
            at = (batch.turn_ids[i] == turn).nonzero().flatten() + batch.input_ids.shape[1] - width
            segment = max([there[0], *(start for start in starts if start <= at[0])])
            mask = slice(int(at[0]), int(at[-1]) + 1)
            log_probs = batch.rollout_log_probs[i][batch.turn_ids[i] == turn].tolist()
            found.append((batch.input_ids[i, segment : at[0]].tolist(), batch.input_ids[i, mask].tolist(), log_probs))
        wanted = [(ids, answer.ids, torch.tensor(answer.log_probs).tolist()) for ids, answer in expected]
        assert sorted(found) == sorted(wanted)
        assert int(batch.response_mask[i].sum()) == sum(len(answer.ids) for _, answer in expected)


@pytest.mark.parametrize("client", [of_httpx, of_openai, of_responses, of_langchain, of_litellm, of_smolagents])
def test_what_is_trained_is_what_was_sampled(client: Callable[[], Any], engine: Any, tiny: str) -> None:
    recorded, metrics = Recorded(engine), Metrics()
    operator = Interact(
        Endpoint(client()), rollout=recorded, max_turns=5, context=300, max_new_tokens=8, rewrites="segment"
    )
    batch = operator(prompts_of(engine.tokenizer, 4), key=Key.of(5), metrics=metrics)
    assert_trained_is_sampled(batch, recorded)
    found = metrics.compute()
    assert found["episodes/segments"] == 1 and found["reward/mean"] == 1.0
    assert (batch.turns >= 3).all() and found["episodes/failed"] == found["episodes/abandoned"] == 0
    scorer = TorchScorer(tiny, device="cpu").build(CONTEXT)
    assert (batch.rollout_log_probs - scorer.log_probs(batch)).abs().max() < 1e-4
