"""Engines that a node of another process asks: `RemoteEngine`, its handle there, and `RequestServer` at the engine.

A node that plays episodes runs in the process of its policy. It sends requests to the processes of the other engines,
whose hosts run no node meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.distributed.faults.faults import Failure
from flowrl.errors import DataError
from flowrl.protocols.protocols import Request, Response, StreamingRollout
from flowrl.protocols.remote import Ended, submit
from flowrl.records import Receipt

STEPS = 16
"""The most engine steps of a call, so that requests of other calls join."""

_tokenizer = functools.cache(ChatTokenizer)


class EngineFacts(NamedTuple):
    """What a handle needs to know of its engine."""

    tokenizer: str
    receipt: Receipt | None


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is: the actor of its host, and its role there.

    Args:
        asker: the process that asks, by its name.
    """

    role: str
    actor: Any
    asker: str

    def connect(self) -> RemoteEngine:
        """The handle; requests that an earlier one left at the engine are dropped."""
        facts: EngineFacts = _value(ray.get(self.actor.open_requests.remote(self.role, self.asker)))
        return RemoteEngine(self, facts)


class RemoteEngine:
    """The handle of an engine in another process; a `flowrl.protocols.remote.RemoteRollout`."""

    def __init__(self, address: EngineAddress, facts: EngineFacts) -> None:
        self._address = address
        self.receipt, self.tokenizer = facts.receipt, _tokenizer(facts.tokenizer)

    async def exchange(self, requests: Sequence[Request], dropped: Sequence[str]) -> Sequence[Ended]:
        """See `flowrl.protocols.remote.RemoteRollout`."""
        address = self._address
        call = address.actor.exchange.remote(address.role, address.asker, list(requests), list(dropped))
        ended: list[Ended] = _value(await call)
        return ended


def _value(result: Any) -> Any:
    """The result of a call; raises its failure."""
    if isinstance(result, Failure):
        raise result.error()
    return result


class RequestServer:
    """Serves the requests of several processes with one engine, where they have names of their own."""

    def __init__(self, engine: StreamingRollout) -> None:
        self._engine = engine
        self._known: dict[str, tuple[str, str]] = {}  # the asker and its name of a request that the engine may know
        self._ended: dict[str, list[Ended]] = {}  # by asker, what it has not fetched

    def open(self, asker: str) -> None:
        """Drop all requests of a process."""
        self._drop(asker, [name for other, name in self._known.values() if other == asker])
        self._ended.pop(asker, None)

    def exchange(self, asker: str, requests: Sequence[Request], dropped: Sequence[str]) -> list[Ended]:
        """Take requests of a process, and compute until one of its responses ends, for at most `STEPS` steps."""
        self._drop(asker, dropped)
        own = [_of(asker, request) for request in requests]
        self._known |= {one.name: (asker, request.name) for one, request in zip(own, requests, strict=True)}
        for name, error in submit(self._engine, own):
            self._end(name, error)
        for _ in range(STEPS if requests or not dropped else 0):
            if self._ended.get(asker):
                break
            for name in self._engine.step():
                self._end(name, self._engine.take(name))
        return self._ended.pop(asker, [])

    def _end(self, name: str, ended: Response | DataError) -> None:
        asker, own = self._known[name]
        self._ended.setdefault(asker, []).append((own, ended))

    def _drop(self, asker: str, names: Sequence[str]) -> None:
        self._ended[asker] = [one for one in self._ended.get(asker, ()) if one[0] not in names]
        for name in names:
            self._engine.drop(_at_engine(asker, name))
            self._known.pop(_at_engine(asker, name), None)


def _at_engine(asker: str, name: str) -> str:
    return f"{name} of {asker}"


def _of(asker: str, request: Request) -> Request:
    """A request with names that those of no other process have."""
    shared = None if request.cache_key is None else _at_engine(asker, request.cache_key)
    return replace(request, name=_at_engine(asker, request.name), cache_key=shared)
