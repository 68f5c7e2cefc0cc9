"""Environments and tools in separate processes, which are killed after a timeout; a thread cannot be.

Each episode's environment has its own process, and so has each call of a tool, forked from a `ForkServer` that has
imported the environment and lives as long as the program. `flowrl.workers.supervisor` terminates all that they start.

Requests are pickled. Replies are JSON with a size limit, because a process that runs foreign code must not choose what
this program unpickles.
"""

# Why not `concurrent.futures` or `multiprocessing`? See `flowrl.operators.reward.pool`. Workers there import what a
# call needs on their own; here many episodes need a process each at the same time, so processes have to be forked.

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import pickle
import random
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from flowrl import references
from flowrl.episodes.calls import describe_error
from flowrl.episodes.environment import Answer, Environment, InvalidToolCall, Reply, Row, check_reply
from flowrl.episodes.tools import Tool, result_text
from flowrl.errors import EpisodeError, FlowrlError, ParameterError, short
from flowrl.workers.fork_server import ForkServer, NotReadyError, imports
from flowrl.workers.fork_server_process import detach_stdin
from flowrl.workers.supervisor import supervise

MAX_REPLY = 1 << 24
"""The largest reply of a process, in bytes of JSON."""

_SIZE = 8
"""Bytes of a message's length prefix."""


_servers: dict[tuple[str, ...], ForkServer] = {}


def environment_server(names: tuple[str, ...]) -> ForkServer:
    """The server whose workers have imported these environments and tools (references); starts one if there is none."""
    if names in _servers and not _servers[names].alive:
        _servers.pop(names).close()
    if names not in _servers:
        calls = [[references.__name__, references.resolve.__name__, name] for name in names]
        server = ForkServer([*calls, *imports([__name__])])
        try:
            server.wait_until_ready()
        except (NotReadyError, TimeoutError) as error:
            server.close()
            details = getattr(error, "details", "")
            raise EpisodeError(
                f"The process of {', '.join(names)} did not start ({error}). A new process must be able to import it: "
                f"put code that runs as a script under `if __name__ == '__main__':`, or play in this process with "
                f"processes=False." + (f"\n{details}" if details else ""),
                code="episode.process-start",
                environment=names,
                error=error,
            ) from None
        _servers[names] = server
    return _servers[names]


@atexit.register
def close_environment_servers() -> None:
    """Terminate all processes of environments; later episodes start new ones."""
    while _servers:
        _servers.popitem()[1].close()


os.register_at_fork(after_in_child=_servers.clear)  # they belong to the parent process


def reference_of(thing: Callable[..., Any] | str) -> str:
    """The reference by which a new process imports an environment or a tool."""
    found = thing if isinstance(thing, str) else references.reference(thing)
    name = getattr(thing, "__qualname__", repr(thing))
    if found is None:
        raise ParameterError(
            f"A separate process cannot import {name}, which processes=True needs. Define it at the top level of a "
            f"module or file, or pass processes=False.",
            code="episode.not-importable",
            name=name,
        )
    if references.runs_again(found):
        file = references.source_file(found)
        raise ParameterError(
            f"To import {name} in a separate process, flowrl would run the script {file} again. Put what the script "
            f"runs under `if __name__ == '__main__':`, or pass processes=False.",
            code="episode.not-importable",
            name=name,
            path=file,
        )
    return found


class _NoReplyError(Exception):
    """What a process sent is not a reply."""


