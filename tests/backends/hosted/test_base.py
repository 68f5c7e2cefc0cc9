"""Requests to engines by others, what of them is ours: with a toy that computes a token of each answer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from flowrl.backends import TorchTrainer
from flowrl.backends.hosted.arrival import Arrival
from flowrl.backends.hosted.base import Answer, HostedRollout
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import Ending
from flowrl.core.protocols import Caches, Counts, Request, Requests, Response, Sampling, Swaps
from flowrl.data.keys import Key
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.errors import AsleepError, BindError, DataError, EngineError, ParameterError, SwapError, SyncError
from flowrl.run.build import EngineBuilder
from flowrl.sync.probe import Probe
from tests.engines.sources import Altered
from tests.models import tiny_folder

KEY = Key.of(3)
PROBE = Probe([[9, 20], [12]], [[33, 41, 7], [8, 30, 31]])
FIRST, LETTERS = 6, 70  # of the tokens that it answers with


def said(ids: Sequence[int], seed: int, count: int) -> list[int]:
    """What the toy says after `ids`."""
    return [FIRST + (sum(ids) + seed + 3 * i) % LETTERS for i in range(count)]


class Toy(HostedRollout):
    """What it was told is in `told`."""

    name = "Toy"

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(EngineSpec(folder, **settings), ChatTokenizer(folder), 0)
        self._probe, self._arithmetic = PROBE, self._dtype()
        self.told: list[str] = []
        self.alive, self.version, self.log_prob, self.fault = True, "0", -1.0, ""
        self.scores: Sequence[float] = ()
        self.idle: str | None = None  # a request that it does not get on with
        self.under_way: dict[str, tuple[list[int], Sampling, int, list[str]]] = {}

    @property
    def _lives(self) -> bool:
        return self.alive

    def _start(self) -> None:
        self.alive = True

    def _stop(self) -> None:
        self.alive = False
        self.under_way.clear()

    def _limits(self) -> tuple[int, int]:
        return FIRST + LETTERS, 64

    def _settings(self, sampling: Sampling, ending: Ending) -> Any:
        if sampling.top_k:
            raise DataError("Toy has no top_k.")
        return sampling

    def _begin(self, name: str, ids: Sequence[int], settings: Any, seed: int) -> None:
        self._fail("begin")
        self.told.append(f"begin {name}")
        assert name not in self.under_way and 0 <= seed < 2**63
        self.under_way[name] = ([*ids], settings, seed, [])

    def _advance(self) -> dict[str, Answer]:
        """It does not know of stop tokens, and so says too much."""
        assert self.under_way
        self._fail("advance")
        answers = {}
        for name, (ids, sampling, seed, versions) in [*self.under_way.items()]:
            if self.idle == name:
                continue
            versions.append(self.version)
            if len(versions) == sampling.max_new_tokens or self.fault == "short":
                del self.under_way[name]
                tokens, log_probs = said(ids, seed, len(versions)), [self.log_prob] * len(versions)
                answers[name] = Answer(tokens, log_probs, versions, "length", len(ids) // 2)
        return answers

    def _abort(self, name: str) -> None:
        self._fail("abort")
        self.told.append(f"abort {name}")
        del self.under_way[name]

    def _fail(self, call: str) -> None:
        if self.fault == call:
            raise EngineError("the toy broke.")

    def _halt(self, caches: Caches | None) -> list[str]:
        self.told.append(f"halt {caches}")
        return [name for name, (*_, versions) in self.under_way.items() if not versions] if caches == "keep" else []

    def _take_over(self, arrival: Arrival, caches: Caches | None) -> str:
        assert (caches is None) == (not self.under_way)
        self.told.append(f"take {caches}")
        for _ in arrival.weights():
            pass
        self.version = str(arrival.version)
        return "copy"

    def _score(self, probe: Probe) -> list[float]:
        return [*self.scores]

    def _dtype(self) -> torch.dtype:
        return torch.float32

    def _release(self) -> None:
        assert not self.under_way

    def _resume(self) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: str) -> Toy:
    return Toy(folder).freeze("of the folder")


def asking(name: str, ids: Sequence[int], tokens: int = 3, turn: int = 0, **more: Any) -> Request:
    sampling = Sampling(1.0, more.pop("top_k", 0), 1.0, tokens, ignore_eos=True, **more)
    return Request(name, ids, sampling, KEY.answer(name, turn))


def expected(asked: Request, version: int = 0) -> Response:
    ids = said(asked.ids, asked.key.bits & (2**63 - 1), asked.sampling.max_new_tokens)
    return Response(ids, [-1.0] * len(ids), [version] * len(ids), "length")


def test_requests_begin_with_the_next_step_and_leave_when_they_end(engine: Toy) -> None:
    assert isinstance(engine, Requests)
    one, two, three = asking("one", [7, 8], 3), asking("two", [9], 1), asking("three", [9, 9, 9], 2)
    engine.submit(one)
    engine.submit(two)
    assert engine.told == []
    assert engine.step() == ["two"]
    assert engine.take("two") == expected(two)
    engine.submit(three)
    assert engine.step() == []
    assert engine.step() == ["one", "three"]
    assert [engine.take("three"), engine.take("one")] == [expected(three), expected(one)]
    assert engine.step() == []
    assert engine.told == ["begin one", "begin two", "begin three"]
    assert isinstance(engine, Counts) and (engine.context_tokens, engine.cached_tokens) == (6, 2)


def test_generate_is_the_loop_over_requests(engine: Toy) -> None:
    prompts, mask = engine.tokenizer.pad_left([[7, 8, 9], [10]])
    sampled = engine.generate(prompts, mask, ["a", "b"], asking("", []).sampling, KEY)
    rows = [expected(asking(name, ids)).ids for name, ids in (("a", [7, 8, 9]), ("b", [10]))]
    assert sampled.responses.tolist() == rows
    assert sampled.response_mask.all() and (sampled.log_probs == -1).all()


def test_what_ends_while_generate_steps_is_named_by_the_next_step(engine: Toy) -> None:
    """Unless its response was taken, or it was dropped, or asked anew, by then."""
    asked = [asking(name, [7], 2) for name in ("named", "taken", "dropped", "again")]
    for each in asked:
        engine.submit(each)
    engine.generate(*engine.tokenizer.pad_left([[8]]), ["a"], asking("", [], 9).sampling, KEY)
    assert engine.take("taken") == expected(asked[1])
    engine.drop("dropped")
    engine.take("again")
    engine.submit(asked[3])
    assert engine.step() == ["named"]
    assert engine.step() == ["again"]
    assert [engine.take(name) for name in ("named", "again")] == [expected(asked[0]), expected(asked[3])]


def test_a_response_ends_by_its_own_rule(engine: Toy) -> None:
    free = expected(asking("a", [7, 8], 9)).ids
    text = engine.tokenizer.text(free)
    for rule, length in (({"stop_token_ids": (free[4],)}, 5), ({"stop": (text[2:4],)}, 4), ({"stop": ("none",)}, 9)):
        engine.submit(asking("a", [7, 8], 9, **rule))
        engine.submit(asking("b", [7, 8], 9))
        while "a" not in engine.step():
            pass
        response = engine.take("a")
        assert response.ids == free[:length] and len(response.log_probs) == length
        assert response.ended == ("length" if length == 9 else "stop")
        assert engine.take("b").ended == "length"


def test_one_that_is_dropped_is_gone(engine: Toy) -> None:
    for name in ("waits", "begun", "stays"):
        engine.submit(asking(name, [7], 2))
    engine.drop("waits")
    engine.step()
    engine.drop("begun")
    engine.drop("nobody")
    assert engine.told == ["begin begun", "begin stays", "abort begun"]
    engine.submit(asking("begun", [8], 1))
    assert sorted(engine.step()) == ["begun", "stays"]
    assert engine.take("begun") == expected(asking("begun", [8], 1))
    engine.drop("stays")
    with pytest.raises(ParameterError, match="no response to a request 'stays'"):
        engine.take("stays")


def test_a_name_is_of_one_request_at_a_time(engine: Toy) -> None:
    asked = asking("a", [7], 2)
    engine.submit(asked)
    for _ in range(3):  # it waits; it is under way; it has ended
        with pytest.raises(ParameterError, match="named 'a' is under way"):
            engine.submit(asked)
        engine.step()
    assert engine.take("a") == expected(asked)


def test_what_the_engine_cannot_do_is_refused_when_it_is_asked(engine: Toy) -> None:
    with pytest.raises(DataError, match="no top_k"):
        engine.submit(asking("a", [7], top_k=3))
    with pytest.raises(DataError, match="more than the 64 tokens"):
        engine.submit(asking("a", [7] * 62, 3))
    assert engine.step() == []


# Weights


@pytest.fixture(scope="module")
def trainer(folder: str) -> Any:
    return TorchTrainer(folder, device="cpu").build(EngineBuilder({}, seed=0))


def test_weights_change_under_what_waits_and_not_under_what_is_begun(engine: Toy, trainer: Any) -> None:
    engine.scores = PROBE.score(trainer)
    later: Any = Altered(trainer, version=5)
    begun, waits = asking("begun", [7], 2), asking("waits", [8], 2)
    engine.submit(begun)
    engine.step()
    engine.submit(waits)
    with pytest.raises(SyncError, match=r"1 requests are under way \('begun' is one\), whose tokens are of version 0"):
        engine.sync(later)
    assert engine.receipt is not None and engine.receipt.version == 0
    assert engine.step() == ["begun"]
    assert engine.take("begun") == expected(begun)
    engine.drop("waits")
    engine.submit(waits)
    assert engine.sync(later).version == 5
    engine.step()
    assert engine.step() == ["waits"]
    assert engine.take("waits") == expected(waits, version=5)


@pytest.mark.parametrize("caches", ["anew", "keep"])
def test_weights_change_between_two_tokens(engine: Toy, trainer: Any, caches: Any) -> None:
    """What has none yet begins again where the engine keeps what it computed."""
    assert isinstance(engine, Swaps)
    engine.scores = PROBE.score(trainer)
    begun, late, waits = (asking(name, [7], tokens) for name, tokens in (("begun", 5), ("late", 3), ("waits", 2)))
    engine.submit(begun)
    engine.step()
    engine.submit(late)
    engine.idle = "late"
    engine.step()
    engine.submit(waits)
    engine.told, engine.idle = [], None
    assert engine.swap(Altered(trainer, version=5), caches).version == 5  # type: ignore[arg-type]
    again = ["abort late"] if caches == "keep" else []
    assert engine.told == [f"halt {caches}", *again, f"take {caches}"]
    engine.step()
    assert engine.told[2 + len(again) :] == ([*map("begin {}".format, ("late", "waits"))] if again else ["begin waits"])
    engine.swap(Altered(trainer, version=9), caches)  # type: ignore[arg-type]
    assert engine.step() == ["waits"]
    assert engine.step() == ["begun", "late"]
    for asked, versions in ((begun, [0, 0, 5, 9, 9]), (late, [5, 9, 9]), (waits, [5, 9])):
        assert engine.take(asked.name) == expected(asked)._replace(versions=versions)


def test_where_nothing_is_under_way_a_swap_is_a_sync(engine: Toy, trainer: Any) -> None:
    engine.scores = PROBE.score(trainer)
    engine.submit(asking("waits", [8], 2))
    engine.swap(Altered(trainer, version=5), "keep")  # type: ignore[arg-type]
    assert engine.told == ["halt None", "take None"]
    engine.step()
    assert engine.step() == ["waits"]
    assert engine.take("waits") == expected(asking("waits", [8], 2), version=5)


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
        engine.swap(Altered(trainer, 5, "missing" if fault == "weights" else None), "keep")  # type: ignore[arg-type]
    assert engine.receipt is None and not engine.alive
    engine.wake()
    with pytest.raises(SwapError, match=f"the weights of Toy were to change .*{type(caught.value).__name__}"):
        engine.step()
    engine.scores = PROBE.score(trainer)
    engine.sync(trainer)
    assert engine.step() == []


def test_it_has_no_more_requests_than_it_computes_at_a_time(folder: str) -> None:
    engine = Toy(folder, max_num_seqs=3).freeze("of the folder")
    asked = [asking(f"{i}", [7 + i], 1 + i) for i in range(5)]
    for each in asked:
        engine.submit(each)
    engine.drop("3")
    assert engine.step() == ["0"]
    assert engine.told == ["begin 0", "begin 1", "begin 2"]
    assert engine.step() == ["1"]
    assert engine.told[3:] == ["begin 4"]
    for _ in range(4):
        engine.step()
    assert [engine.take(name) for name in "0124"] == [expected(asked[i]) for i in (0, 1, 2, 4)]


def test_asleep_it_forgets_what_it_computed_and_no_request(engine: Toy) -> None:
    asked = [asking(name, [7], 3) for name in ("one", "two", "three")]
    engine.submit(asked[0])
    engine.submit(asked[1])
    engine.step()
    engine.submit(asked[2])
    engine.sleep()
    assert engine.told[2:] == ["abort one", "abort two"]
    for call in (engine.step, lambda: engine.submit(asking("four", [7]))):
        with pytest.raises(AsleepError):
            call()
    engine.drop("two")
    engine.wake()
    engine.step()
    assert engine.told[4:] == ["begin one", "begin three"]
    engine.step()
    assert engine.step() == ["one", "three"]
    assert [engine.take("one"), engine.take("three")] == [expected(asked[0]), expected(asked[2])]


# Faults


@pytest.fixture(params=["begin", "advance", "short", "version"])
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


def test_closed_it_has_no_requests(engine: Toy) -> None:
    engine.submit(asking("begun", [7]))
    engine.step()
    engine.submit(asking("waits", [7]))
    engine.close()
    engine.close()
    engine.freeze("of the folder")._start()
    assert engine.step() == []
