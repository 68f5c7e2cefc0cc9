"""Contract of rollout engines with requests: tests that the test file of each engine inherits.

The file provides the fixtures `engine` (with the weights of `trainer`), `trainer`, `other` and `folder`, as for
`answers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.data.metrics import Metrics
from flowrl.episodes import Answer, Chat, Endpoint, Environment, Reply, Row, ToolCall
from flowrl.operators import Interact
from flowrl.protocols.protocols import Request, Response, Sampled, Sampling, StreamingRollout
from tests.engines.contract.answers import GREEDY, KEY, assert_log_probs_of, logits_of, names, ragged, rows
from tests.engines.contract.sources import Altered
from tests.episodes.endpoint.clients import Client
from tests.episodes.endpoint.test_clients import Recorded, assert_trained_is_sampled
from tests.operators.engines.test_interact import prompts_of
from tests.support.errors import raises
from tests.support.models import EOS, VOCAB

FREE = Sampling(1.0, 0, 1.0, max_new_tokens=12, ignore_eos=True)
SAMPLINGS = [
    FREE,
    replace(GREEDY, max_new_tokens=9),
    Sampling(1.3, 0, 1.0, max_new_tokens=16, stop_token_ids=(20, 21, 22, 23, 24, 25)),
    Sampling(0.7, 6, 1.0, max_new_tokens=5),
    Sampling(1.0, 0, 1.0, max_new_tokens=20, stop=("e", "a", "3", "T")),
    replace(FREE, max_new_tokens=1),
]
LONG = 140
"""Tokens of a context that is long enough for the prefix cache of any engine (vLLM's blocks have 128 on a CPU)."""


def tokens(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(EOS + 5, VOCAB, (count,), generator=draw).tolist()


def finished(engine: Any, count: int) -> dict[str, Response]:
    """Step until `count` requests have ended."""
    taken: dict[str, Response] = {}
    while len(taken) < count:
        taken |= {name: engine.take(name) for name in engine.step()}
    return taken


def alone(engine: Any, request: Request) -> Response:
    """The response to the request without concurrent ones."""
    engine.submit(replace(request, name="alone"))
    return finished(engine, 1)["alone"]


def assert_response_of(engine: Any, model: Any, request: Request, response: Response) -> None:
    """Assert that log-probs, greedy tokens and the end of a response are those of the model."""
    sampling, logits = request.sampling, logits_of(model, list(request.ids), response.ids)
    if sampling.temperature == 0:
        assert response.ids == logits.argmax(-1).tolist()
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response.ids)[:, None])[:, 0]
    assert response.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    text = engine.tokenizer.text

    def over(ids: Sequence[int]) -> bool:
        return not ends.isdisjoint(ids) or any(string in text(ids) for string in sampling.stop)

    assert not over(response.ids[:-1])
    assert response.ended == ("stop" if over(response.ids) else "length")
    assert response.ended == "stop" or len(response.ids) == sampling.max_new_tokens


def assert_turns_use_synced_weights(engine: Any, synced: Any, other: Any, samples_by_key: bool = True) -> None:
    """Assert that a second turn reuses the cache of the first with the weights of `synced`, but not with those of
    `other`; and that a sync during a request is refused."""

    def complete(request: Request, source: Any) -> tuple[Response, int]:
        """The response, and the number of cached tokens."""
        before = engine.cached_tokens
        response = alone(engine, request)
        mask = torch.ones(1, len(response.ids), dtype=torch.bool)
        ids, log_probs, versions = (torch.tensor([column]) for column in response[:3])
        sampled = Sampled(ids, mask, log_probs, versions)
        context = torch.tensor([request.ids])
        assert_log_probs_of(source, context, torch.ones_like(context, dtype=torch.bool), sampled, 1.0)
        assert set(response.versions) == {engine.receipt.version}
        return response, engine.cached_tokens - before

    one = Request("a", tokens(LONG, 1), FREE, KEY.response("a"), retain_cache=True)
    first, _ = complete(one, synced)
    two = replace(one, ids=[*one.ids, *first.ids, *tokens(3, 2)], key=KEY.response("a", 1))
    second, known = complete(two, synced)
    assert 128 <= known < len(two.ids)
    engine.submit(two)
    if engine.step() == []:
        with raises("engine.requests-in-flight", requests=1, request="a"):
            engine.sync(other)
        assert finished(engine, 1)["a"].ids == second.ids or not samples_by_key
    engine.drop("a")
    engine.sync(Altered(other, version=8))
    third, known = complete(two, other)
    assert known == 0 and set(third.versions) == {8}


