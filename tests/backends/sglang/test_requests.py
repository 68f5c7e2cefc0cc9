"""`RequestPool` without SGLang: a fake tokenizer manager has the pitfalls of SGLang's (0.5.23)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.backends.sglang.requests import RequestPool, ResponseRequest
from flowrl.data.text.tokenizer import ChatTokenizer

LONG = 60.0  # seconds, which are never waited for
FIRST = 6  # of the ordinary tokens


class Manager:
    """A token of each row in every turn of the event loop, and one list a row that it goes on adding to.

    An abort is heeded a step later. It is forgotten if the scheduler does not have the row yet, and it ends all whose
    id begins so. One that is aborted while it has no room is told its tokens and versions, and nothing else.
    """

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.told = 0  # outputs
        self.slow = 0  # turns that a request takes on its way to the scheduler
        self.held = False  # no row is computed
        self.roomless = False
        self.fault: Exception | None = None

    async def generate_request(self, request: Any, http: None) -> AsyncIterator[dict[str, Any]]:
        assert request.stream and request.return_logprob
        assert not self.rid_to_state.keys() & set(request.rid)
        rows = {rid: SimpleNamespace(dispatched=False, aborted=False, ids=[], told=0) for rid in request.rid}
        self.rid_to_state |= rows
        self.requests.append(request)
        for _ in range(self.slow):
            await asyncio.sleep(0)
        for state in rows.values():
            state.dispatched = True
        while rows:
            await asyncio.sleep(0)
            if self.fault is not None:
                raise self.fault
            for i, rid in enumerate(request.rid):
                if rid in rows and not (self.held and not rows[rid].aborted):
                    given = self.step(rid, rows[rid], request.input_ids[i], request.sampling_params[i])
                    self.told += given is not None
                    if rid not in self.rid_to_state:
                        del rows[rid]
                    if given is not None:
                        yield given

    def step(self, rid: str, state: Any, context: list[int], settings: dict[str, Any]) -> dict[str, Any] | None:
        """Another token of a row; what is told of it."""
        heeded = state.aborted
        state.ids.append(FIRST + (sum(context) + len(state.ids)) % 26)
        if heeded or len(state.ids) == settings["max_new_tokens"]:
            del self.rid_to_state[rid]
            last = output(rid, state.ids, "abort" if heeded else "length")
            if heeded and self.roomless:
                for known in ("cached_tokens", "output_token_sampling_logprobs"):
                    del last["meta_info"][known]
            return last
        if state.told and len(state.ids) - state.told < settings.get("stream_interval", 1):
            return None
        state.told = len(state.ids)
        return output(rid, state.ids)

    def abort_request(self, rid: str) -> None:
        for name, state in self.rid_to_state.items():
            if name.startswith(rid) and state.dispatched:
                state.aborted = True


def output(rid: str, ids: list[int], ended: str | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": rid, "finish_reason": ended and {"type": ended}, "cached_tokens": 3}
    meta["output_token_logprobs"] = [(-i / 8, token, None) for i, token in enumerate(ids)]
    meta["output_token_sampling_logprobs"] = [-i / 16 for i in range(len(ids))]
    if ended:
        spans = (("4", 0, min(3, len(ids))), ("5", 3, len(ids)))
        meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in spans if start < end]
    return {"output_ids": ids, "meta_info": meta}


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    structs = SimpleNamespace(GenerateReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)  # type: ignore[arg-type]
    return Manager()


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


class Process:
    """A pool, and the loop that runs while it is waited for."""

    def __init__(self, manager: Manager, tokenizer: ChatTokenizer, loop: asyncio.Runner) -> None:
        self.pool, self._loop = RequestPool(manager, tokenizer), loop

    def wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(what)

    def some(self, *new: ResponseRequest, seconds: float = LONG, **alike: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.wait(self.pool.some(new, seconds, **alike))
        return found

    def all(self, *new: ResponseRequest) -> dict[str, Any]:
        """Together with the requests in flight."""
        found = self.some(*new)
        while self.pool._in_flight:
            found |= self.some()
        return found


@pytest.fixture
def process(manager: Manager, tiny: str, loop: asyncio.Runner) -> Process:
    return Process(manager, ChatTokenizer(tiny), loop)


def asked(name: str, tokens: int, *stop: str, ids: tuple[int, ...] = (0,), support: bool = False) -> ResponseRequest:
    return ResponseRequest(name, [*ids], 11, {"temperature": 1.0, "max_new_tokens": tokens}, stop, support)


def letters(count: int, start: int = 0) -> list[int]:
    return [FIRST + (start + i) % 26 for i in range(count)]


@pytest.mark.parametrize("support", [False, True])
def test_a_response_has_ids_log_probs_versions_and_finish_reason(
    process: Process, manager: Manager, support: bool
) -> None:
    answer = process.some(asked("a", 4, ids=(2, 3), support=support), lora_path="policy")["a"]
    log_probs = [-i / (16 if support else 8) for i in range(4)]
    ids, versions = letters(4, start=5), ["4", "4", "4", "5"]
    expected = {"ids": ids, "log_probs": log_probs, "cached": 3, "versions": versions, "ended": "{'type': 'length'}"}
    assert answer == expected
    [request] = manager.requests
    (settings,) = request.sampling_params
    assert settings == {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 11, "stream_interval": 4}
    assert (request.input_ids, request.return_sampling_mask) == ([[2, 3]], [support])
    assert request.lora_path == "policy"


def test_new_requests_reach_the_scheduler_in_one_message(process: Process, manager: Manager) -> None:
    new = [asked(str(i), 20 + i, *(["zz"] if i == 5 else []), ids=(i,), support=i > 6) for i in range(10)]
    answers = process.all(*new)
    assert [answers[str(i)]["ids"] for i in range(10)] == [letters(20 + i, start=i) for i in range(10)]
    [request] = manager.requests
    assert request.return_sampling_mask == [i > 6 for i in range(10)]
    assert manager.told == 9 * 2 + 25  # the first and the last, but for one that is looked at


def test_requests_join_and_leave_while_others_are_in_flight(process: Process) -> None:
    assert list(process.some(asked("long", 60), asked("short", 2))) == ["short"]
    assert list(process.some(asked("middle", 3))) == ["middle"]
    assert process.some()["long"]["ids"] == letters(60)


def test_responses_that_end_in_one_step_are_returned_together(process: Process) -> None:
    assert len(process.some(*(asked(str(i), 5) for i in range(40)))) == 40


def test_step_waits_no_longer_than_its_time_limit(process: Process) -> None:
    """And has begun what is new all the same, even where something ended before."""
    assert process.some(asked("a", 9), seconds=0.0) == {}
    while not process.pool._ended:
        process.wait(asyncio.sleep(0))
    assert list(process.some(asked("b", 9))) == ["a"]
    assert list(process.some(seconds=LONG)) == ["b"]


@pytest.mark.parametrize("roomless", [False, True])
def test_a_request_ends_soon_after_its_stop_string(process: Process, manager: Manager, roomless: bool) -> None:
    """With the tokens that there were when it was found, whatever SGLang adds to its lists or leaves out then."""
    manager.roomless = roomless
    answers = process.all(asked("a", 50, "ef", "no", support=True), asked("b", 20, "EF"))
    assert answers["a"]["ids"] == letters(6)
    assert answers["a"]["log_probs"] == [-i / 16 for i in range(6)]
    assert answers["a"]["cached"] == 3 and answers["a"]["versions"] == ["4"] * 3 + ["5"] * 3
    assert answers["b"]["ids"] == letters(20)


def test_dropping_a_request_aborts_no_other_request(process: Process) -> None:
    """SGLang would end ten more: those whose ids begin with a 1."""
    process.some(*(asked(str(i), 30) for i in range(20)), seconds=0.0)
    process.pool.drop("1")
    process.pool.drop("nobody")
    answers = process.all()
    assert answers.keys() == {str(i) for i in range(20)} - {"1"}
    assert all(answer["ids"] == letters(30) for answer in answers.values())


def test_the_name_of_a_dropped_request_can_be_reused_at_once(process: Process) -> None:
    process.some(asked("a", 30), seconds=0.0)
    process.pool.drop("a")
    assert process.all(asked("a", 3, ids=(7,)))["a"]["ids"] == letters(3, start=7)


def test_an_ended_request_can_be_dropped_before_it_is_returned(process: Process) -> None:
    process.some(asked("a", 9), seconds=0.0)
    while not process.pool._ended:
        process.wait(asyncio.sleep(0))
    process.pool.drop("a")
    assert process.some(seconds=0.0) == {}


@pytest.mark.parametrize(("slow", "roomless"), [(0, False), (0, True), (9, False)])
def test_dropped_requests_are_aborted_before_the_next_call(
    process: Process, manager: Manager, slow: int, roomless: bool
) -> None:
    """Also requests that have not reached the scheduler yet, which could not abort them."""
    manager.slow, manager.roomless = slow, roomless
    process.some(asked("a", 10**6), asked("b", 10**6), seconds=0.0)
    assert len(manager.rid_to_state) == 2
    process.pool.drop("a")
    process.pool.drop("b")
    process.wait(process.pool.settled())
    assert not manager.rid_to_state
    process.wait(process.pool.settled())


def test_an_sglang_error_is_raised(process: Process, manager: Manager) -> None:
    manager.fault = ValueError("the request is too long")
    with pytest.raises(ValueError, match="too long"):
        process.some(asked("a", 4))
