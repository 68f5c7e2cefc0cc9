"""The time limit of an environment, around its requests to an engine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from flowrl.data.waits import WaitRecorder
from flowrl.episodes import Chat, Row
from flowrl.episodes.chat import Limits
from flowrl.episodes.play import EpisodeSetup, play
from flowrl.episodes.requests.broker import RequestBroker
from flowrl.episodes.requests.clock import EpisodeClock
from flowrl.errors import DataError
from tests.episodes.scripted import KEY, NAME, SAMPLING, Scripted, row, say
from tests.support.templates import tokenizer_of


class Refusing(Scripted):
    def submit(self, request: Any) -> None:
        raise DataError("The model has 100 positions.", code="engine.prompt-too-long")


def test_an_environment_that_hangs_after_a_refused_request_is_late() -> None:
    async def agent(chat: Chat, row: Row) -> None:
        with contextlib.suppress(DataError):
            await chat.answer()
        await asyncio.Event().wait()

    tokenizer = tokenizer_of(NAME)
    broker = RequestBroker(Refusing(say, tokenizer), tokenizer, SAMPLING, KEY)
    (result,) = play(broker, [row(0)], EpisodeSetup(agent, Limits(4, 1000, 0.01), "strict", None, 1, None))
    assert result.fault is not None and result.fault.code == "episode.timeout"


@pytest.mark.parametrize("late", [False, True])
def test_waits_end_with_the_episode(late: bool) -> None:
    """Also if a request is in flight that nothing awaits."""
    waits = WaitRecorder("environments")

    async def episode() -> None:
        clock = EpisodeClock(10.0, waits)
        async with clock:
            request = clock.paused()
            request.__enter__()
            if not late:
                request.__exit__(None, None, None)
        if late:
            request.__exit__(None, None, None)

    asyncio.run(episode())
    waits.begin()
    waits.end()
    assert waits._open == 0
