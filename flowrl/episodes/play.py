"""`play`: all episodes of a batch at once, each tried again where its environment fails."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from flowrl.data.text.transcript import Check
from flowrl.episodes.calls import called, told
from flowrl.episodes.chat import Chat, EpisodeOver, Limits, RequestBroker
from flowrl.episodes.environment import Environment, Row, checked
from flowrl.episodes.processes import Apart
from flowrl.episodes.tools import Toolbox
from flowrl.errors import EpisodeError
from flowrl.workers.fork_server import ForkServer

Agent = Callable[[Chat, Row], Awaitable[float | None]]
"""A coroutine that plays an episode; what it returns is added to the reward of the last answer."""

EnvironmentOrAgent = type[Environment] | Agent

Ended = Literal["done", "turns", "context", "failed"]


class EpisodeResult(NamedTuple):
    """An episode that is over.

    Args:
        chat: with its tokens, rewards and counts.
        ended: by its environment, by its limits, or by a fault of its environment.
        tries: how often it was begun.
        fault: of the last try, where that failed.
    """

    chat: Chat
    ended: Ended
    tries: int
    fault: EpisodeError | None


@dataclass(frozen=True)
class EpisodeSetup:
    """How episodes are played.

    Args:
        environment: an environment, whose instances each play one, or an agent; None ends an episode with the first
            answer that calls no tool.
        limits: how long one may get.
        check: see `flowrl.data.text.transcript`.
        toolbox: what the policy may call.
        tries: how often one is begun whose environment fails.
        concurrency: how many are under way at a time; None is all.
        template_kwargs: arguments of the chat template.
        server: forks the processes of environments; None plays them in this process.
    """

    environment: EnvironmentOrAgent | None
    limits: Limits
    check: Check
    toolbox: Toolbox | None
    tries: int
    concurrency: int | None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    server: ForkServer | None = None


def play(desk: RequestBroker, rows: Sequence[Row], stage: EpisodeSetup) -> list[EpisodeResult]:
    """Play an episode from each row; what failed in all tries is there with its fault.

    Raises:
        what the engine raises.
    """
    return asyncio.run(_play(desk, rows, stage))


async def _play(desk: RequestBroker, rows: Sequence[Row], stage: EpisodeSetup) -> list[EpisodeResult]:
    places = asyncio.Semaphore(stage.concurrency or max(1, len(rows)))

    async def placed(row: Row) -> EpisodeResult:
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


async def _tried(desk: RequestBroker, row: Row, stage: EpisodeSetup) -> EpisodeResult:
    """One episode, begun again where its environment fails: from the same row, by the same random numbers."""
    for attempt in range(stage.tries):
        played = await _once(desk, row._replace(attempt=attempt), stage)
        if played.fault is None:
            break
    return played


async def _once(desk: RequestBroker, row: Row, stage: EpisodeSetup) -> EpisodeResult:
    fault: EpisodeError | None = None
    ended: Ended = "failed"
    clock = asyncio.timeout(stage.limits.seconds)
    chat = Chat(desk, row, stage.limits, stage.check, stage.toolbox, clock, stage.template_kwargs)
    try:
        async with clock:
            ended = await _episode(chat, row, stage)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # by `_play`, since all is over
            raise
        fault = _fault(row, chat, told(error), error)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever users' environments raise; errors of the engine do not come this way
        late = (
            f"its environment took more than {stage.limits.seconds:g} s; expected a reply within that time: fix what "
            f"takes so long, or allow more: Interact(timeout=...)"
        )
        fault = _fault(row, chat, late if clock.expired() else told(error), error)
    finally:
        desk.leave(row.row_id)
    return EpisodeResult(chat, "failed" if fault else ended, row.attempt + 1, fault)


async def _episode(chat: Chat, row: Row, stage: EpisodeSetup) -> Ended:
    source = stage.environment
    if isinstance(source, type):
        environment = source() if stage.server is None else Apart(stage.server, source)
        try:
            ended = await _until_over(_by_environment(chat, row, environment))
        except BaseException as error:
            try:
                await _closed(chat, environment)
            except Exception as another:  # the first is what is to be mended
                error.add_note(f"and close() failed then: {told(another)}")
            raise
        await _closed(chat, environment)
        return ended
    return await _until_over(chat.answer_by_tools() if source is None else _by_agent(chat, row, source))


async def _until_over(played: Awaitable[object]) -> Ended:
    try:
        await played
    except EpisodeOver as over:
        return "turns" if over.why == "turns" else "context"
    return "done"


async def _by_agent(chat: Chat, row: Row, agent: Agent) -> None:
    if (score := await agent(chat, row)) is not None:
        chat.reward(score)


async def _by_environment(chat: Chat, row: Row, environment: Environment) -> None:
    reply = checked(await _of(environment.reset, row))
    if reply.reward is not None:
        chat.reward(reply.reward)  # which says that there is no answer to be rewarded yet
    while not reply.done:
        answer = await chat.answer_by_tools(reply.messages or None)
        reply = checked(await _of(environment.step, answer))
        if reply.reward is not None:
            chat.reward(reply.reward)


async def _closed(chat: Chat, environment: Environment) -> None:
    """Close an environment, which has as long for it as for a reply."""
    chat.stop_clock()
    async with asyncio.timeout(chat.limits.seconds):
        await _of(environment.close)


async def _of(method: Callable[..., Any], *given: Any) -> Any:
    return await called(lambda: method(*given), blocks=not inspect.iscoroutinefunction(method))


def _fault(row: Row, chat: Chat, what: str, cause: BaseException) -> EpisodeError:
    error = EpisodeError(
        f"the episode of row {row.row_id!r} failed after {len(chat.rewards)} answers, in try {row.attempt + 1}: {what}"
    )
    error.__cause__ = cause
    return error
