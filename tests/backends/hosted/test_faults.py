"""Faults of hosted engines, with the toy: an error stops the engine and its requests; the next sync restarts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.backends.hosted.spec import EngineSpec
from flowrl.errors import BindError
from flowrl.protocols.protocols import Caches
from flowrl.records import FROZEN
from tests.backends.hosted.toy import PROBE, Toy, expected, request_of
from tests.engines.contract.sources import Altered
from tests.support.errors import raises

DEAD = "Worker 1 of 2 of Toy was killed by SIGKILL"


@pytest.mark.parametrize(
    ("sent", "settings", "code", "facts"),
    [
        ("missing", {}, "engine.weights-mismatch", {"version": 5}),
        ("raises", {}, "engine.sync-failed", {"engine": "Toy", "version": 5}),
        ("raises", {"death": DEAD}, "engine.process-died", {"engine": "Toy", "how": DEAD}),
        (None, {"fault": "take"}, "engine.call-failed", {}),
        (None, {"scores": [0.5] * 6}, "sync.scores-differ", {"engine": "Toy"}),
    ],
    ids=["missing", "unreadable", "a worker dies", "its process dies", "other weights"],
)
def test_a_failed_sync_stops_the_engine_and_the_next_sync_restarts_it(
    engine: Toy, trainer: Any, sent: str | None, settings: dict[str, Any], code: str, facts: dict[str, Any]
) -> None:
    """A dead process is an `EngineError`, which `restart="role"` recovers; mismatched weights are a `SyncError`."""
    vars(engine).update({"scores": PROBE.score(trainer), **settings})
    with raises(code, **facts):
        engine.sync(Altered(trainer, 5, sent))  # type: ignore[arg-type]
    assert engine.receipt is None and not engine.alive
    with raises("engine.no-receipt", engine="Toy"):
        engine.submit(request_of("a", [7]))
    vars(engine).update({"scores": PROBE.score(trainer), "fault": "", "death": None})
    assert engine.sync(Altered(trainer, version=6)).version == 6  # type: ignore[arg-type]
    engine.submit(request := request_of("a", [7], 1))
    assert engine.step() == ["a"]
    assert engine.take("a") == expected(request, version=6)


def test_a_failure_to_close_is_a_note_of_the_first_error(engine: Toy, trainer: Any) -> None:
    engine.fault = "close"
    with raises("engine.sync-failed") as caught:
        engine.sync(Altered(trainer, 5, "raises"))  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["Ending it failed too (OSError: no end)."]


@pytest.mark.parametrize("fault", ["weights", "other", "asleep", "refuse"])
def test_a_failed_swap_stops_the_engine_and_is_reported_to_the_requests_in_flight(
    engine: Toy, trainer: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: EngineSpec, caches: Caches) -> None:
        raise BindError("It refuse reuse them.", code="engine.no-swap")

    engine.scores = [0.5] * 6 if fault == "other" else PROBE.score(trainer)
    monkeypatch.setattr(EngineSpec, "refuse_swap", refuse if fault == "refuse" else EngineSpec.refuse_swap)
    engine.submit(request_of("begun", [7], 5))
    engine.step()
    engine.sleep() if fault == "asleep" else None
    codes = {"weights": "engine.weights-mismatch", "other": "sync.scores-differ", "asleep": "engine.asleep"}
    with raises(codes.get(fault, "engine.no-swap")) as caught:
        engine.swap(Altered(trainer, 5, "missing" if fault == "weights" else None), "reuse")  # type: ignore[arg-type]
    assert engine.receipt is None and not engine.alive
    engine.wake()
    with raises("engine.swap-failed", engine="Toy", error=type(caught.value).__name__):
        engine.step()
    engine.scores = PROBE.score(trainer)
    engine.sync(trainer)
    assert engine.step() == []


@pytest.fixture(params=["begin", "advance", "interrupted", "short", "version"])
def broken(request: pytest.FixtureRequest, engine: Toy) -> Iterator[Toy]:
    """An engine that fails in the next step, with one finished response and two requests in flight."""
    for name, tokens in (("finished", 1), ("begun", 5)):
        engine.submit(request_of(name, [7], tokens))
    engine.step()
    engine.submit(request_of("waits", [7], 1))
    if request.param == "version":
        engine.version = "13"
    engine.fault = request.param
    yield engine


def test_an_error_ends_the_engine_and_all_requests_in_flight(broken: Toy) -> None:
    facts: dict[str, Any] = {"short": {"found": 2, "reason": "length"}}
    facts["version"] = {"found": ("13",), "expected": (FROZEN,)}
    codes = {"short": "engine.truncated-response", "version": "engine.version-mismatch"}
    code = codes.get(broken.fault, "engine.call-failed")
    expected = raises(code, **facts.get(broken.fault, {}))
    with pytest.raises(KeyboardInterrupt) if broken.fault == "interrupted" else expected:
        broken.step()
    assert broken.receipt is None and not broken.alive
    with raises("engine.no-receipt", engine="Toy"):
        broken.step()
    assert len(broken.take("finished").ids) == 1
    for name in ("begun", "waits"):
        broken.drop(name)
        with raises("engine.no-response", request=name):
            broken.take(name)


def test_a_request_that_cannot_be_aborted_ends_the_engine(engine: Toy) -> None:
    engine.submit(request_of("a", [7]))
    engine.step()
    engine.fault = "abort"
    with raises("engine.call-failed", call="abort"):
        engine.drop("a")
    assert engine.receipt is None and not engine.alive


def test_a_response_with_non_finite_log_probs_is_refused_and_others_continue(engine: Toy) -> None:
    engine.submit(request_of("bad", [7], 2))
    engine.submit(request_of("good", [7], 3))
    engine.log_prob = float("-inf")
    engine.step()
    assert engine.step() == ["bad"]
    engine.log_prob = -1.0
    with raises("engine.not-finite", engine="Toy", row="bad", token=0, log_prob=float("-inf")):
        engine.take("bad")
    assert engine.step() == ["good"]
    assert engine.take("good") == expected(request_of("good", [7], 3))
