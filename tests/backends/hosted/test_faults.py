"""Faults of hosted engines, on the toy: an error ends the engine with all requests, and the next sync starts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.backends.hosted.spec import EngineSpec
from flowrl.errors import AsleepError, BindError, DataError, EngineError, ParameterError, SwapError, SyncError
from flowrl.protocols.protocols import Caches
from tests.backends.hosted.toy import PROBE, Toy, asking, expected
from tests.engines.sources import Altered

DEAD = "worker 1 of Toy's, of 2, was killed by SIGKILL"


@pytest.mark.parametrize(
    ("sent", "settings", "error", "words"),
    [
        ("missing", {}, SyncError, r"did not arrive \(1 in all\)"),
        ("raises", {}, SyncError, "Toy failed with the weights of version 5 .*the link broke"),
        ("raises", {"death": DEAD}, EngineError, f"{DEAD} while Toy took over the weights of version 5 .*link broke"),
        (None, {"fault": "take"}, EngineError, "the toy broke"),
        (None, {"scores": [0.5] * 6}, SyncError, "Toy .* score the same 6 tokens differently"),
    ],
    ids=["missing", "unreadable", "a worker dies", "its process dies", "other weights"],
)
def test_a_sync_that_fails_ends_the_engine_and_the_next_one_starts_it(
    engine: Toy, trainer: Any, sent: str | None, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    """A process that died is an `EngineError`, after which `restart="role"` may help; weights are a `SyncError`."""
    vars(engine).update({"scores": PROBE.score(trainer), **settings})
    with pytest.raises(error, match=words):
        engine.sync(Altered(trainer, 5, sent))  # type: ignore[arg-type]
    assert engine.receipt is None and not engine.alive
    with pytest.raises(SyncError, match="no receipt"):
        engine.submit(asking("a", [7]))
    vars(engine).update({"scores": PROBE.score(trainer), "fault": "", "death": None})
    assert engine.sync(Altered(trainer, version=6)).version == 6  # type: ignore[arg-type]
    engine.submit(asked := asking("a", [7], 1))
    assert engine.step() == ["a"]
    assert engine.take("a") == expected(asked, version=6)


def test_an_end_that_fails_too_is_a_note_of_the_first_error(engine: Toy, trainer: Any) -> None:
    engine.fault = "close"
    with pytest.raises(SyncError, match="the link broke") as caught:
        engine.sync(Altered(trainer, 5, "raises"))  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["Ending it failed too (OSError: no end)."]


@pytest.mark.parametrize("fault", ["weights", "other", "asleep", "cannot"])
def test_a_swap_that_fails_ends_the_engine_and_names_itself_to_what_is_under_way(
    engine: Toy, trainer: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(spec: EngineSpec, caches: Caches) -> None:
        raise BindError("it cannot keep them")

    engine.scores = [0.5] * 6 if fault == "other" else PROBE.score(trainer)
    monkeypatch.setattr(EngineSpec, "refuse_swap", cannot if fault == "cannot" else EngineSpec.refuse_swap)
    engine.submit(asking("begun", [7], 5))
    engine.step()
    engine.sleep() if fault == "asleep" else None
    words = {"weights": "did not arrive", "other": "score the same 6 tokens", "asleep": "swap was called while Toy"}
    with pytest.raises((SyncError, AsleepError, BindError), match=words.get(fault, "it cannot keep")) as caught:
        engine.swap(Altered(trainer, 5, "missing" if fault == "weights" else None), "reuse")  # type: ignore[arg-type]
    assert engine.receipt is None and not engine.alive
    engine.wake()
    with pytest.raises(SwapError, match=f"the weights of Toy were to change .*{type(caught.value).__name__}"):
        engine.step()
    engine.scores = PROBE.score(trainer)
    engine.sync(trainer)
    assert engine.step() == []


@pytest.fixture(params=["begin", "advance", "interrupted", "short", "version"])
def broken(request: pytest.FixtureRequest, engine: Toy) -> Iterator[Toy]:
    """It breaks in the next step; one response is there, and two requests are under way."""
    for name, tokens in (("there", 1), ("begun", 5)):
        engine.submit(asking(name, [7], tokens))
    engine.step()
    engine.submit(asking("waits", [7], 1))
    if request.param == "version":
        engine.version = "13"
    engine.fault = request.param
    yield engine


def test_an_error_ends_the_engine_and_all_that_was_under_way(broken: Toy) -> None:
    error, words = {
        "interrupted": (KeyboardInterrupt, "^$"),
        "short": (EngineError, r"ended a response after 2 tokens \(length\)"),
        "version": (SyncError, "sampled from weights of version 13, and .* receipt was for version 0;"),
    }.get(broken.fault, (EngineError, "the toy broke"))
    with pytest.raises(error, match=words):
        broken.step()
    assert broken.receipt is None and not broken.alive
    with pytest.raises(SyncError, match="no receipt"):
        broken.step()
    assert len(broken.take("there").ids) == 1
    for name in ("begun", "waits"):
        broken.drop(name)
        with pytest.raises(ParameterError, match="no response"):
            broken.take(name)


def test_one_that_cannot_be_stopped_ends_the_engine(engine: Toy) -> None:
    engine.submit(asking("a", [7]))
    engine.step()
    engine.fault = "abort"
    with pytest.raises(EngineError, match="the toy broke"):
        engine.drop("a")
    assert engine.receipt is None and not engine.alive


def test_a_response_whose_log_probs_are_not_finite_is_refused_and_the_others_go_on(engine: Toy) -> None:
    engine.submit(asking("bad", [7], 2))
    engine.submit(asking("good", [7], 3))
    engine.log_prob = float("-inf")
    engine.step()
    assert engine.step() == ["bad"]
    engine.log_prob = -1.0
    with pytest.raises(DataError, match="Toy gave response token 0 of row 'bad' the log-prob -inf"):
        engine.take("bad")
    assert engine.step() == ["good"]
    assert engine.take("good") == expected(asking("good", [7], 3))
