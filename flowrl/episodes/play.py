"""`play`: all episodes of a batch concurrently; an episode whose environment fails is retried."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from flowrl.data.text.transcript import Check
from flowrl.episodes.calls import EndedCallError, call_user_code, describe_error, protected_loop
from flowrl.episodes.chat import Chat, EpisodeOver, Limits, set_current_chat
from flowrl.episodes.environment import Environment, Row, check_reply
from flowrl.episodes.processes import ProcessEnvironment
from flowrl.episodes.requests.broker import RequestBroker
from flowrl.episodes.requests.clock import EpisodeClock
from flowrl.episodes.tools import Toolbox
from flowrl.errors import EpisodeError, FlowrlError
from flowrl.workers.fork_server import ForkServer

Agent = Callable[[Chat, Row], Awaitable[float | None]]
"""A coroutine that plays an episode; its return value is added to the reward of the last answer."""

EnvironmentOrAgent = type[Environment] | Agent

Ended = Literal["done", "turns", "context", "segments", "failed"]


class EpisodeResult(NamedTuple):
    """An episode that is over.

    `ended` is by its environment, by its limits, or by a fault of its environment; `fault` is that of the last try.
    """

    chat: Chat
    ended: Ended
    tries: int
    fault: EpisodeError | None


@dataclass(frozen=True)
class EpisodeSetup:
    """How episodes are played.

    Args:
        environment: an environment class, of which each episode has an instance, or an agent; None ends an episode with
            the first answer that calls no tool.
        check: see `flowrl.data.text.transcript`.
        tries: how often to start an episode whose environment fails.
        concurrency: maximum number of episodes in flight; None is all.
        server: forks the processes of environments; None runs them in this process.
        others: of the further engines that episodes may ask, by name.
    """

    environment: EnvironmentOrAgent | None
    limits: Limits
    check: Check
    toolbox: Toolbox | None
    tries: int
    concurrency: int | None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    server: ForkServer | None = None
    others: Mapping[str, RequestBroker] = field(default_factory=dict)


def play(broker: RequestBroker, rows: Sequence[Row], setup: EpisodeSetup) -> list[EpisodeResult]:
    """Play an episode from each row; episodes that failed in every try carry their fault. Raises what the engine
    raises."""
    with asyncio.Runner() as runner:
        return runner.run(_play(broker, rows, setup))


async def _play(broker: RequestBroker, rows: Sequence[Row], setup: EpisodeSetup) -> list[EpisodeResult]:
    semaphore = asyncio.Semaphore(setup.concurrency or max(1, len(rows)))

    async def limited(row: Row) -> EpisodeResult:
        async with semaphore:
            return await _tried(broker, row, setup)

    loops = {id(one.loop): one.loop for one in (broker, *setup.others.values())}
    servers = [asyncio.create_task(loop.serve()) for loop in loops.values()]
    episodes = [asyncio.create_task(limited(row)) for row in rows]
    played = asyncio.gather(*episodes)
    for server in servers:
        server.add_done_callback(lambda _: played.cancel())  # a server ends only if its engine raises
    try:
        with protected_loop():
            return await played
    except asyncio.CancelledError:
        for server in servers:
            if server.done():
                await server
        raise
    finally:
        working = [loop for loop, server in zip(loops.values(), servers, strict=True) if not server.done()]
        for server in servers:
            server.cancel()
        await asyncio.gather(*servers, *episodes, return_exceptions=True)
        for loop in working:  # the error of another one is the cause
            await loop.close()


async def _tried(broker: RequestBroker, row: Row, setup: EpisodeSetup) -> EpisodeResult:
    """One episode, retried from the same row with the same random numbers if its environment fails."""
    for attempt in range(setup.tries):
        played = await _once(broker, row._replace(attempt=attempt), setup)
        if played.fault is None:
            break
    return played


async def _once(broker: RequestBroker, row: Row, setup: EpisodeSetup) -> EpisodeResult:
    fault: EpisodeError | None = None
    ended: Ended = "failed"
    clock = EpisodeClock(setup.limits.seconds, broker.environments)
    chat = Chat(broker, row, setup.limits, setup.check, setup.toolbox, clock, setup.template_kwargs, setup.others)
    set_current_chat(chat)
    try:
        async with clock:
            ended = await _episode(chat, row, setup, clock)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # by `_play`, since the batch ends
            raise
        fault = _fault(row, chat, error)
    except Exception as error:  # of users' environments; `serve` raises those of the engine
        fault = _fault(row, chat, _late(setup.limits.seconds) if clock.expired() else error)
        fault.__cause__ = error
    finally:
        chat.close()
    return EpisodeResult(chat, "failed" if fault else ended, row.attempt + 1, fault)


async def _episode(chat: Chat, row: Row, setup: EpisodeSetup, clock: EpisodeClock) -> Ended:
    source = setup.environment
    if isinstance(source, type):
        make = source if setup.server is None else partial(ProcessEnvironment, setup.server, source)
        environment = await call_user_code(make, blocks=False)
        try:
            ended = await _until_over(_by_environment(chat, row, environment))
        except BaseException as error:
            try:
                await _closed(environment, setup.limits.seconds, clock)
            except Exception as another:  # the first error is the one to fix
                error.add_note(f"and close() failed then: {describe_error(another)}")
            raise
        await _closed(environment, setup.limits.seconds, clock)
        return ended
    return await _until_over(chat.answer_by_tools() if source is None else _by_agent(chat, row, source))


async def _until_over(played: Awaitable[object]) -> Ended:
    try:
        await played
    except EpisodeOver as over:
        return over.why
    return "done"


async def _by_agent(chat: Chat, row: Row, agent: Agent) -> None:
    if (score := await call_user_code(lambda: agent(chat, row), blocks=False)) is not None:
        chat.reward(score)


async def _by_environment(chat: Chat, row: Row, environment: Environment) -> None:
    reply = check_reply(await _of(environment.reset, row))
    if reply.reward is not None:
        chat.reward(reply.reward)  # raises, since there is no answer yet
    while not reply.done:
        answer = await chat.answer_by_tools(reply.messages or None)
        reply = check_reply(await _of(environment.step, answer))
        if reply.reward is not None:
            chat.reward(reply.reward)


async def _closed(environment: Environment, seconds: float, clock: EpisodeClock) -> None:
    """Close an environment, within the time limit of a reply."""
    clock.stop()
    async with asyncio.timeout(seconds):
        await _of(environment.close)


async def _of(method: Callable[..., Any], *given: Any) -> Any:
    return await call_user_code(lambda: method(*given), blocks=not inspect.iscoroutinefunction(method))


def _late(seconds: float) -> EpisodeError:
    return EpisodeError(
        f"its environment took more than {seconds:g} s to reply. Speed up the environment, or pass a larger "
        f"Interact(timeout=...).",
        code="episode.timeout",
        seconds=seconds,
    )


def _fault(row: Row, chat: Chat, error: BaseException) -> EpisodeError:
    error = error.original if isinstance(error, EndedCallError) else error
    inner = error if isinstance(error, FlowrlError) and error.code else None
    code = "episode.environment-failed" if inner is None else inner.code
    facts = dict(error.facts) if isinstance(error, FlowrlError) else {"error": type(error).__name__}
    fix = ". Fix the environment, or pass Interact(failed='leave') to mask such rows." if inner is None else ""
    fault = EpisodeError(
        f"The episode of row {row.row_id!r} failed after {len(chat.rewards)} answers, in try {row.attempt + 1}: "
        f"{describe_error(error)}{fix}",
        code=code,
        **facts | {"row": row.row_id, "answers": len(chat.rewards), "attempt": row.attempt + 1},
    )
    fault.__cause__ = error
    return fault
