"""Contract of live weight updates: tests that the test file of each engine inherits.

The file provides the fixtures `engine` (with the weights of `trainer`, version 0), `trainer` and `other`, as for
`answers`. The reference is transformers: full passes, or passes with a cache computed by older weights.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.data.metrics import Metrics
from flowrl.episodes import Endpoint
from flowrl.operators import Interact
from flowrl.protocols.protocols import Request, Response
from tests.engines.contract.answers import KEY, logits_of, names, ragged, rows
from tests.engines.contract.requests import FREE, LONG, alone, finished, speaks, tokens
from tests.engines.contract.sources import Altered, SendsOtherWeights
from tests.episodes.endpoint.test_clients import Recorded, assert_trained_is_sampled
from tests.operators.engines.test_interact import prompts_of
from tests.support.errors import raises

MANY = 40
"""Requests of `LONG` tokens, which are more than vLLM reads in one step on a CPU."""


def logits_with_old_caches(models: Mapping[int, Any], prompt: Sequence[int], response: Response) -> Tensor:
    """Float64 logits ``[response vocab]``: each token by its version, with the cache of the earlier versions."""
    ids = torch.tensor([[*prompt, *response.ids]])
    cache, seen, ends, logits = DynamicCache(), 0, len(prompt) - 1, []
    for version, tokens_of in groupby(response.versions):
        count = len([*tokens_of])
        with torch.no_grad():
            out = models[version](input_ids=ids[:, seen : ends + count], past_key_values=cache, use_cache=True).logits
        logits.append(out[0, -count:].double())
        seen = ends = ends + count
    return torch.cat(logits)


def logits_with_own_caches(models: Mapping[int, Any], prompt: Sequence[int], response: Response) -> Tensor:
    """Float64 logits ``[response vocab]``: each token by its version, which also computes its full context."""
    whole = {version: logits_of(models[version], [*prompt], response.ids) for version in set(response.versions)}
    return torch.stack([whole[version][i] for i, version in enumerate(response.versions)])


def assert_log_probs_by_version(
    models: Mapping[int, Any], prompt: Sequence[int], response: Response, caches: str, temperature: float = 1.0
) -> None:
    """Assert that each log-prob is that of the token's recorded version."""
    logits = (logits_with_old_caches if caches == "reuse" else logits_with_own_caches)(
        models, prompt, response
    ) / temperature
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response.ids)[:, None])[:, 0]
    assert response.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
    assert response.versions == sorted(response.versions)


def bystander(engine: Any, prompt: Sequence[int], responses: dict[str, Response]) -> tuple[Request, Response, int]:
    """A new request, its response and number of cached tokens; requests that end earlier are added to `responses`."""
    request = Request("bystander", [*prompt], FREE, KEY.response("bystander"))
    known = engine.cached_tokens
    engine.submit(request)
    while "bystander" not in responses:
        responses |= finished(engine, 1)
    return request, responses.pop("bystander"), engine.cached_tokens - known


def clock(count: int) -> Request:
    """A request that ends after `count` tokens, at about the same token of concurrent requests."""
    return Request("clock", [9], replace(FREE, max_new_tokens=count), KEY)


def step_until_clock_ends(engine: Any, responses: dict[str, Response]) -> None:
    """Step until the clock request ends; requests that end earlier are added to `responses`."""
    while "clock" not in responses:
        responses |= finished(engine, 1)
    del responses["clock"]


def assert_tokens_of_their_versions(engine: Any, trainer: TorchTrainerEngine, other: Any, caches: Any) -> None:
    """Swap weights twice during requests, some without a token yet, and one with a second turn; assert that each
    token has the log-prob of its version."""
    models, responses = {0: trainer.model, 5: other.model, 7: trainer.model}, dict[str, Response]()
    # An engine in its own process does not wait for swaps, so responses are long. The first one has a second turn.
    samplings = [replace(FREE, max_new_tokens=110 if i else 60) for i in range(MANY)]
    requests = {
        str(i): Request(str(i), tokens(LONG, i), sampling, KEY.response(str(i)), retain_cache=i == 0)
        for i, sampling in enumerate(samplings)
    }
    for request in (clock(1), *requests.values()):
        engine.submit(request)
    for version, source in ((5, other), (7, trainer)):
        step_until_clock_ends(engine, responses)
        engine.submit(clock(3))
        receipt = engine.swap(Altered(source, version=version), caches)
        assert receipt.version == version == engine.receipt.version
    step_until_clock_ends(engine, responses)
    request, response, _ = bystander(engine, tokens(LONG, 1), responses)
    assert_log_probs_by_version(models, request.ids, response, "recompute")
    while len(responses) < MANY:
        responses |= finished(engine, 1)
    for name, each in requests.items():
        assert_log_probs_by_version(models, each.ids, responses[name], caches)
    assert sum(set(response.versions) == {0, 5, 7} for response in responses.values()) > 2
    turn = replace(requests["0"], ids=[*requests["0"].ids, *responses["0"].ids, 9, 9], sampling=FREE)
    assert_log_probs_by_version(models, turn.ids, alone(engine, turn), "recompute")
    request, response, known = bystander(engine, tokens(LONG, 2), responses)
    assert known == 0 or caches == "recompute", "computed with older weights"
    assert_log_probs_by_version(models, request.ids, response, "recompute")
    assert bystander(engine, request.ids, responses)[2] >= 128, (
        "nothing is found in the cache, so nothing stale could be"
    )


