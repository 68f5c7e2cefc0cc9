"""`play`: all episodes of a batch at once, each tried again where its world fails."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.data.transcript import Check
from flowrl.episodes.chat import Chat, Desk, EpisodeOver, Limits, called
from flowrl.episodes.environment import Environment, Reply, Row
from flowrl.episodes.tools import Toolbox
from flowrl.errors import EpisodeError, FlowrlError

_OWN = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
"""Where frames are not the world's."""

Agent = Callable[[Chat, Row], Awaitable[float | None]]
"""A coroutine that plays an episode; what it returns is added to the reward of the last answer."""

World = type[Environment] | Agent

Ended = Literal["done", "turns", "context", "failed"]


class Played(NamedTuple):
    """An episode that is over.

    Args:
        chat: with its tokens, rewards and counts.
        ended: by its world, by its limits, or by a fault of its world.
        tries: how often it was begun.
        fault: of the last try, where that failed.
    """

    chat: Chat
    ended: Ended
    tries: int
    fault: EpisodeError | None


@dataclass(frozen=True)
class Stage:
    """How episodes are played.

    Args:
        world: an environment, whose instances each play one, or an agent; None ends an episode with the first answer
            that calls no tool.
        limits: how long one may get.
        check: see `flowrl.data.transcript`.
        toolbox: what the policy may call.
        tries: how often one is begun whose world fails.
        concurrency: how many are under way at a time; None is all.
    """

    world: World | None
    limits: Limits
    check: Check
    toolbox: Toolbox | None
    tries: int
    concurrency: int | None


def play(desk: Desk, rows: Sequence[Row], stage: Stage) -> list[Played]:
    """Play an episode from each row; what failed in all tries is there with its fault.

    Raises:
        what the engine raises.
    """
    return asyncio.run(_play(desk, rows, stage))


async def _play(desk: Desk, rows: Sequence[Row], stage: Stage) -> list[Played]:
    places = asyncio.Semaphore(stage.concurrency or max(1, len(rows)))

    async def placed(row: Row) -> Played:
        async with places:
            return await _tried(desk, row, stage)

    server = asyncio.create_task(desk.serve())
    episodes = [asyncio.create_task(placed(row)) for row in rows]
    played = asyncio.gather(*episodes)
    server.add_done_callback(lambda _: played.cancel())  # which ends by an error of the engine's alone
    try:
        return await played
    except asyncio.CancelledError:
        if server.done():
            await server
        raise
    finally:
        server.cancel()
        await asyncio.gather(server, *episodes, return_exceptions=True)


async def _tried(desk: Desk, row: Row, stage: Stage) -> Played:
    """One episode, begun again where its world fails: from the same row, by the same random numbers."""
    for attempt in range(stage.tries):
        played = await _once(desk, row._replace(attempt=attempt), stage)
        if played.fault is None:
            break
    return played


async def _once(desk: Desk, row: Row, stage: Stage) -> Played:
    fault: EpisodeError | None = None
    ended: Ended = "done"
    clock = asyncio.timeout(stage.limits.seconds)
    chat = Chat(desk, row, stage.limits, stage.check, stage.toolbox, clock)
    try:
        async with clock:
            try:
                await _episode(chat, row, stage.world)
            except EpisodeOver as over:
                ended = "turns" if over.why == "turns" else "context"
    except Exception as error:  # whatever users' worlds raise; errors of the engine do not come this way
        said = str(error) if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}{_where(error)}"
        if clock.expired():
            said = f"its world took more than {stage.limits.seconds:g} s"
        ended, fault = "failed", _fault(row, chat, said, error)
    finally:
        desk.leave(row.row_id)
    return Played(chat, ended, row.attempt + 1, fault)


async def _episode(chat: Chat, row: Row, world: World | None) -> None:
    if world is None:
        await chat.answer_by_tools()
    elif isinstance(world, type):
        environment = world()
        try:
            await _by_environment(chat, row, environment)
        finally:
            async with asyncio.timeout(chat.limits.seconds):
                await _of(environment.close)
    elif (score := await world(chat, row)) is not None:
        chat.reward(score)


async def _by_environment(chat: Chat, row: Row, environment: Environment) -> None:
    reply = _checked(await _of(environment.reset, row))
    while not reply.done:
        answer = await chat.answer_by_tools(reply.messages or None)
        reply = _checked(await _of(environment.step, answer))
        if reply.reward is not None:
            chat.reward(reply.reward)


async def _of(method: Callable[..., Any], *given: Any) -> Any:
    return await called(lambda: method(*given), blocks=not inspect.iscoroutinefunction(method))


def _checked(reply: object) -> Reply:
    if not isinstance(reply, Reply):
        raise EpisodeError(f"an environment replied {reply!r}; expected a Reply(messages, reward=None, done=False).")
    return reply


def _where(error: BaseException) -> str:
    """Where in the world's own code an error was raised, as far as that is known."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _fault(row: Row, chat: Chat, what: str, cause: BaseException) -> EpisodeError:
    error = EpisodeError(
        f"the episode of row {row.row_id!r} failed after {len(chat.rewards)} answers, in try {row.attempt + 1}: {what}"
    )
    error.__cause__ = cause
    return error
