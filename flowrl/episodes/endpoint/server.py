"""`EndpointServer`: OpenAI's chat completions and responses on the loopback, in a thread with an event loop of its own.

The thread reads and writes HTTP and JSON; tokens and answers are those of the `Session` of the key.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from flowrl.episodes.endpoint.chat_completions import ChatCompletion
from flowrl.episodes.endpoint.event_stream import result_of, streamed, submitted
from flowrl.episodes.endpoint.messages import RequestError
from flowrl.episodes.endpoint.responses import ModelResponse
from flowrl.episodes.endpoint.session import Session
from flowrl.lazy import package

if TYPE_CHECKING:
    from starlette.requests import Request

HOST = "127.0.0.1"

MAX_BODY = 1 << 24
"""The largest request, in bytes."""

_BACKLOG = 1024


class EndpointServer:
    """A server whose clients have one key an episode; it runs until the process ends.

    Raises:
        DefinitionError: starlette or uvicorn is not installed.
    """

    def __init__(self, port: int = 0) -> None:
        uvicorn = package("uvicorn", "endpoint")
        self._sessions: dict[str, Session] = {}
        bound = socket.socket()
        bound.bind((HOST, port))
        bound.listen(_BACKLOG)
        self.url = f"http://{HOST}:{bound.getsockname()[1]}/v1"
        config = uvicorn.Config(self._application(), log_level="warning", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, args=([bound],), daemon=True, name="flowrl-endpoint").start()

    def open(self, session: Session) -> str:
        """A new key for an episode."""
        key = f"flowrl-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Refuse this key from now on."""
        self._sessions.pop(key, None)

    def _application(self) -> Any:
        applications, routing = package("starlette.applications", "endpoint"), package("starlette.routing", "endpoint")
        responses = package("starlette.responses", "endpoint")

        def handler(of: Callable[[Session, Request], Coroutine[Any, Any, Any]]) -> Any:
            async def handle(request: Request) -> Any:
                try:
                    return await of(self._session(request), request)
                except RequestError as error:
                    return responses.JSONResponse(error.body, error.status)

            return handle

        def completing(api: type[ChatCompletion | ModelResponse]) -> Any:
            async def complete(session: Session, request: Request) -> Any:
                asked = api.parse(await _body(request), session)
                answer, retried = api(asked), request.headers.get("x-stainless-retry-count", "0") != "0"
                headers = {"x-flowrl-overridden": ", ".join(asked.overridden)} if asked.overridden else {}
                if asked.stream:
                    return await streamed(session, asked, retried, answer, request, headers)
                completion = await _answered(session.loop, session.respond(asked, retried), request)
                session.store(answer.id, asked, completion)
                return responses.Response(json.dumps(answer.data(completion)), 200, headers, "application/json")

            return handler(complete)

        async def models(session: Session, request: Request) -> Any:
            listed = [{"id": "policy", "object": "model", "created": 0, "owned_by": "flowrl"}]
            return responses.JSONResponse({"object": "list", "data": listed})

        async def score(session: Session, request: Request) -> Any:
            body = await _body(request)
            value: Any = body.get("score") if isinstance(body, dict) else None

            async def reward() -> None:
                session.reward(value)

            await _answered(session.loop, reward(), request)
            return responses.JSONResponse({})

        async def unknown(session: Session, request: Request) -> Any:
            raise RequestError(
                404,
                "unknown_url",
                f"There is no {request.url.path}. Use {self.url}/chat/completions or /responses.",
                None,
            )

        return applications.Starlette(
            routes=[
                routing.Route("/v1/chat/completions", completing(ChatCompletion), methods=["POST"]),
                routing.Route("/v1/responses", completing(ModelResponse), methods=["POST"]),
                routing.Route("/v1/models", handler(models), methods=["GET"]),
                routing.Route("/v1/score", handler(score), methods=["POST"]),
                routing.Route("/{path:path}", handler(unknown), methods=["GET", "POST"]),
            ]
        )

    def _session(self, request: Request) -> Session:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestError(
                401, "invalid_api_key", "The key is that of no episode that is played. Pass the OPENAI_API_KEY of it."
            )
        return session


async def _body(request: Request) -> Any:
    """The JSON of a request."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        if (size := size + len(part)) > MAX_BODY:
            raise RequestError(413, "request_too_large", f"The request has more than {MAX_BODY} bytes. Shorten it.")
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"The body is not JSON ({error}). Send a JSON object.") from None


async def _answered(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], request: Request) -> Any:
    """What a coroutine returns in the loop of the episode; it is canceled if the client disconnects."""
    answer = submitted(loop, work)
    gone = asyncio.ensure_future(request.receive())  # after the body, only that the client has disconnected
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return result_of(answer)
    finally:
        gone.cancel()


_servers: list[EndpointServer] = []
_lock = threading.Lock()


def endpoint_server(port: int = 0) -> EndpointServer:
    """The server of this process; started on the first call, at a port of the loopback, where 0 is a free one.

    Raises:
        DefinitionError: starlette or uvicorn is not installed.
        OSError: the port is in use.
    """
    with _lock:
        if not _servers:
            _servers.append(EndpointServer(port))
        return _servers[0]


os.register_at_fork(after_in_child=_servers.clear)  # its thread is the parent's