class SwapTests:
    """Weight changes between two tokens."""

    samples_by_key: ClassVar[bool] = True

    @pytest.fixture(params=["recompute", "reuse"])
    def caches(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    def test_each_token_was_sampled_by_its_recorded_version(
        self, engine: Any, trainer: TorchTrainerEngine, other: TorchTrainerEngine, caches: Any
    ) -> None:
        assert_tokens_of_their_versions(engine, trainer, other, caches)

    def test_an_episode_at_an_endpoint_has_tokens_of_several_versions(
        self, engine: Any, trainer: TorchTrainerEngine, other: TorchTrainerEngine
    ) -> None:
        """Weights change as soon as the first answer is there; what is trained is what was sampled, by its version."""

        class Swaps(Recorded):
            def take(self, name: str) -> Response:
                if not self.sampled:
                    engine.swap(Altered(other, version=5), "recompute")
                return super().take(name)

        recorded = Swaps(engine)
        interact = Interact(Endpoint(speaks), max_turns=2, context=200, max_new_tokens=40, rollout=recorded)
        batch = interact(prompts_of(engine.tokenizer, 12), key=KEY, metrics=Metrics())
        assert_trained_is_sampled(batch, recorded)
        mask, versions = batch.response_mask, batch.token_version
        assert set(versions[mask].tolist()) == {0, 5} and (versions[batch.turn_ids == 1] == 5).all()
        expected = torch.where(versions == 5, other.log_probs(batch), trainer.log_probs(batch))
        assert (batch.rollout_log_probs - expected)[mask].abs().max() < 1e-4

    def test_swapping_in_equal_weights_changes_no_token(
        self, engine: Any, trainer: TorchTrainerEngine, caches: Any
    ) -> None:
        if not self.samples_by_key:
            pytest.skip("the engine samples all rows from one generator")
        request = Request("a", tokens(LONG, 1), replace(FREE, max_new_tokens=20), KEY.response("a"))
        undisturbed = alone(engine, request)
        engine.submit(request)
        for _ in range(7):
            engine.step()
        engine.swap(Altered(trainer, version=5), caches)
        found = finished(engine, 1)["a"]
        assert found.ids == undisturbed.ids and found.versions == [0] * 7 + [5] * 13

    def hold(self, engine: Any, which: signal.Signals) -> None:
        """Stop processes that sample on their own, or let them go on, so that responses do not end before the swap."""

    def test_another_thread_can_swap_weights_during_generate(
        self, engine: Any, trainer: TorchTrainerEngine, other: TorchTrainerEngine, caches: Any
    ) -> None:
        prompts, mask = ragged(engine, [140, 4, 30, 9])
        sampling = replace(FREE, max_new_tokens=100)
        begun, step, load = threading.Event(), engine._step, engine._swap

        def stepped(version: int) -> Any:
            if "clock" in (ended := step(version)):
                self.hold(engine, signal.SIGSTOP)
                begun.set()
            return ended

        def loaded(*arguments: Any) -> Any:
            self.hold(engine, signal.SIGCONT)
            return load(*arguments)

        def swap() -> None:
            begun.wait()
            engine.swap(Altered(other, version=5), caches)

        engine._step, engine._swap = stepped, loaded
        engine.submit(clock(3))
        thread = threading.Thread(target=swap)
        try:
            thread.start()
            sampled = engine.generate(prompts, mask, names(4), sampling, KEY)
        finally:
            thread.join()
            del engine._step, engine._swap
            engine.drop("clock")
        models = {0: trainer.model, 5: other.model}
        for i, ids in enumerate(rows(sampled)):
            response = Response(ids, sampled.log_probs[i].tolist(), sampled.versions[i].tolist(), "length")
            assert set(response.versions) == {0, 5}
            assert_log_probs_by_version(models, prompts[i][mask[i]].tolist(), response, caches)

    def test_a_swap_with_wrong_weights_is_detected_with_requests_in_flight(
        self, engine: Any, trainer: TorchTrainerEngine, other: TorchTrainerEngine
    ) -> None:
        """The probe runs concurrently with requests; the engine stops, and running requests get the error."""
        engine.submit(Request("a", tokens(LONG, 1), replace(FREE, max_new_tokens=100), KEY.response("a")))
        engine.step()
        with raises("sync.scores-differ", engine=engine.name):
            engine.swap(SendsOtherWeights(other, trainer.weights(), version=5), "recompute")
        assert engine.receipt is None
        with raises("engine.swap-failed", engine=engine.name, error="SyncError"):
            engine.step()
        engine.sync(trainer)
        assert engine.step() == []
