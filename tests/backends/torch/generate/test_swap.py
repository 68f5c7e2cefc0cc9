"""Weight swaps of `TorchRollout` during generation: each token has the log-prob of its version by transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flowrl.backends import TorchRollout
from flowrl.backends.rollout import FairLock
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.backends.torch.generate.slots import SHARED
from flowrl.errors import SyncError
from flowrl.protocols.protocols import Caches, LiveWeightUpdate, Request, Response
from tests.backends.torch.generate.rollouts import KEY, SAMPLED, Actor, Context, names, ragged
from tests.backends.torch.generate.test_decoder import finished, responses_of, same, sampled_alone, tokens
from tests.backends.torch.train.trainers import Folder
from tests.support.architectures import architecture
from tests.support.errors import raises
from tests.support.models import tiny_folder

LONG = replace(SAMPLED, max_new_tokens=10, ignore_eos=True)
CACHES: list[Caches] = ["recompute", "reuse"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folders of models that use slots (llama), cache batches (gemma2), and fused experts (phimoe)."""
    folders: dict[str, str] = {}

    def of(kind: str) -> str:
        if kind not in folders:
            path = tmp_path_factory.mktemp("models")
            folders[kind] = architecture(path, kind) if kind == "phimoe" else tiny_folder(path, kind)
        return folders[kind]

    return of


def actors(folder: str, count: int = 3) -> list[Any]:
    """Versions 0, 1, ... of a policy, with very different weights."""
    found = []
    for version in range(count):
        actor = Actor(folder, version)
        noise = torch.Generator().manual_seed(version)
        for parameter in actor.model.eval().parameters():
            if version:
                parameter.data += 0.3 * parameter.data.std() * torch.randn(parameter.shape, generator=noise)
        found.append(actor)
    return found


def engine_of(folder: str, actor: Any) -> TorchRolloutEngine:
    """An engine with a copy of the weights."""
    engine = TorchRollout(folder, device="cpu").build(Context(actor))
    engine.sync(actor)
    return engine


def by_version(versions: list[Any], ids: list[int], response: Response) -> list[float]:
    """The log-prob of each token given its full context, with the weights of its recorded version."""
    return [
        scored(versions[version], [*ids, *response.ids[:i]], token)
        for i, (token, version) in enumerate(zip(response.ids, response.versions, strict=True))
    ]


def scored(actor: Any, ids: list[int], token: int) -> float:
    with torch.no_grad():
        logits = actor.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    return float((logits / LONG.temperature).log_softmax(-1)[token])


def over_old(old: Any, new: Any, ids: list[int], response: Response, swapped: int) -> list[float]:
    """The log-probs of the tokens after a swap, with a cache that the old weights computed."""
    whole, start = [*ids, *response.ids], len(ids) + swapped
    with torch.no_grad():
        cache = old.model(input_ids=torch.tensor([whole[: start - 1]]), use_cache=True).past_key_values
        logits = new.model(input_ids=torch.tensor([whole[start - 1 : -1]]), past_key_values=cache).logits[0].double()
    log_probs = (logits / LONG.temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(log_probs, response.ids[swapped:], strict=True)]


def requests_of(count: int, keep: bool = False) -> list[Request]:
    return [Request(str(i), tokens(3 + 4 * i, seed=i), LONG, KEY.response(str(i)), keep) for i in range(count)]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phimoe"])
def test_each_token_has_the_log_prob_of_its_recorded_version(kind: str, folder: Folder) -> None:
    """Two swaps, the second one twice, while requests are queued, started and finished."""
    versions = actors(folder(kind))
    engine, requests = engine_of(folder(kind), versions[0]), requests_of(4)
    assert isinstance(engine, LiveWeightUpdate)
    taken: dict[str, Response] = {}
    for step in range(16):
        if step in (0, 3):
            for request in requests[:2] if step == 0 else requests[2:]:
                engine.submit(request)
        if step == 4:
            assert engine.swap(versions[1], "recompute").version == engine.receipt.version == 1
        if step == 6:
            engine.swap(versions[1], "recompute")
            engine.swap(versions[2], "recompute")
        taken |= {name: engine.take(name) for name in engine.step()}
    for request in requests:
        response = taken[request.name]
        assert response.log_probs == pytest.approx(by_version(versions, list(request.ids), response), abs=3e-5)
    assert taken["0"].versions == [0] * 4 + [1] * 2 + [2] * 4
    assert len(set(taken["3"].versions)) > 1 and taken["3"].versions == sorted(taken["3"].versions)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_reused_caches_were_computed_by_the_old_weights(kind: str, folder: Folder) -> None:
    old, new, _ = versions = actors(folder(kind))
    engine, swapped = engine_of(folder(kind), old), 4
    for request in requests_of(3):
        engine.submit(request)
    for _ in range(swapped):
        engine.step()
    engine.swap(new, "reuse")
    responses = finished(engine, 3)
    for request in requests_of(3):
        response = responses[request.name]
        assert response.versions == [0] * swapped + [1] * (10 - swapped)
        ids = list(request.ids)
        assert response.log_probs[:swapped] == pytest.approx(by_version(versions, ids, response)[:swapped], abs=3e-5)
        assert response.log_probs[swapped:] == pytest.approx(over_old(old, new, ids, response, swapped), abs=3e-5)
        assert response.log_probs[swapped:] != pytest.approx(by_version(versions, ids, response)[swapped:], abs=1e-3)


