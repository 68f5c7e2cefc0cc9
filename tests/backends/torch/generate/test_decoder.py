"""Tests of `decoder.py` and `cache_batches.py`: single requests to `TorchRollout`.

The reference samples each response token by token from full forward passes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import RepetitionPenaltyLogitsProcessor

from flowrl.backends.torch.generate.cache_batches import CacheBatches
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.backends.torch.generate.slots import Slots
from flowrl.data.keys import Key
from flowrl.protocols.protocols import Request, Response, Sampling, StreamingRollout
from tests.backends.torch.generate.rollouts import GREEDY, KEY, SAMPLED, Actor, Context, as_lists, names, ragged, synced
from tests.backends.torch.train.trainers import Folder
from tests.nightly import nightly_except
from tests.support.architectures import architecture
from tests.support.errors import raises
from tests.support.models import EOS, KINDS, VOCAB, tiny_folder

OTHERS = ["afmoe", "deepseek_v3", "gpt_oss", "jamba", "mamba", "phimoe", "qwen3_next"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a model, created on first use."""
    path, folders = tmp_path_factory.mktemp("models"), dict[str, str]()

    def of(kind: str) -> str:
        if kind not in folders:
            folders[kind] = tiny_folder(path, kind) if kind in KINDS else architecture(path, kind)
        return folders[kind]

    return of


def sampled_alone(model: Any, request: Request) -> tuple[list[int], list[float]]:
    """The response by one forward pass per token without a cache, sampled in float64."""
    sampling, ids, log_probs = request.sampling, list(request.ids), list[float]()
    for uniform in request.key.numbers(sampling.max_new_tokens).tolist():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(torch.tensor([ids]), logits[None])[0]
        counts = torch.bincount(torch.tensor(ids[len(request.ids) :], dtype=torch.int64), minlength=len(logits))
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        probabilities = (logits / (sampling.temperature or 1.0)).softmax(-1)
        if sampling.top_k and sampling.temperature:
            excluded = probabilities.argsort(descending=True)[sampling.top_k :]
            order = probabilities.argsort(descending=True)[: sampling.top_k]
            probabilities[excluded] = 0.0
            probabilities /= probabilities.sum()
        else:
            order = torch.arange(len(probabilities))
        at = int(torch.searchsorted(probabilities[order].cumsum(0), uniform, right=True))
        token = int(order[at]) if sampling.temperature else int(logits.argmax())
        ids.append(token)
        log_probs.append(float(probabilities[token].log()))
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            break
    return ids[len(request.ids) :], log_probs


def responses_of(engine: TorchRolloutEngine, *requests: Request) -> list[Response]:
    """Submit all requests at once; returns the responses in order."""
    for request in requests:
        engine.submit(request)
    return [
        responses_by_name[request.name]
        for responses_by_name in [finished(engine, len(requests))]
        for request in requests
    ]


def finished(engine: TorchRolloutEngine, count: int) -> dict[str, Response]:
    """Step until `count` requests have ended."""
    responses_by_name: dict[str, Response] = {}
    while len(responses_by_name) < count:
        responses_by_name |= {name: engine.take(name) for name in engine.step()}
    return responses_by_name


def same(response: Response, expected: tuple[list[int], list[float]]) -> bool:
    ids, log_probs = expected
    return response.ids == ids and response.log_probs == pytest.approx(log_probs, abs=2e-5)


