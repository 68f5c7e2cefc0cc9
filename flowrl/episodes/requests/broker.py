"""`RequestBroker`: the requests of all episodes to an engine, and `EngineLoop`, which batches them there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.waits import WaitRecorder
from flowrl.errors import DataError
from flowrl.protocols.partial_responses import PartialResponses
from flowrl.protocols.protocols import Request, Response, Sampling, StreamingRollout
from flowrl.protocols.remote import Ended, RemoteRollout, submit


class EngineLoop:
    """Submits the requests of all episodes, coroutines of one event loop, to an engine that computes in that thread.

    Between two steps of the engine, every coroutine that can continue takes its response, and its next request is part
    of the engine's next step. Several engines compute in turn, except for those of other processes, which compute
    meanwhile.
    """

    def __init__(self, engine: StreamingRollout | RemoteRollout) -> None:
        self.idle = WaitRecorder("all wait for their environments")
        """When the engine had nothing to compute."""
        self._engine = engine
        self._new: list[Request] = []
        self._dropped: list[str] = []  # names that an engine of another process still has to drop
        self._pending: dict[str, asyncio.Future[Response]] = {}
        self._more = asyncio.Event()

    async def ask(self, request: Request) -> Response:
        """The response to a request, which is dropped if it is no longer awaited."""
        response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pending[request.name] = response
        self._new.append(request)
        self._more.set()
        try:
            return await response
        except asyncio.CancelledError:
            if self._pending.get(request.name) is response:
                self.drop(request.name)
            raise

    def drop(self, name: str) -> None:
        """Drop a request, and what the engine retains for it."""
        self._pending.pop(name, None)
        self._new = [request for request in self._new if request.name != name]
        if isinstance(self._engine, RemoteRollout):
            self._dropped.append(name)
        else:
            self._engine.drop(name)

    async def serve(self) -> None:
        """Compute all requests, until canceled; raises what the engine raises."""
        while True:
            if not self._pending:
                self._more.clear()
                self.idle.begin()
                try:
                    await self._more.wait()
                finally:  # the wait for an environment's last reply counts too, though no request follows
                    self.idle.end()
            new, self._new = self._new, []
            for name, ended in await self._step(new):
                asked = self._pending.pop(name, None)
                if asked is None or asked.cancelled():  # by an episode that has ended meanwhile
                    continue
                if isinstance(ended, DataError):  # of the episode, whose context the model cannot process
                    asked.set_exception(ended)
                else:
                    asked.set_result(ended)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Drop what an engine of another process still retains."""
        if isinstance(self._engine, RemoteRollout):
            await self._engine.exchange((), self._dropped)

    def sampled_so_far(self, name: str, start: int) -> list[int] | None:
        """The tokens of a request in flight from this number on; None if the engine gives only whole responses."""
        return self._engine.sampled_so_far(name, start) if isinstance(self._engine, PartialResponses) else None

    async def _step(self, new: Sequence[Request]) -> Sequence[Ended]:
        """Submit requests, and compute; the responses that ended, and why the engine refuses requests."""
        if isinstance(self._engine, RemoteRollout):
            dropped, self._dropped = self._dropped, []
            ended = await self._engine.exchange(new, dropped)
            return [one for one in ended if one[0] not in self._dropped]  # meanwhile; a later request may have the name
        refused = submit(self._engine, new)
        return [*refused, *((name, self._engine.take(name)) for name in self._engine.step())]


class RequestBroker:
    """How the episodes of a batch ask an engine.

    Args:
        sampling: of each response.
        key: of their random numbers; a row and a turn derive theirs.
        name: of the engine in the episode; empty for the policy.
        loop: of the engine, if several brokers share it.
    """

    def __init__(
        self,
        engine: StreamingRollout | RemoteRollout,
        tokenizer: ChatTokenizer,
        sampling: Sampling,
        key: Key,
        name: str = "",
        loop: EngineLoop | None = None,
    ) -> None:
        self.tokenizer, self.sampling, self.key, self._name = tokenizer, sampling, key, name
        self.environments = WaitRecorder("some wait for their environments")
        self.loop = EngineLoop(engine) if loop is None else loop

    def request_name(self, row_id: str) -> str:
        """The name of the requests of an episode, which is unique among those of the engine."""
        return f"{row_id}~{self._name}" if self._name else row_id

    async def ask(self, request: Request) -> Response:
        """The response to a request."""
        return await self.loop.ask(request)

    def drop(self, name: str) -> None:
        """Drop a request, and what the engine retains for it."""
        self.loop.drop(name)

    def sampled_so_far(self, name: str, start: int) -> list[int] | None:
        """The tokens of a request in flight from this number on; None if the engine gives only whole responses."""
        return self.loop.sampled_so_far(name, start)