@pytest.mark.parametrize("caches", CACHES)
def test_swapping_in_equal_weights_changes_only_the_version(caches: Caches, folder: Folder) -> None:
    old, *_ = actors(folder("llama"), 1)
    same = Actor(folder("llama"), version=1)
    whole = responses_of(engine_of(folder("llama"), old), *requests_of(3))
    engine = engine_of(folder("llama"), old)
    for request in requests_of(3):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.swap(cast(Any, same), caches)
    responses = finished(engine, 3)
    for request, expected in zip(requests_of(3), whole, strict=True):
        found = responses[request.name]
        assert found.ids == expected.ids and found.ended == expected.ended
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert found.versions == [0] * 4 + [1] * 6


@pytest.mark.parametrize("caches", CACHES)
def test_requests_started_after_a_swap_reuse_no_cache_of_old_weights(caches: Caches, folder: Folder) -> None:
    """Neither that of an ended turn, nor of a running request, nor of a shared prefix."""
    old, new, _ = versions = actors(folder("llama"))
    engine, start = engine_of(folder("llama"), old), tokens(SHARED + 8, seed=9)
    ended, running = (
        Request(name, start, replace(LONG, max_new_tokens=count), KEY.response(name), retain_cache=True)
        for name, count in (("ended", 3), ("running", 10))
    )
    for request in (ended, running):
        engine.submit(request)
    taken = finished(engine, 1)
    engine.swap(new, caches)
    again = [
        Request("ended", [*start, *taken["ended"].ids, *tokens(2, 1)], LONG, KEY.response("ended", 1)),
        Request("shared", start, LONG, KEY.response("shared")),
    ]
    for request in again:
        engine.submit(request)
    taken |= finished(engine, 3)
    again.append(Request("running", [*start, *taken["running"].ids, 7], LONG, KEY.response("running", 1)))
    taken |= {"running": responses_of(engine, again[-1])[0]}
    for request in again:
        response = taken[request.name]
        assert set(response.versions) == {1}
        assert response.log_probs == pytest.approx(by_version(versions, list(request.ids), response), abs=3e-5)


class WrongShape(Actor):
    """Sends one weight with another shape."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, tensor) in enumerate(super().weights()):
            yield name, tensor if i else tensor[:1]


def test_a_failed_swap_is_reported_to_the_requests_in_flight(folder: Folder) -> None:
    old, new, _ = actors(folder("llama"))
    engine = engine_of(folder("llama"), old)
    for request in requests_of(2):
        engine.submit(request)
    engine.step()
    with raises("engine.weights-mismatch", version=1):
        engine.swap(cast(Any, WrongShape(folder("llama"), 1)), "recompute")
    with raises("engine.swap-failed", error="SyncError") as raised:
        engine.step()
    assert isinstance(raised.value.__cause__, SyncError)
    engine.sync(new)  # none of the requests is running
    prompts, mask = ragged(engine, [4, 9])
    assert set(engine.generate(prompts, mask, names(2), LONG, KEY).versions.flatten().tolist()) == {1}


def test_another_thread_can_swap_weights_between_steps_of_generate(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Ray: the generating thread continues, and the swap runs after the current step."""
    versions = actors(folder("phimoe"))
    engine, step, swapping = engine_of(folder("phimoe"), versions[0]), TorchRolloutEngine._step, list[Any]()

    def stepped(self: TorchRolloutEngine, version: int) -> list[str]:
        ended = step(self, version)
        swapping.append(None)
        if len(swapping) in (3, 5):
            thread = threading.Thread(target=self.swap, args=(versions[(len(swapping) - 1) // 2], "recompute"))
            thread.start()
            swapping[-1] = thread
            while not self._alone._next.locked():  # the swapping thread waits for this step
                pass
        return ended

    monkeypatch.setattr(TorchRolloutEngine, "_step", stepped)
    prompts, mask = ragged(engine, [4, 9])
    sampled = engine.generate(prompts, mask, names(2), LONG, KEY)
    for thread in filter(None, swapping):
        thread.join()
    assert sampled.versions.tolist() == [[0] * 3 + [1] * 2 + [2] * 5] * 2
    for i in range(2):
        response = Response(sampled.responses[i].tolist(), [], sampled.versions[i].tolist(), "length")
        expected = by_version(versions, prompts[i][mask[i]].tolist(), response)
        assert sampled.log_probs[i].tolist() == pytest.approx(expected, abs=3e-5)


def test_the_lock_is_fair_to_waiting_threads() -> None:
    alone, seen, stop = FairLock(), list[str](), threading.Event()

    def acquire_repeatedly() -> None:
        while not stop.is_set():
            with alone:
                seen.append("again")
                sum(range(2000))

    thread = threading.Thread(target=acquire_repeatedly)
    thread.start()
    for _ in range(20):
        with alone:
            seen.append("waited")
    stop.set()
    thread.join()
    places = [i for i, who in enumerate(seen) if who == "waited"]
    assert len(places) == 20 and max(b - a for a, b in pairwise([0, *places])) < 10_000


def test_penalties_count_the_tokens_before_an_update(folder: Folder) -> None:
    """An update that recomputes caches evicts the rows, which join again with their tokens so far."""
    actor = Actor(folder("llama"))
    actor.model.eval()
    engine = engine_of(folder("llama"), actor)
    penalties = replace(LONG, repetition_penalty=1.6, frequency_penalty=1.0)
    for presence in (0.0, 0.5):  # one rule, then two that share each step
        samplings = {"a": penalties, "b": replace(penalties, presence_penalty=presence)}
        requests = [Request(name, tokens(5, 1), sampling, KEY.response(name)) for name, sampling in samplings.items()]
        for request in requests:
            engine.submit(request)
        for _ in range(6):
            assert engine.step() == []
        engine.swap(actor, "recompute")
        taken = finished(engine, 2)
        for request in requests:
            assert same(taken[request.name], sampled_alone(actor.model, request))