def tokens(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(EOS + 1, VOCAB, (count,), generator=draw).tolist()


# Batches


@pytest.mark.parametrize("kind", nightly_except(["llama", "gemma2", "jamba", "deepseek_v3"], KINDS + OTHERS))
def test_responses_in_any_batch_equal_the_model_without_a_cache(kind: str, folder_of: Folder) -> None:
    """A request joins at every step; some continue for three turns, past a sliding window (8 or 64 tokens)."""
    actor = Actor(folder_of(kind))
    engine = synced(actor, max_rows=4)
    actor.model.eval()
    context = {str(i): tokens(60 if kind == "gemma2" and i == 0 else 3 + 2 * i, seed=i) for i in range(6)}
    turn = dict.fromkeys(context, 0)
    waiting, remaining = list(context), len(context)
    requests: dict[str, Request] = {}

    def submit_request(name: str) -> None:
        limit = replace(SAMPLED, max_new_tokens=4 + int(name) % 3)
        requests[name] = Request(
            name, context[name], limit, KEY.response(name, turn[name]), retain_cache=turn[name] < 2
        )
        engine.submit(requests[name])

    while remaining:
        if waiting:
            submit_request(waiting.pop(0))
        for name in engine.step():
            response = engine.take(name)
            assert same(response, sampled_alone(actor.model, requests[name]))
            context[name] = [*context[name], *response.ids, *tokens(3, seed=turn[name])]
            turn[name] += 1
            if turn[name] < 3:
                submit_request(name)
            else:
                remaining -= 1
    assert engine.step() == []


@pytest.mark.parametrize("kind", nightly_except(["llama", "gemma2", "jamba"], KINDS + OTHERS))
def test_rows_of_a_group_equal_those_of_the_model(kind: str, folder_of: Folder) -> None:
    """Equal prompts that join in one step, between others of other lengths, as `Repeat` makes them."""
    actor = Actor(folder_of(kind))
    engine = synced(actor, max_rows=8)
    actor.model.eval()
    lengths = [3, 9, 3, 5, 9]
    limit = replace(SAMPLED, max_new_tokens=5)
    requests = [Request(str(i), tokens(n, seed=n), limit, KEY.response(str(i), 0)) for i, n in enumerate(lengths)]
    for request, response in zip(requests, responses_of(engine, *requests), strict=True):
        assert same(response, sampled_alone(actor.model, request))


class Traffic(RuleBasedStateMachine):
    """Submits, continues and drops requests with shared prefixes, and sleeps; each response equals the model's."""

    engine: TorchRolloutEngine
    actor: Actor

    @initialize(max_rows=st.integers(1, 5))
    def build(self, max_rows: int) -> None:
        self.engine = TorchRolloutEngine(
            self.actor.model,
            synced(self.actor).tokenizer,
            max_rows,
            shares=self.actor,  # type: ignore[arg-type]
        )
        self.engine.sync(self.actor)  # type: ignore[arg-type]
        self.running: dict[str, Request] = {}
        self.ended: dict[str, list[int]] = {}
        self.count = 0

    def submit_request(self, name: str, ids: list[int], limit: int, temperature: float, keep: bool) -> None:
        sampling = Sampling(temperature, 3 if temperature > 1 else 0, 1.0, limit)
        self.running[name] = Request(name, ids, sampling, KEY.response(str(self.count)), keep)
        self.engine.submit(self.running[name])
        self.count += 1

    @rule(
        beginning=st.sampled_from([0, 5, 20, 30]),
        rest=st.integers(1, 9),
        limit=st.integers(1, 6),
        temperature=st.sampled_from([0.0, 0.8, 1.4]),
        keep=st.booleans(),
    )
    def submit(self, beginning: int, rest: int, limit: int, temperature: float, keep: bool) -> None:
        ids = tokens(30, seed=1)[:beginning] + tokens(rest, seed=rest % 4)
        self.submit_request(f"request {self.count}", ids, limit, temperature, keep)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), cut=st.sampled_from([0, 0, 3]), more=st.integers(1, 5))
    def continue_conversation(self, data: st.DataObject, cut: int, more: int) -> None:
        """Continue the full context, or one with a rewritten end."""
        name = data.draw(st.sampled_from(sorted(self.ended)))
        ids = self.ended.pop(name)
        self.submit_request(name, ids[: max(1, len(ids) - cut)] + tokens(more, seed=more), 4, 0.8, keep=True)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.engine.drop(name)

    @rule()
    def sleep_and_wake(self) -> None:
        self.engine.sleep()
        self.engine.wake()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            for name in self.engine.step():
                request, response = self.running.pop(name), self.engine.take(name)
                assert same(response, sampled_alone(self.actor.model, request))
                assert response.ended == ("stop" if response.ids[-1] == EOS else "length")
                self.ended[name] = [*request.ids, *response.ids]

    @invariant()
    def only_submitted_requests_are_computed(self) -> None:
        assert set(self.engine._decoder.begun) <= self.running.keys()

    def teardown(self) -> None:
        while self.running:
            self.step(1)


def test_responses_equal_the_model_without_a_cache_for_any_order_of_requests(actor: Actor) -> None:
    class OfLlama(Traffic):
        pass

    OfLlama.actor = actor
    actor.model.eval()
    OfLlama.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
    OfLlama.TestCase("runTest").debug()


def test_requests_with_different_samplings_share_a_step(actor: Actor, engine: TorchRolloutEngine) -> None:
    actor.model.eval()
    kinds = [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, top_k=3),
        replace(SAMPLED, stop_token_ids=(20, 21, 22, 23, 24, 25)),
        replace(GREEDY, repetition_penalty=1.5, ignore_eos=True),
        replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    ]
    requests = [Request(str(i), tokens(4, 7), k, KEY.response(str(i % 2))) for i, k in enumerate([*kinds, *kinds])]
    for request, response in zip(requests, responses_of(engine, *requests), strict=True):
        assert same(response, sampled_alone(actor.model, request))


