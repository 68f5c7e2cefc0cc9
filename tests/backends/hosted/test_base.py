"""Requests and weight updates of hosted engines, with a toy that computes one token per request and step."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.protocols.protocols import CacheStats, LiveWeightUpdate, StreamingRollout
from flowrl.records import FROZEN
from tests.backends.hosted.toy import KEY, PROBE, Toy, expected, request_of
from tests.engines.contract.sources import Altered
from tests.support.errors import raises


def test_requests_start_in_the_next_step_and_are_returned_when_they_end(engine: Toy) -> None:
    assert isinstance(engine, StreamingRollout)
    one, two, three = request_of("one", [7, 8], 3), request_of("two", [9], 1), request_of("three", [9, 9, 9], 2)
    engine.submit(one)
    engine.submit(two)
    assert engine.calls == []
    assert engine.step() == ["two"]
    assert engine.take("two") == expected(two)
    engine.submit(three)
    assert engine.step() == []
    assert engine.step() == ["one", "three"]
    assert [engine.take("three"), engine.take("one")] == [expected(three), expected(one)]
    assert engine.step() == []
    assert engine.calls == ["begin one", "begin two", "begin three"]
    assert isinstance(engine, CacheStats) and (engine.context_tokens, engine.cached_tokens) == (6, 2)


def test_generate_equals_submitting_requests_and_stepping(engine: Toy) -> None:
    prompts, mask = engine.tokenizer.pad_left([[7, 8, 9], [10]])
    sampled = engine.generate(prompts, mask, ["a", "b"], request_of("", []).sampling, KEY)
    rows = [expected(request_of(name, ids)).ids for name, ids in (("a", [7, 8, 9]), ("b", [10]))]
    assert sampled.responses.tolist() == rows
    assert sampled.response_mask.all() and (sampled.log_probs == -1).all()


def test_requests_that_end_during_generate_are_returned_by_the_next_step(engine: Toy) -> None:
    """Not if the response was taken, or the request dropped or submitted again, before that step."""
    requests = [request_of(name, [7], 2) for name in ("named", "taken", "dropped", "again")]
    for each in requests:
        engine.submit(each)
    engine.generate(*engine.tokenizer.pad_left([[8]]), ["a"], request_of("", [], 9).sampling, KEY)
    assert engine.take("taken") == expected(requests[1])
    engine.drop("dropped")
    engine.take("again")
    engine.submit(requests[3])
    assert engine.step() == ["named"]
    assert engine.step() == ["again"]
    assert [engine.take(name) for name in ("named", "again")] == [expected(requests[0]), expected(requests[3])]


def test_each_request_ends_by_its_own_stop_rule(engine: Toy) -> None:
    free = expected(request_of("a", [7, 8], 9)).ids
    text = engine.tokenizer.text(free)
    for rule, length in (({"stop_token_ids": (free[4],)}, 5), ({"stop": (text[2:4],)}, 4), ({"stop": ("none",)}, 9)):
        engine.submit(request_of("a", [7, 8], 9, **rule))
        engine.submit(request_of("b", [7, 8], 9))
        while "a" not in engine.step():
            pass
        response = engine.take("a")
        assert response.ids == free[:length] and len(response.log_probs) == length
        assert response.ended == ("length" if length == 9 else "stop")
        assert engine.take("b").ended == "length"


def test_dropped_requests_are_never_returned(engine: Toy) -> None:
    for name in ("waits", "begun", "stays"):
        engine.submit(request_of(name, [7], 2))
    engine.drop("waits")
    engine.step()
    engine.drop("begun")
    engine.drop("unknown")
    assert engine.calls == ["begin begun", "begin stays", "abort begun"]
    engine.submit(request_of("begun", [8], 1))
    assert sorted(engine.step()) == ["begun", "stays"]
    assert engine.take("begun") == expected(request_of("begun", [8], 1))
    engine.drop("stays")
    with raises("engine.no-response", request="stays"):
        engine.take("stays")


def test_a_request_name_in_use_is_refused(engine: Toy) -> None:
    request = request_of("a", [7], 2)
    engine.submit(request)
    for _ in range(3):  # queued, running, ended
        with raises("engine.request-exists", request="a"):
            engine.submit(request)
        engine.step()
    assert engine.take("a") == expected(request)


def test_unsupported_requests_are_refused_by_submit(engine: Toy) -> None:
    with raises("engine.unsupported-sampling"):
        engine.submit(request_of("a", [7], top_k=3))
    with raises("model.too-long", row="a", found=65, expected=64):
        engine.submit(request_of("a", [7] * 62, 3))
    assert engine.step() == []


# Weights


def test_sync_accepts_queued_requests_and_refuses_running_ones(engine: Toy, trainer: Any) -> None:
    engine.scores = PROBE.score(trainer)
    later: Any = Altered(trainer, version=5)
    begun, waits = request_of("begun", [7], 2), request_of("waits", [8], 2)
    engine.submit(begun)
    engine.step()
    engine.submit(waits)
    with raises("engine.requests-in-flight", engine="Toy", requests=1, request="begun", version=FROZEN):
        engine.sync(later)
    assert engine.receipt is not None and engine.receipt.version == FROZEN
    assert engine.step() == ["begun"]
    assert engine.take("begun") == expected(begun)
    engine.drop("waits")
    engine.submit(waits)
    assert engine.sync(later).version == 5
    engine.step()
    assert engine.step() == ["waits"]
    assert engine.take("waits") == expected(waits, version=5)


@pytest.mark.parametrize("caches", ["recompute", "reuse"])
def test_a_swap_changes_weights_between_two_tokens(engine: Toy, trainer: Any, caches: Any) -> None:
    """With `reuse`, a request without a token yet restarts."""
    assert isinstance(engine, LiveWeightUpdate)
    engine.scores = PROBE.score(trainer)
    begun, late, waits = (request_of(name, [7], tokens) for name, tokens in (("begun", 5), ("late", 3), ("waits", 2)))
    engine.submit(begun)
    engine.step()
    engine.submit(late)
    engine.idle = "late"
    engine.step()
    engine.submit(waits)
    engine.calls, engine.idle = [], None
    assert engine.swap(Altered(trainer, version=5), caches).version == 5  # type: ignore[arg-type]
    again = ["abort late"] if caches == "reuse" else []
    assert engine.calls == [f"halt {caches}", *again, f"take {caches}"]
    engine.step()
    assert engine.calls[2 + len(again) :] == (
        [*map("begin {}".format, ("late", "waits"))] if again else ["begin waits"]
    )
    engine.swap(Altered(trainer, version=9), caches)  # type: ignore[arg-type]
    assert engine.step() == ["waits"]
    assert engine.step() == ["begun", "late"]
    for request, versions in ((begun, [FROZEN, FROZEN, 5, 9, 9]), (late, [5, 9, 9]), (waits, [5, 9])):
        assert engine.take(request.name) == expected(request)._replace(versions=versions)


def test_a_swap_without_running_requests_equals_a_sync(engine: Toy, trainer: Any) -> None:
    engine.scores = PROBE.score(trainer)
    engine.submit(request_of("waits", [8], 2))
    engine.swap(Altered(trainer, version=5), "reuse")  # type: ignore[arg-type]
    assert engine.calls == ["halt None", "take None"]
    engine.step()
    assert engine.step() == ["waits"]
    assert engine.take("waits") == expected(request_of("waits", [8], 2), version=5)


def test_running_requests_never_exceed_max_num_seqs(folder: str) -> None:
    engine = Toy(folder, max_num_seqs=3).freeze("of the folder")
    requests = [request_of(f"{i}", [7 + i], 1 + i) for i in range(5)]
    for each in requests:
        engine.submit(each)
    engine.drop("3")
    assert engine.step() == ["0"]
    assert engine.calls == ["begin 0", "begin 1", "begin 2"]
    assert engine.step() == ["1"]
    assert engine.calls[3:] == ["begin 4"]
    for _ in range(4):
        engine.step()
    assert [engine.take(name) for name in "0124"] == [expected(requests[i]) for i in (0, 1, 2, 4)]


def test_sleep_drops_partial_responses_and_restarts_their_requests(engine: Toy) -> None:
    requests = [request_of(name, [7], 3) for name in ("one", "two", "three")]
    engine.submit(requests[0])
    engine.submit(requests[1])
    engine.step()
    engine.submit(requests[2])
    engine.sleep()
    assert engine.calls[2:] == ["abort one", "abort two"]
    for call in (engine.step, lambda: engine.submit(request_of("four", [7]))):
        with raises("engine.asleep", engine="Toy"):
            call()
    engine.drop("two")
    engine.wake()
    engine.step()
    assert engine.calls[4:] == ["begin one", "begin three"]
    engine.step()
    assert engine.step() == ["one", "three"]
    assert [engine.take("one"), engine.take("three")] == [expected(requests[0]), expected(requests[2])]


def test_close_removes_all_requests(engine: Toy) -> None:
    engine.submit(request_of("begun", [7]))
    engine.step()
    engine.submit(request_of("waits", [7]))
    engine.close()
    engine.close()
    engine.freeze("of the folder")._start()
    assert engine.step() == []
