"""Environments and tools in processes of their own, which are killed when their time is over; a thread cannot be.

Each episode's environment lives in one process, and each call of a tool has one. They are forked from a `ForkServer`
that has imported the environment and lives as long as the program. Nothing that they start outlives them: see
`flowrl.workers.supervisor`.
"""

# Why not `concurrent.futures` or `multiprocessing`? See `flowrl.operators.reward.pool`. Its workers import in their own
# time what one call needs, and so many episodes need a process each at once that these have to be forked.

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import pickle
import random
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.core.operators import references
from flowrl.episodes.calls import told
from flowrl.episodes.environment import Answer, Environment, Reply, Row, checked, short
from flowrl.episodes.tools import InvalidToolCall, Tool
from flowrl.errors import EpisodeError, ParameterError
from flowrl.workers.fork_server import ForkServer, NotReadyError, imports
from flowrl.workers.fork_server_process import detach_stdin
from flowrl.workers.supervisor import supervise

_SIZE = 8
"""Bytes that say how long a message is."""


_servers: dict[tuple[str, ...], ForkServer] = {}


def environment_server(names: tuple[str, ...]) -> ForkServer:
    """The server whose workers have imported these environments and tools; started where there is none.

    Args:
        names: references, such as ``"triage.py:Triage"``.

    Raises:
        EpisodeError: it cannot be started, or an import raised.
    """
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
                f"a process for {', '.join(names)} could not be started ({error}). Expected what "
                f"a fresh process can import by itself: put what runs as a script under `if __name__ == '__main__':`, "
                f"or play in this process: processes=False." + (f"\n{details}" if details else "")
            ) from None
        _servers[names] = server
    return _servers[names]


@atexit.register
def close_environment_servers() -> None:
    """Terminate all processes of environments; later episodes start new ones."""
    while _servers:
        _servers.popitem()[1].close()


os.register_at_fork(after_in_child=_servers.clear)  # a process that we fork has no part in them


def reference_of(thing: Callable[..., Any] | str) -> str:
    """Where a fresh process finds an environment or a tool.

    Raises:
        ParameterError: nowhere, or only by running the script again that runs now.
    """
    found = thing if isinstance(thing, str) else references.reference(thing)
    name = getattr(thing, "__qualname__", repr(thing))
    if found is None:
        raise ParameterError(
            f"{name} would be played in another process, which cannot import it; define it at the top level of a "
            f"module or file, or play it in this process: processes=False"
        )
    if references.runs_again(found):
        raise ParameterError(
            f"{name} would be played in another process, and importing it from {references.source_file(found)} would "
            f"run that script again; put what it runs under `if __name__ == '__main__':`, or play in this process: "
            f"processes=False"
        )
    return found