def test_generate_equals_submitting_requests_and_stepping(engine: TorchRolloutEngine) -> None:
    assert isinstance(engine, StreamingRollout)
    prompts, mask = ragged(engine, [4, 9, 2, 4])
    complete = engine.generate(prompts, mask, names(4), SAMPLED, KEY)
    rows = zip(prompts, mask, names(4), strict=True)
    responses = responses_of(
        engine, *(Request(row, ids[attended].tolist(), SAMPLED, KEY.response(row)) for ids, attended, row in rows)
    )
    assert [response.ids for response in responses] == as_lists(complete)
    for response, log_probs in zip(responses, complete.log_probs, strict=True):
        assert response.log_probs == pytest.approx(log_probs[: len(response.ids)].tolist(), abs=1e-6)


def test_submitted_requests_continue_during_generate(actor: Actor, engine: TorchRolloutEngine) -> None:
    actor.model.eval()
    request = Request("own", tokens(5, 3), SAMPLED, KEY)
    engine.submit(request)
    prompts, mask = ragged(engine, [4, 9])
    engine.generate(prompts, mask, names(2), replace(GREEDY, max_new_tokens=30), KEY)
    assert same(engine.take("own"), sampled_alone(actor.model, request))


# Turns


def test_tokens_have_the_version_of_the_weights_that_sampled_them(folder_of: Folder) -> None:
    """The cache of turn 1 was computed with other weights, so turn 2 recomputes it."""
    actor = Actor(folder_of("llama"), version=3)
    engine = synced(actor)
    actor.model.eval()
    one = Request("a", tokens(20, 1), SAMPLED, KEY.response("a"), retain_cache=True)
    (first,) = responses_of(engine, one)
    assert same(first, sampled_alone(actor.model, one)) and set(first.versions) == {3}
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.mul_(1.2)
    actor.version = 4
    two = Request("a", [*one.ids, *first.ids, *tokens(3, 2)], SAMPLED, KEY.response("a", 1))
    with raises("engine.version-mismatch", found=4, expected=3):
        engine.submit(two)
    engine.sync(actor)  # type: ignore[arg-type]
    (second,) = responses_of(engine, two)
    assert same(second, sampled_alone(actor.model, two)) and set(second.versions) == {4}


def test_a_sync_with_requests_in_flight_is_refused(actor: Actor, engine: TorchRolloutEngine) -> None:
    engine.submit(Request("a", [5, 6], SAMPLED, KEY))
    engine.submit(Request("b", [7], SAMPLED, KEY))
    engine.step()
    actor.version = 1
    with raises("engine.version-mismatch", found=1, expected=0):
        engine.step()
    actor.version = 0
    with raises("engine.requests-in-flight", requests=2, request="a", version=0):
        engine.sync(actor)  # type: ignore[arg-type]
    engine.drop("a")
    assert finished(engine, 1).keys() == {"b"}
    engine.sync(actor)  # type: ignore[arg-type]


def test_stop_strings_match_in_the_response_only(actor: Actor, engine: TorchRolloutEngine) -> None:
    """A stop string that begins in the context does not match; one within the response ends each turn."""
    ids = engine.tokenizer.encode("what is it? no")
    free = replace(GREEDY, ignore_eos=True)
    (complete,) = responses_of(engine, Request("a", ids, free, KEY))
    text = engine.tokenizer.text(complete.ids)
    (across,) = responses_of(engine, Request("a", ids, replace(free, stop=("no" + text[0],)), KEY))
    assert across.ids == complete.ids and across.ended == "length"
    sampling, context = replace(free, stop=(text[2:4],)), ids
    for turn in range(3):
        (response,) = responses_of(engine, Request("a", context, sampling, KEY.response("a", turn), retain_cache=True))
        found = engine.tokenizer.text(response.ids)
        assert response.ended == ("stop" if text[2:4] in found else "length")
        assert text[2:4] not in engine.tokenizer.text(response.ids[:-1])
        assert turn or response.ids == complete.ids[:4]
        context = [*context, *response.ids, *ids]


def test_turns_have_different_random_numbers_and_turn_0_those_of_generate() -> None:
    numbers = [KEY.response("a", turn).numbers(6) for turn in range(3)]
    assert torch.equal(numbers[0], KEY.uniforms(["a"], 6)[0])
    assert len({tuple(row.tolist()) for row in numbers}) == 3
    assert torch.equal(KEY.response("a", 2).numbers(3), numbers[2][:3])
    assert KEY.response("a", 1) != KEY.response("b", 1) != Key.of(4).response("b", 1)


