"""Streamed answers: server-sent events, while the policy samples them in the loop of the episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.episodes.endpoint.answers import Reading
from flowrl.episodes.endpoint.flights import Completion
from flowrl.episodes.endpoint.messages import RequestError
from flowrl.episodes.endpoint.requests import CompletionRequest
from flowrl.episodes.endpoint.session import Session

if TYPE_CHECKING:
    from starlette.requests import Request


class StreamedAnswer(Protocol):
    """How an API writes an answer as events."""

    id: str

    def begin(self) -> str: ...
    def partial(self, reading: Reading) -> str: ...
    def end(self, completion: Completion) -> str: ...
    def error(self, error: RequestError) -> str: ...


@dataclass(frozen=True)
class EventStream:
    """A response of ASGI with these events as its body."""

    events: AsyncIterator[str]
    headers: Mapping[str, str]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", **self.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        async for event in self.events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def streamed(
    session: Session,
    asked: CompletionRequest,
    retried: bool,
    answer: StreamedAnswer,
    request: Request,
    headers: Mapping[str, str],
) -> EventStream:
    """The stream of an answer, once there is any of it; the work ends if the client disconnects.

    Raises:
        RequestError: the request is refused before anything is sampled.
    """
    queue: asyncio.Queue[Reading | None] = asyncio.Queue()
    own = asyncio.get_running_loop()

    def tell(reading: Reading) -> None:
        own.call_soon_threadsafe(queue.put_nowait, reading)

    work = submitted(session.loop, session.respond(asked, retried, tell))
    gone = asyncio.ensure_future(request.receive())
    for task in (work, gone):
        task.add_done_callback(lambda _: queue.put_nowait(None))

    async def events(reading: Reading | None) -> AsyncIterator[str]:
        try:
            yield answer.begin()
            while reading is not None:
                yield answer.partial(reading)
                reading = await queue.get()
            try:
                completion = result_of(work)
            except RequestError as error:
                yield answer.error(error)
                return
            session.store(answer.id, asked, completion)
            yield answer.end(completion)
        finally:
            gone.cancel()
            work.cancel()

    first = await queue.get()
    if first is None and work.done():
        gone.cancel()
        result_of(work)  # raises what is wrong with the request
    return EventStream(events(first), headers)


def submitted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """The result of a coroutine in the loop of an episode; raises `RequestError` if that loop is closed."""
    try:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    except RuntimeError:
        work.close()
        raise _over() from None


def result_of(work: asyncio.Future[Any]) -> Any:
    """What a coroutine returned; one that still runs is canceled, since its client has disconnected."""
    if not work.done():
        work.cancel()
        raise RequestError(499, "client_closed_request", "The client has disconnected.")
    if work.cancelled():
        raise _over()
    return work.result()


def _over() -> RequestError:
    return RequestError(401, "invalid_api_key", "The episode of this key is over. Start no further requests.")
