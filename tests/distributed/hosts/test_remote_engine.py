"""The requests of several processes to one engine; see also `tests/on_ray/parity/test_asked.py`."""

from __future__ import annotations

from typing import Any

from flowrl.distributed.hosts.remote_engine import STEPS, Ended, RequestServer
from flowrl.protocols.protocols import Request
from tests.episodes.scripted import KEY, NAME, SAMPLING, Scripted
from tests.support.templates import tokenizer_of


class Echo(Scripted):
    """Answers each request with its own tokens."""

    def submit(self, request: Any) -> None:
        assert request.name not in self._under_way and request.name not in self._done
        self.requests.append(request)
        self._under_way[request.name] = ([*request.ids], 0)


def asked(name: str, length: int) -> Request:
    return Request(name, [length] * length, SAMPLING, KEY, True, cache_key=name)


def lengths(ended: list[Ended]) -> dict[str, int]:
    return {name: len(response.ids) for name, response in ended if not isinstance(response, Exception)}


def served() -> tuple[RequestServer, Echo]:
    engine = Echo(lambda row, turn: "", tokenizer_of(NAME))
    server = RequestServer(engine)
    server.open("one")
    server.open("two")
    return server, engine


def test_processes_ask_by_the_same_names() -> None:
    server, engine = served()
    assert server.exchange("one", [asked("row~judge", STEPS + 5)], []) == []
    assert lengths(server.exchange("two", [asked("row~judge", 2)], [])) == {"row~judge": 2}
    assert len({request.cache_key for request in engine.requests}) == 2
    server.exchange("two", [], ["row~judge"])
    assert lengths(server.exchange("one", [], [])) == {"row~judge": STEPS + 5}


def test_an_answer_that_was_not_fetched_is_dropped_with_its_request() -> None:
    """It ended while the engine computed for another process."""
    server, _ = served()
    assert server.exchange("one", [asked("row", STEPS + 1)], []) == []
    assert lengths(server.exchange("two", [asked("row", 3)], [])) == {"row": 3}
    assert lengths(server.exchange("one", [asked("row", 4)], ["row"])) == {"row": 4}
