"""`RequestPool` without SGLang: a fake tokenizer manager behaves like SGLang's (0.5.23)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.backends.sglang.requests import RequestPool, ResponseRequest
from flowrl.data.text.tokenizer import ChatTokenizer

LONG = 60.0  # seconds; no test waits so long
FIRST = 6  # the first ordinary token


class Manager:
    """Samples one token per row in each turn of the event loop, and appends it to the row's list of ids.

    An abort takes effect one step later. It is lost if the scheduler does not have the row yet, and it aborts all rows
    whose ids start with the output_of_row id. The output of a row aborted without memory has ids and versions only.
    """

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.outputs_sent = 0  # outputs
        self.slow = 0  # turns before a request reaches the scheduler
        self.paused = False  # no row is computed
        self.without_memory = False
        self.fault: Exception | None = None

    async def generate_request(self, request: Any, http: None) -> AsyncIterator[dict[str, Any]]:
        assert request.stream and request.return_logprob
        assert not self.rid_to_state.keys() & set(request.rid)
        rows = {rid: SimpleNamespace(dispatched=False, aborted=False, ids=[], outputs_sent=0) for rid in request.rid}
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
                if rid in rows and not (self.paused and not rows[rid].aborted):
                    output_of_row = self.step(rid, rows[rid], request.input_ids[i], request.sampling_params[i])
                    self.outputs_sent += output_of_row is not None
                    if rid not in self.rid_to_state:
                        del rows[rid]
                    if output_of_row is not None:
                        yield output_of_row

    def step(self, rid: str, state: Any, context: list[int], settings: dict[str, Any]) -> dict[str, Any] | None:
        """Sample another token of a row; returns the output to send, if any."""
        aborting = state.aborted
        state.ids.append(FIRST + (sum(context) + len(state.ids)) % 26)
        if aborting or len(state.ids) == settings["max_new_tokens"]:
            del self.rid_to_state[rid]
            last = output(rid, state.ids, "abort" if aborting else "length")
            if aborting and self.without_memory:
                for known in ("cached_tokens", "output_token_sampling_logprobs"):
                    del last["meta_info"][known]
            return last
        if state.outputs_sent and len(state.ids) - state.outputs_sent < settings.get("stream_interval", 1):
            return None
        state.outputs_sent = len(state.ids)
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
    """A pool, and the event loop that runs during its calls."""

    def __init__(self, manager: Manager, tokenizer: ChatTokenizer, loop: asyncio.Runner) -> None:
        self.pool, self._loop = RequestPool(manager, tokenizer), loop

    def wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(what)

    def some(self, *new: ResponseRequest, seconds: float = LONG, **common: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.wait(self.pool.some(new, seconds, **common))
        return found

    def all(self, *new: ResponseRequest) -> dict[str, Any]:
        """Responses of all new and in-flight requests."""
        found = self.some(*new)
        while self.pool._in_flight:
            found |= self.some()
        return found


@pytest.fixture
def process(manager: Manager, tiny: str, loop: asyncio.Runner) -> Process:
    return Process(manager, ChatTokenizer(tiny), loop)


def request_of(
    name: str, tokens: int, *stop: str, ids: tuple[int, ...] = (0,), support: bool = False
) -> ResponseRequest:
    return ResponseRequest(name, [*ids], 11, {"temperature": 1.0, "max_new_tokens": tokens}, stop, support)


def letters(count: int, start: int = 0) -> list[int]:
    return [FIRST + (start + i) % 26 for i in range(count)]


@pytest.mark.parametrize("support", [False, True])
def test_a_response_has_ids_log_probs_versions_and_finish_reason(
    process: Process, manager: Manager, support: bool
) -> None:
    response = process.some(request_of("a", 4, ids=(2, 3), support=support), lora_path="policy")["a"]
    log_probs = [-i / (16 if support else 8) for i in range(4)]
    ids, versions = letters(4, start=5), ["4", "4", "4", "5"]
    expected = {"ids": ids, "log_probs": log_probs, "cached": 3, "versions": versions, "ended": "{'type': 'length'}"}
    assert response == expected
    [request] = manager.requests
    (settings,) = request.sampling_params
    assert settings == {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 11, "stream_interval": 4}
    assert (request.input_ids, request.return_sampling_mask) == ([[2, 3]], [support])
    assert request.lora_path == "policy"


def test_new_requests_reach_the_scheduler_in_one_message(process: Process, manager: Manager) -> None:
    new = [request_of(str(i), 20 + i, *(["zz"] if i == 5 else []), ids=(i,), support=i > 6) for i in range(10)]
    responses = process.all(*new)
    assert [responses[str(i)]["ids"] for i in range(10)] == [letters(20 + i, start=i) for i in range(10)]
    [request] = manager.requests
    assert request.return_sampling_mask == [i > 6 for i in range(10)]
    assert manager.outputs_sent == 9 * 2 + 25  # first and last outputs, but all of the one with a stop string


def test_requests_can_start_and_end_while_others_are_in_flight(process: Process) -> None:
    assert list(process.some(request_of("long", 60), request_of("short", 2))) == ["short"]
    assert list(process.some(request_of("middle", 3))) == ["middle"]
    assert process.some()["long"]["ids"] == letters(60)


def test_responses_that_end_in_one_step_are_returned_together(process: Process) -> None:
    assert len(process.some(*(request_of(str(i), 5) for i in range(40)))) == 40


def test_some_returns_after_its_time_limit_and_starts_new_requests(process: Process) -> None:
    """New requests start even if a response is ready."""
    assert process.some(request_of("a", 9), seconds=0.0) == {}
    while not process.pool._ended:
        process.wait(asyncio.sleep(0))
    assert list(process.some(request_of("b", 9))) == ["a"]
    assert list(process.some(seconds=LONG)) == ["b"]


@pytest.mark.parametrize("without_memory", [False, True])
def test_a_request_ends_at_its_stop_string(process: Process, manager: Manager, without_memory: bool) -> None:
    """The response has the tokens up to the stop string, whatever SGLang appends or omits afterwards."""
    manager.without_memory = without_memory
    responses = process.all(request_of("a", 50, "ef", "no", support=True), request_of("b", 20, "EF"))
    assert responses["a"]["ids"] == letters(6)
    assert responses["a"]["log_probs"] == [-i / 16 for i in range(6)]
    assert responses["a"]["cached"] == 3 and responses["a"]["versions"] == ["4"] * 3 + ["5"] * 3
    assert responses["b"]["ids"] == letters(20)


def test_dropping_a_request_aborts_no_other_request(process: Process) -> None:
    """SGLang itself would also abort the ten others whose ids start with 1."""
    process.some(*(request_of(str(i), 30) for i in range(20)), seconds=0.0)
    process.pool.drop("1")
    process.pool.drop("unknown")
    responses = process.all()
    assert responses.keys() == {str(i) for i in range(20)} - {"1"}
    assert all(response["ids"] == letters(30) for response in responses.values())


def test_the_name_of_a_dropped_request_can_be_reused_at_once(process: Process) -> None:
    process.some(request_of("a", 30), seconds=0.0)
    process.pool.drop("a")
    assert process.all(request_of("a", 3, ids=(7,)))["a"]["ids"] == letters(3, start=7)


def test_an_ended_request_can_be_dropped_before_it_is_returned(process: Process) -> None:
    process.some(request_of("a", 9), seconds=0.0)
    while not process.pool._ended:
        process.wait(asyncio.sleep(0))
    process.pool.drop("a")
    assert process.some(seconds=0.0) == {}


@pytest.mark.parametrize(("slow", "without_memory"), [(0, False), (0, True), (9, False)])
def test_dropped_requests_are_aborted_before_the_next_call(
    process: Process, manager: Manager, slow: int, without_memory: bool
) -> None:
    """Also those that have not reached the scheduler, which ignores an abort of unknown requests."""
    manager.slow, manager.without_memory = slow, without_memory
    process.some(request_of("a", 10**6), request_of("b", 10**6), seconds=0.0)
    assert len(manager.rid_to_state) == 2
    process.pool.drop("a")
    process.pool.drop("b")
    process.wait(process.pool.drain())
    assert not manager.rid_to_state
    process.wait(process.pool.drain())


def test_an_sglang_error_is_raised(process: Process, manager: Manager) -> None:
    manager.fault = ValueError("the request is too long")
    with pytest.raises(ValueError, match="too long"):
        process.some(request_of("a", 4))
