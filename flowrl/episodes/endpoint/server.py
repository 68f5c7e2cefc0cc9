"""`EndpointServer`: OpenAI's chat completions on the loopback, in a thread with an event loop of its own.

The thread reads and writes HTTP and JSON; tokens and answers are those of the `Session` of the key. A streamed answer
is sent at once when it is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from flowrl.episodes.endpoint.messages import CompletionRequest, RequestError, parse
from flowrl.episodes.endpoint.session import Completion, Session
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

    def __init__(self) -> None:
        uvicorn = package("uvicorn", "endpoint")
        self._sessions: dict[str, Session] = {}
        bound = socket.socket()
        bound.bind((HOST, 0))
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

        async def complete(session: Session, request: Request) -> Any:
            body = await _body(request)
            asked = parse(body, session.chat.broker.sampling, session.strict)
            retried = request.headers.get("x-stainless-retry-count", "0") != "0"
            completion = await _answered(session.loop, session.respond(asked, retried), request)
            headers = {"x-flowrl-overridden": ", ".join(asked.overridden)} if asked.overridden else None
            data = completion_data(asked, completion, session.chat.broker.tokenizer.shown)
            if asked.stream:
                return responses.Response(streamed(asked, data), 200, headers, "text/event-stream")
            return responses.Response(json.dumps(data), 200, headers, "application/json")

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
                404, "unknown_url", f"There is no {request.url.path}. Use {self.url}/chat/completions.", None
            )

        return applications.Starlette(
            routes=[
                routing.Route("/v1/chat/completions", handler(complete), methods=["POST"]),
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
    over = RequestError(401, "invalid_api_key", "The episode of this key is over. Start no further requests.")
    try:
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    except RuntimeError:  # that loop is closed
        work.close()
        raise over from None
    gone = asyncio.ensure_future(request.receive())  # after the body, only that the client has disconnected
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise RequestError(499, "client_closed_request", "The client has disconnected.")
        if answer.cancelled():
            raise over
        return answer.result()
    finally:
        gone.cancel()


def completion_data(request: CompletionRequest, completion: Completion, shown: Callable[[list[int]], str]) -> Any:
    """An object of the type ``chat.completion``."""
    response, tokens = completion.response, len(completion.response.ids)
    logprobs = None
    if request.logprobs:
        content = [
            {"token": (text := shown([i])), "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for i, logprob in zip(response.ids, response.log_probs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    choice = {
        "index": 0,
        "message": completion.message,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": completion.prompt_tokens + tokens,
        },
    }


def streamed(request: CompletionRequest, data: dict[str, Any]) -> str:
    """The events of a completion: the message in one chunk, its end, the usage if requested, and ``[DONE]``."""
    shared = {**data, "object": "chat.completion.chunk"}
    usage = shared.pop("usage")
    (choice,) = data["choices"]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    said = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    ended = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    chunks: list[Any] = [{**shared, "choices": [said]}, {**shared, "choices": [ended]}]
    if request.usage:
        chunks.append({**shared, "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


_servers: list[EndpointServer] = []
_lock = threading.Lock()


def endpoint_server() -> EndpointServer:
    """The server of this process; started on the first call."""
    with _lock:
        if not _servers:
            _servers.append(EndpointServer())
        return _servers[0]


os.register_at_fork(after_in_child=_servers.clear)  # its thread is the parent's