class Counts(Environment):
    """Three turns; replies with the length of the response, which is also its reward."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"{len(answer.ids)} tokens", reward=len(answer.ids) / 8, done=answer.turn == 2)


async def speaks(url: str, key: str, row: Row) -> float:
    client = Client(url, key, row)
    async with client.http:
        first = await client.ask()
        await client.ask("Sure?", max_tokens=5)
    return len(first["content"]) / 8


async def forks(url: str, key: str, row: Row) -> float:
    """Two concurrent branches from the first answer, one of which continues; then a compressed conversation."""
    client = Client(url, key, row)
    async with client.http:
        await client.ask()
        branches = [[*client.messages, {"role": "user", "content": f"branch {i}"}] for i in range(2)]
        left, _ = await asyncio.gather(*(client.post(messages) for messages in branches))
        client.messages = [*branches[0], left.json()["choices"][0]["message"]]
        await client.ask("and then?")
        client.messages = [{"role": "user", "content": "In short: go."}]
        await client.ask()
    return 1.0


async def compresses(chat: Chat, row: Row) -> float:
    """A branch from the first answer, then a compressed conversation of two turns."""
    await chat.answer()
    start = chat.messages[:2]
    await chat.answer("left?")
    chat.rewrite([*start, {"role": "user", "content": "right?"}])
    await chat.answer()
    chat.rewrite([{"role": "user", "content": "In short: go."}])
    await chat.answer()
    await chat.answer("and then?")
    return 1.0


async def doubter(chat: Chat, row: Row) -> float:
    first = await chat.answer()
    second = await chat.answer("Are you sure?")
    return float(len(first.ids) - len(second.ids))


def calling(text: str) -> list[ToolCall]:
    """Parse three of four texts as a tool call: of 12 that an engine samples freely, one has a call."""
    return [ToolCall("letters", {"count": len(text)})] if sum(map(ord, text)) % 4 else []


async def letters(count: int) -> str:
    """A text of `count` letters."""
    return "x" * count


class RequestTests:
    """Single and concurrent requests, and episodes."""

    samples_by_key: ClassVar[bool] = True  # responses depend only on the key of their request, not on concurrent ones

    def test_requests_join_and_leave_between_steps_over_several_turns(
        self, engine: Any, trainer: TorchTrainerEngine
    ) -> None:
        """Each request has its own sampling parameters."""
        assert isinstance(engine, StreamingRollout)
        context = {str(i): tokens(LONG if i == 0 else 3 + 2 * i, i) for i in range(len(SAMPLINGS))}
        turn, waiting, left = dict.fromkeys(context, 0), list(context), len(context)
        completed: list[tuple[Request, Response]] = []
        running: dict[str, Request] = {}

        def ask(name: str) -> None:
            key = KEY.response(name, turn[name])
            running[name] = Request(name, context[name], SAMPLINGS[int(name)], key, retain_cache=turn[name] < 2)
            engine.submit(running[name])

        while left:
            if waiting:
                ask(waiting.pop(0))
            for name in engine.step():
                request, response = running.pop(name), engine.take(name)
                completed.append((request, response))
                context[name] = [*context[name], *response.ids, *tokens(3, turn[name])]
                turn[name] += 1
                if turn[name] < 3:
                    ask(name)
                else:
                    left -= 1
        assert engine.step() == [] and len(completed) == 3 * len(SAMPLINGS)
        for request, response in completed:
            assert_response_of(engine, trainer.model, request, response)
            assert set(response.versions) == {engine.receipt.version}
            assert not self.samples_by_key or alone(engine, request).ids == response.ids

    def test_generate_equals_submitting_requests_and_stepping(self, engine: Any) -> None:
        prompts, mask = ragged(engine, [4, 9, 140, 4])
        sampling = FREE if self.samples_by_key else GREEDY
        requests = [
            Request(name, ids[attended].tolist(), sampling, KEY.response(name))
            for ids, attended, name in zip(prompts, mask, names(4), strict=True)
        ]
        for request in requests:
            engine.submit(request)
        taken = finished(engine, 4)
        whole = engine.generate(prompts, mask, names(4), sampling, KEY)
        assert [taken[name].ids for name in names(4)] == rows(whole)
        for name, log_probs in zip(names(4), whole.log_probs, strict=True):
            submitted_log_probs = taken[name].log_probs
            assert submitted_log_probs == pytest.approx(log_probs[: len(submitted_log_probs)].tolist(), abs=2e-5)

    def test_dropping_a_request_does_not_change_the_others(self, engine: Any, trainer: TorchTrainerEngine) -> None:
        stays, gone = (Request(name, tokens(5, 1), replace(GREEDY, ignore_eos=True), KEY) for name in ("stays", "gone"))
        for request in (stays, gone):
            engine.submit(request)
        engine.step()
        engine.drop("gone")
        again = replace(gone, ids=tokens(9, 2), sampling=replace(FREE, max_new_tokens=3))
        engine.submit(again)
        taken = finished(engine, 2)
        for request in (stays, again):
            assert_response_of(engine, trainer.model, request, taken[request.name])
        engine.submit(gone)
        engine.step()
        engine.drop("gone")
        assert engine.step() == []

    def test_a_turn_reuses_caches_but_never_those_of_old_weights(
        self, engine: Any, trainer: TorchTrainerEngine, other: TorchTrainerEngine
    ) -> None:
        assert_turns_use_synced_weights(engine, trainer, other, self.samples_by_key)

    def test_sleep_during_a_response_restarts_the_response(self, engine: Any, trainer: TorchTrainerEngine) -> None:
        requests = [Request(name, tokens(6, 3), replace(FREE, max_new_tokens=30), KEY.response(name)) for name in "ab"]
        expected = [alone(engine, request).ids for request in requests]
        engine.submit(requests[0])
        engine.step()
        engine.submit(requests[1])
        engine.sleep()
        engine.wake()
        taken = finished(engine, 2)
        for request, ids in zip(requests, expected, strict=True):
            assert not self.samples_by_key or taken[request.name].ids == ids
            assert_response_of(engine, trainer.model, request, taken[request.name])

    # Episodes

    @pytest.mark.parametrize(
        "settings",
        [
            {"environment": Counts},
            {"environment": doubter},
            {"tools": [letters], "parser": calling},
            {"environment": Endpoint(speaks)},
        ],
        ids=["environment", "agent", "tools", "endpoint"],
    )
    def test_episodes_have_exact_tokens_and_log_probs(
        self, engine: Any, trainer: TorchTrainerEngine, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        engine.sync(Altered(trainer, version=3))
        metrics, given = Metrics(), list[tuple[str, list[int], Response]]()
        submit, take, contexts = engine.submit, engine.take, dict[str, list[int]]()

        def submitted(request: Request) -> None:
            contexts[request.name] = [*request.ids]
            submit(request)

        def taken(name: str) -> Response:
            given.append((name, contexts[name], take(name)))
            return given[-1][2]

        monkeypatch.setattr(engine, "submit", submitted)
        monkeypatch.setattr(engine, "take", taken)
        interact = Interact(**settings, max_turns=4, context=200, max_new_tokens=8, rollout=engine)
        batch = interact(prompts_of(engine.tokenizer, 12), key=KEY, metrics=metrics)
        logged = metrics.compute()
        assert (batch.policy_version == 3).all() and logged["episodes/failed"] == 0
        assert logged["throughput/context_tokens"] == sum(len(context) for _, context, _ in given)
        assert 0 <= logged["throughput/cached_share"] < 1
        assert batch.turns.tolist() == [sum(name == str(i) for name, _, _ in given) for i in range(12)]
        assert batch.turns.max() > 1
        assert (batch.rollout_log_probs - trainer.log_probs(batch)).abs().max() < 1e-4
        for i, attended in enumerate(batch.attention_mask.bool()):
            ids, turns = batch.input_ids[i][attended].tolist(), [each[1:] for each in given if each[0] == str(i)]
            assert all(ids[: len(context)] == context for context, _ in turns)
            assert all(ids[len(context) :][: len(turn.ids)] == turn.ids for context, turn in turns)
            sampled = batch.response_mask[i]
            assert batch.responses[i][sampled].tolist() == [token for _, turn in turns for token in turn.ids]
            log_probs = torch.tensor([log_prob for _, turn in turns for log_prob in turn.log_probs])
            assert torch.equal(batch.rollout_log_probs[i][sampled], log_probs)

    @pytest.mark.parametrize("environment", [compresses, Endpoint(forks)], ids=["agent", "endpoint"])
    def test_segments_have_exact_tokens_and_log_probs(
        self, engine: Any, trainer: TorchTrainerEngine, environment: Any
    ) -> None:
        """A trainer reads each segment by itself, and finds the log-probs that the engine reported."""
        engine.sync(Altered(trainer, version=3))
        recorded, metrics = Recorded(engine), Metrics()
        settings: dict[str, Any] = {"max_turns": 5, "context": 200, "max_new_tokens": 8, "rewrites": "segment"}
        batch = Interact(environment, **settings, rollout=recorded)(
            prompts_of(engine.tokenizer, 6), key=KEY, metrics=metrics
        )
        assert 3 <= metrics.compute()["episodes/segments"] <= 4  # by which branch ends first
        assert (batch.turns == 5).all()
        assert_trained_is_sampled(batch, recorded)
        assert (batch.policy_version == 3).all()
        assert (batch.rollout_log_probs - trainer.log_probs(batch)).abs().max() < 1e-4
