"""Environments and tools in processes of their own, which are killed when their time is over; a thread cannot be.

Each episode's environment lives in one process, and each call of a tool has one; they split off from a `stem`, which
has imported the world and lives as long as the program. Nothing that they start outlives them: see `flowrl.keeper`.
"""

# Why not `concurrent.futures` or `multiprocessing`? See `flowrl.operators.reward.pool`. Its workers import in their own
# time what one call needs, and so many episodes need a process each at once that these have to split off.

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
from pathlib import Path
from typing import Any

from flowrl import keeper
from flowrl.core import references
from flowrl.episodes.calls import told
from flowrl.episodes.environment import Answer, Environment, Reply, Row, checked, short
from flowrl.episodes.tools import Misfit, Tool
from flowrl.errors import EpisodeError, ParameterError

START_LIMIT = 300.0
"""Seconds allowed for importing the world."""

_SIZE = 8
"""Bytes that say how long a message is."""


class Stem:
    """The process that others split off from.

    Args:
        names: of environments and tools that it imports beforehand, such as ``"triage.py:Triage"``.

    Raises:
        EpisodeError: it cannot be started, or an import raised.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._process, self._channel = keeper.start(str(Path(__file__).with_name("stem.py")))
        job = {"path": sys.path, "references": names}
        self._channel.settimeout(START_LIMIT)
        try:
            self._channel.sendall(json.dumps(job).encode() + b"\n")
            with self._channel.makefile("rb") as answers:
                answer = json.loads(answers.readline() or b'{"what": "its process ended"}')
        except TimeoutError:
            answer = {"what": f"the import took more than {START_LIMIT:g} s"}
        if answer:
            self.end()
            details = f"\n{answer['traceback'].rstrip()}" if answer.get("traceback") else ""
            raise EpisodeError(
                f"a process for {', '.join(names)} could not be started ({answer['what']}). Expected what "
                f"a fresh process can import by itself: put what runs as a script under `if __name__ == '__main__':`, "
                f"or play in this process: processes=False.{details}"
            )

    @property
    def alive(self) -> bool:
        """Whether more can split off."""
        return self._process.poll() is None

    def split(self) -> socket.socket:
        """The other end of a new process's socket.

        Raises:
            EpisodeError: the stem is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._channel, [b"."], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EpisodeError(
                    f"the process that those of the world split off from is gone ({error}); it may have been killed "
                    f"for its memory."
                ) from error
        return ours

    def end(self) -> None:
        """End it, and with it all that has split off."""
        self._channel.close()
        self._process.wait()


_stems: dict[tuple[str, ...], Stem] = {}


def stem_of(names: tuple[str, ...]) -> Stem:
    """The stem that has imported these, which is started where there is none.

    Raises:
        EpisodeError: as `Stem`.
    """
    if names in _stems and not _stems[names].alive:
        _stems.pop(names).end()
    if names not in _stems:
        _stems[names] = Stem(names)
    return _stems[names]


@atexit.register
def end_stems() -> None:
    """End all processes of worlds; later episodes start fresh ones."""
    while _stems:
        _stems.popitem()[1].end()


os.register_at_fork(after_in_child=_stems.clear)  # a process that we fork has no part in them


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
    """One process that has split off, and is asked for one thing after the other."""

    def __init__(self, from_stem: Stem) -> None:
        self._socket: socket.socket | None = from_stem.split()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.over = False

    async def ask(self, what: str, *given: Any) -> Any:
        """What it answers. Whoever gives up waiting has ended it.

        Raises:
            Misfit: of a tool.
            EpisodeError: what it did raised; it has ended; or what is sent cannot be.
        """
        try:
            message = pickle.dumps((what, given))
        except Exception as error:  # whatever users' objects raise
            raise EpisodeError(f"{short(given)} cannot be sent to the world's process ({told(error)}).") from error
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
            raise Misfit(value)
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

    def __init__(self, from_stem: Stem, world: type[Environment]) -> None:
        self._process, self._world = Process(from_stem), reference_of(world)

    async def reset(self, row: Row) -> Reply:
        """That of the environment, which is made then."""
        return checked(await self._process.ask("make", self._world, row))

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


async def call_tool(from_stem: Stem, tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """What a tool returns, called in a process of its own.

    Raises:
        Misfit: it takes other arguments.
        EpisodeError: it raised, or its process ended.
    """
    process = Process(from_stem)
    try:
        return await process.ask("tool", reference_of(tool.function), arguments)
    finally:
        process.end()


# ---- in the process


def serve(channel: socket.socket) -> None:
    """Do what is asked for over a socket, until it is closed."""
    stream, owner = channel.makefile("rwb"), os.getpid()
    does = _Does()
    while size := stream.read(_SIZE):
        what, given = pickle.loads(stream.read(int.from_bytes(size, "big")))
        how, value = does.answer(what, given)
        if os.getpid() != owner:
            os._exit(0)  # the world has forked it, and it came here, too
        try:
            message = pickle.dumps((how, value))
        except Exception as error:
            message = pickle.dumps(("raised", f"{short(value)} cannot be sent to another process ({told(error)})"))
        stream.write(len(message).to_bytes(_SIZE, "big") + message)
        stream.flush()


class _Does:
    """What a process of the world does."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()  # one, since what an environment opens belongs to its loop
        self._environment: Any = None

    def answer(self, what: str, given: tuple[Any, ...]) -> tuple[str, Any]:
        """How it went, and what came of it."""
        try:
            return "is", getattr(self, f"_{what}")(*given)
        except Misfit as misfit:
            return "misfit", str(misfit)
        except BaseException as error:  # SystemExit, too: it is the fault of this call
            return "raised", told(error)

    def _make(self, world: str, row: Row) -> Reply:
        seed = f"{row.row_id}/{row.attempt}"  # else all would draw the same, since they come of one process
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(zlib.crc32(seed.encode()))
        self._environment = references.resolve(world)()
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