# Requests in flight


def test_a_request_name_in_use_is_refused(engine: TorchRolloutEngine) -> None:
    request = Request("a", [5, 6], replace(SAMPLED, max_new_tokens=2, ignore_eos=True), KEY)
    for _ in range(2):  # queued, then running
        engine.submit(request) if not engine._decoder._rows else None
        with raises("engine.request-exists", request="a"):
            engine.submit(request)
        with raises("engine.no-response", request="a"):
            engine.take("a")
        ended = engine.step()
    assert ended == ["a"]
    with raises("engine.request-exists", request="a"):
        engine.submit(request)
    engine.take("a")
    with raises("engine.no-response", request="a"):
        engine.take("a")
    engine.submit(request)
    engine.drop("a")
    engine.drop("unknown")
    assert engine.step() == []


def test_invalid_requests_are_refused_by_submit(actor: Actor, engine: TorchRolloutEngine) -> None:
    for ids, code in (([VOCAB], "model.unknown-token"), ([5] * 250, "model.too-long"), ([], "engine.invalid-prompts")):
        with raises(code):
            engine.submit(Request("a", ids, SAMPLED, KEY))
    request = Request("a", [5], SAMPLED, KEY)
    unsynced = TorchRolloutEngine(actor.model, engine.tokenizer, 4, shares=actor)  # type: ignore[arg-type]
    with raises("engine.no-receipt", engine="TorchRollout"):
        unsynced.submit(request)
    with raises("engine.no-receipt", engine="TorchRollout"):
        unsynced.step()
    engine.sleep()
    with raises("engine.asleep", call="submit"):
        engine.submit(request)
    with raises("engine.asleep", call="step"):
        engine.step()


def test_running_and_cached_rows_never_exceed_max_rows(actor: Actor) -> None:
    engine = synced(actor, max_rows=3)
    fed: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    requests = [
        Request(str(i), tokens(4, i), replace(SAMPLED, ignore_eos=True), KEY, retain_cache=True) for i in range(8)
    ]
    assert [len(response.ids) for response in responses_of(engine, *requests)] == [12] * 8
    assert max(fed) == 3
    assert len(engine._decoder._retained) == 3


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_error_ends_all_requests_and_restores_the_model(kind: str, folder_of: Folder) -> None:
    actor = Actor(folder_of(kind))
    engine = synced(actor)
    actor.model.train()
    before = actor.model.config._attn_implementation
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    layer = actor.model.model.layers[1].register_forward_pre_hook(fail)
    prompts, mask = ragged(engine, [4, 2])
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, mask, names(2), SAMPLED, KEY)
    layer.remove()
    assert actor.model.config._attn_implementation == before and actor.model.training
    assert engine.step() == [] and not engine._decoder.begun
    after = engine.generate(prompts, mask, names(2), SAMPLED, KEY)
    assert as_lists(after) == as_lists(synced(Actor(folder_of(kind))).generate(prompts, mask, names(2), SAMPLED, KEY))


def test_non_finite_logits_are_refused_at_the_first_token(actor: Actor, engine: TorchRolloutEngine) -> None:
    with torch.no_grad():
        actor.model.lm_head.weight[5, 0] = torch.nan
    engine.submit(Request("a", [5, 6], SAMPLED, KEY))
    with raises("engine.not-finite", request="a"):
        engine.step()
    assert engine.step() == []


@pytest.mark.parametrize(
    ("kind", "memory"),
    [("llama", Slots), ("qwen2", Slots), ("gpt2", Slots), ("deepseek_v3", Slots), ("phimoe", Slots)]
    + [(kind, CacheBatches) for kind in ("gemma2", "afmoe", "gpt_oss", "jamba", "mamba", "qwen3_next")],
)
def test_unsupported_attention_uses_the_transformers_cache(kind: str, memory: type, folder_of: Folder) -> None:
    assert type(synced(Actor(folder_of(kind)))._memory) is memory


def test_an_engine_with_its_own_weights_accepts_requests(folder_of: Folder, tmp_path: Path) -> None:
    from flowrl.backends import TorchRollout

    actor = Actor(folder_of("llama"))
    engine = TorchRollout(folder_of("llama"), device="cpu").build(Context(SimpleNamespace()))
    engine.sync(actor)  # type: ignore[arg-type]
    request = Request("a", tokens(6, 1), SAMPLED, KEY)
    assert same(responses_of(engine, request)[0], sampled_alone(actor.model.eval(), request))