def _decoded(body: bytes) -> tuple[str, Any]:
    """What `_encoded` wrote: ``"is"`` with the result, ``"invalid"`` with a text, or ``"raised"`` with an error."""
    try:
        how, value = json.loads(body)
        if how == "raised":
            value = {"message": str(value["message"]), "code": str(value["code"]), "facts": dict(value["facts"])}
            value["facts"] = {k: v for k, v in value["facts"].items() if k not in ("self", "message", "code")}
        elif how == "invalid":
            value = str(value)
        elif how != "is":
            raise ValueError(f"it starts with {short(how)}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _NoReplyError(f"{type(error).__name__}: {error}") from error
    return how, value


def reply_of(sent: Any) -> Reply:
    """The environment's reply that a process sent; raises `EpisodeError` for anything else."""
    is_reply = isinstance(sent, list) and len(sent) == len(Reply._fields)
    return check_reply(Reply(*sent) if is_reply else sent)


class Process:
    """One forked process, which serves one call at a time."""

    def __init__(self, server: ForkServer) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                server.fork(f"{__name__}:{serve_supervised.__name__}", None, [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EpisodeError(
                    f"The process from which environments are forked has died ({error}); the system may have killed it "
                    f"for its memory. Lower Interact(concurrency=...), or give the machine more memory.",
                    code="episode.process-died",
                    error=error,
                ) from error
        self._socket: socket.socket | None = ours
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.over = False

    async def ask(self, what: str, *given: Any) -> Any:
        """The result of a call in the process; cancelling it kills the process."""
        try:
            message = pickle.dumps((what, given))
        except Exception as error:  # whatever users' objects raise
            raise EpisodeError(
                f"{short(given)} cannot be sent to the environment's process ({describe_error(error)}). Use values "
                f"that pickle supports, or pass processes=False.",
                code="episode.not-sendable",
                found=short(given),
            ) from error
        try:
            how, value = _decoded(await self._exchange(message))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.end()
            raise EpisodeError(
                "The environment's process has died: it crashed, exited, or was killed. Look for its error in the "
                "output of the run, or debug it with processes=False.",
                code="episode.process-died",
            ) from error
        except _NoReplyError as error:
            self.end()
            raise EpisodeError(
                f"The environment's process sent something that is not a reply ({error}). Find the code that writes to "
                f"sockets which it has not opened.",
                code="episode.process-died",
            ) from error
        except asyncio.CancelledError:
            self.end()
            raise
        if how == "invalid":
            raise InvalidToolCall(value)
        if how == "raised":
            raise EpisodeError(value["message"], code=value["code"], **value["facts"])
        return value

    async def _exchange(self, message: bytes) -> bytes:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._socket = None
        self._writer.write(len(message).to_bytes(_SIZE, "big") + message)
        size = int.from_bytes(await self._reader.readexactly(_SIZE), "big")
        if size > MAX_REPLY:
            raise _NoReplyError(f"it announces {size} bytes; expected at most {MAX_REPLY}")
        return await self._reader.readexactly(size)

    def end(self) -> None:
        """Kill it, and everything that it has started. Idempotent."""
        self.over = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._socket is not None:
            self._socket.close()


class ProcessEnvironment(Environment):
    """An environment in its own process."""

    def __init__(self, server: ForkServer, environment: type[Environment]) -> None:
        self._process, self._environment = Process(server), reference_of(environment)

    async def reset(self, row: Row) -> Reply:
        """Create the environment in the process and reset it."""
        return reply_of(await self._process.ask("make", self._environment, row))

    async def step(self, answer: Answer) -> Reply:
        """Call the environment's `step` in the process."""
        return reply_of(await self._process.ask("step", answer))

    async def close(self) -> None:
        """Call the environment's `close`, unless the process has died, and end the process."""
        try:
            if not self._process.over:
                await self._process.ask("close")
        finally:
            self._process.end()


async def call_tool(server: ForkServer, tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What a tool returns, as text for the policy, called in its own process."""
    process = Process(server)
    try:
        return str(await process.ask("tool", reference_of(tool.function), arguments))
    finally:
        process.end()


# ---- in the process


def serve_supervised(_: None, fds: list[int]) -> None:
    """`serve` in a worker of a fork server, with a supervisor; `fds` is the socket."""
    os.dup2(fds[0], 0)
    os.close(fds[0])
    supervise(lambda: serve(detach_stdin()))


def serve(channel: socket.socket) -> None:
    """Serve calls over a socket, until it is closed."""
    stream, owner = channel.makefile("rwb"), os.getpid()
    handler = _Handler()
    while size := stream.read(_SIZE):
        what, given = pickle.loads(stream.read(int.from_bytes(size, "big")))  # from the program that started this
        how, value = handler.call(what, given)
        if os.getpid() != owner:
            os._exit(0)  # a child that the environment has forked must not serve
        body = _encoded(how, value)
        stream.write(len(body).to_bytes(_SIZE, "big") + body)
        stream.flush()


def _encoded(how: str, value: Any) -> bytes:
    """A reply as JSON; where it cannot be one, or is too long, the error."""
    try:
        body = json.dumps([how, value], default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        why = f"A value cannot be sent from the environment's process ({describe_error(error)})"
        return _encoded("raised", _error(f"{why}. Return text, numbers, lists and dicts.", "episode.not-sendable"))
    if len(body) <= MAX_REPLY:
        return body
    text = f"The reply of the environment's process has {len(body)} bytes as JSON; expected at most {MAX_REPLY}"
    return _encoded("raised", _error(f"{text}. Shorten it.", "episode.not-sendable", size=len(body), limit=MAX_REPLY))


def _plain(value: Any) -> Any:
    """A mapping as a dict; refuses any other object."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _error(message: str, code: str, **facts: Any) -> dict[str, Any]:
    """An error, as it is sent; facts that JSON cannot represent are sent by their repr."""
    return {"message": message, "code": code, "facts": json.loads(json.dumps(facts, default=short))}


class _Handler:
    """Handles the calls in an environment's process."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()  # one, since what an environment opens belongs to its event loop
        self._environment: Any = None

    def call(self, what: str, given: tuple[Any, ...]) -> tuple[str, Any]:
        """``"is"``, ``"invalid"`` or ``"raised"``, with the result or the error."""
        try:
            return "is", getattr(self, f"_{what}")(*given)
        except InvalidToolCall as invalid:
            return "invalid", str(invalid)
        except BaseException as error:  # SystemExit too: a fault of this call
            if isinstance(error, FlowrlError):
                return "raised", _error(error.message, error.code, **error.facts)
            return "raised", _error(describe_error(error), "", error=type(error).__name__)

    def _make(self, environment: str, row: Row) -> Reply:
        seed = f"{row.row_id}/{row.attempt}"  # else all forks would draw the same numbers
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(zlib.crc32(seed.encode()))
        self._environment = references.resolve(environment)()
        return check_reply(self._awaited(self._environment.reset(row)))

    def _step(self, answer: Answer) -> Reply:
        return check_reply(self._awaited(self._environment.step(answer)))

    def _close(self) -> None:
        if self._environment is not None:
            self._awaited(self._environment.close())

    def _tool(self, reference: str, arguments: Mapping[str, Any]) -> str:
        return result_text(self._awaited(Tool(references.resolve(reference)).bound(arguments)()))

    def _awaited(self, result: Any) -> Any:
        async def waited() -> Any:
            return await result

        return self._runner.run(waited()) if inspect.isawaitable(result) else result