class Process:
    """One forked process, which does one thing after the other.

    Args:
        server: forks it.

    Raises:
        EpisodeError: the server is gone.
    """

    def __init__(self, server: ForkServer) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                server.fork(f"{__name__}:{serve_supervised.__name__}", None, [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EpisodeError(
                    f"the process that the environment's processes are forked from is gone ({error}); it may have been "
                    f"killed for its memory."
                ) from error
        self._socket: socket.socket | None = ours
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.over = False

    async def ask(self, what: str, *given: Any) -> Any:
        """What it answers. Whoever gives up waiting has ended it.

        Raises:
            InvalidToolCall: of a tool.
            EpisodeError: what it did raised; it has ended; or what is sent cannot be.
        """
        try:
            message = pickle.dumps((what, given))
        except Exception as error:  # whatever users' objects raise
            raise EpisodeError(
                f"{short(given)} cannot be sent to the environment's process ({told(error)})."
            ) from error
        try:
            how, value = pickle.loads(await self._exchange(message))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.end()
            raise EpisodeError("the process that it lives in has ended: it crashed, was killed, or left.") from error
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError) as error:
            self.end()
            raise EpisodeError(f"what its process sent cannot be read here ({told(error)}).") from error
        except asyncio.CancelledError:
            self.end()
            raise
        if how == "misfit":
            raise InvalidToolCall(value)
        if how == "raised":
            raise EpisodeError(value)
        return value

    async def _exchange(self, message: bytes) -> bytes:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._socket = None
        self._writer.write(len(message).to_bytes(_SIZE, "big") + message)
        size = int.from_bytes(await self._reader.readexactly(_SIZE), "big")
        return await self._reader.readexactly(size)

    def end(self) -> None:
        """Kill it, and all that it has started, if it is there still."""
        self.over = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._socket is not None:
            self._socket.close()


class Apart(Environment):
    """An environment in a process of its own."""

    def __init__(self, server: ForkServer, environment: type[Environment]) -> None:
        self._process, self._environment = Process(server), reference_of(environment)

    async def reset(self, row: Row) -> Reply:
        """That of the environment, which is made then."""
        return checked(await self._process.ask("make", self._environment, row))

    async def step(self, answer: Answer) -> Reply:
        """That of the environment."""
        return checked(await self._process.ask("step", answer))

    async def close(self) -> None:
        """That of the environment, where it is still there; and the end of its process."""
        try:
            if not self._process.over:
                await self._process.ask("close")
        finally:
            self._process.end()


async def call_tool(server: ForkServer, tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """What a tool returns, called in a process of its own.

    Raises:
        InvalidToolCall: it takes other arguments.
        EpisodeError: it raised, or its process ended.
    """
    process = Process(server)
    try:
        return await process.ask("tool", reference_of(tool.function), arguments)
    finally:
        process.end()


# ---- in the process


def serve_supervised(_: None, fds: list[int]) -> None:
    """`serve` in a worker of a fork server, with a supervisor.

    Args:
        fds: the socket.
    """
    os.dup2(fds[0], 0)
    os.close(fds[0])
    supervise(lambda: serve(detach_stdin()))


def serve(channel: socket.socket) -> None:
    """Do what is asked for over a socket, until it is closed."""
    stream, owner = channel.makefile("rwb"), os.getpid()
    does = _Does()
    while size := stream.read(_SIZE):
        what, given = pickle.loads(stream.read(int.from_bytes(size, "big")))
        how, value = does.answer(what, given)
        if os.getpid() != owner:
            os._exit(0)  # the environment has forked it, and it came here, too
        try:
            message = pickle.dumps((how, value))
        except Exception as error:
            message = pickle.dumps(("raised", f"{short(value)} cannot be sent to another process ({told(error)})"))
        stream.write(len(message).to_bytes(_SIZE, "big") + message)
        stream.flush()


class _Does:
    """What a process of the environment does."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()  # one, since what an environment opens belongs to its loop
        self._environment: Any = None

    def answer(self, what: str, given: tuple[Any, ...]) -> tuple[str, Any]:
        """How it went, and what came of it."""
        try:
            return "is", getattr(self, f"_{what}")(*given)
        except InvalidToolCall as misfit:
            return "misfit", str(misfit)
        except BaseException as error:  # SystemExit, too: it is the fault of this call
            return "raised", told(error)

    def _make(self, environment: str, row: Row) -> Reply:
        seed = f"{row.row_id}/{row.attempt}"  # else all would draw the same, since they come of one process
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(zlib.crc32(seed.encode()))
        self._environment = references.resolve(environment)()
        return checked(self._finished(self._environment.reset(row)))

    def _step(self, answer: Answer) -> Reply:
        return checked(self._finished(self._environment.step(answer)))

    def _close(self) -> None:
        if self._environment is not None:
            self._finished(self._environment.close())

    def _tool(self, reference: str, arguments: Mapping[str, Any]) -> Any:
        return self._finished(Tool(references.resolve(reference)).bound(arguments)())

    def _finished(self, result: Any) -> Any:
        async def waited() -> Any:
            return await result

        return self._runner.run(waited()) if inspect.isawaitable(result) else result
