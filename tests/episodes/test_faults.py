"""Environments that fail: each is named, tried again, closed, and takes nothing from the others."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.episodes.environment import Answer, Environment, Reply, Row
from flowrl.protocols.protocols import Request
from tests.episodes import scripted
from tests.episodes.scripted import Scripted, Three, played, say


def raised(error: BaseException) -> Any:
    raise error


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C is heard, which a shell lets whatever it runs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestFaults:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
            (lambda: "a text", "an environment replied 'a text'; expected a Reply"),
            (lambda: Reply("x", reward=float("nan")), "a reward is nan, a float; expected a finite number"),
            (lambda: Reply("x", reward="1"), "a reward is '1', a str; expected a finite number"),  # type: ignore[arg-type]
            (
                lambda: Reply("x", reward=True),
                "a reward is True, a bool; expected a finite number, an int or a float: fl",
            ),
            (lambda: Reply(), "nothing was said to the last one; expected something to answer: Reply('...')"),
            (lambda: Reply([{"content": "x"}]), 'expected "role"'),
            (lambda: raised(TimeoutError("theirs")), "TimeoutError: theirs"),
            (lambda: raised(SystemExit(2)), "SystemExit: 2 (at "),
            (lambda: raised(asyncio.CancelledError()), "CancelledError (at "),
            (lambda: Reply(5), "replied with the messages 5; expected a Reply"),  # type: ignore[arg-type]
            (lambda: Reply("x", done="no"), "replied with done='no'; expected a Reply"),  # type: ignore[arg-type]
            (lambda: Reply([{"role": "assistant", "content": "x"}]), "what the assistant says is the policy's"),
            (lambda: "x" * 10_000, "x... (10002 characters); expected a Reply"),
        ],
    )
    def test_what_is_wrong_is_said(self, wrong: Any, said: str) -> None:
        class Wrong(Environment):
            async def step(self, answer: Answer) -> Reply:
                reply: Reply = wrong()
                return reply

        (one,), _ = played(Wrong, say)
        assert one.ended == "failed" and one.fault is not None
        assert "row 'row-0' failed after 1 answers, in try 1" in str(one.fault) and said in str(one.fault)

    def test_before_any_answer_there_is_nothing_to_reward(self) -> None:
        class Early(Three):
            async def reset(self, row: Row) -> Reply:
                return Reply(row.messages, reward=1.0)

        (one,), _ = played(Early, say)
        assert one.ended == "failed" and "a reward of 1.0 is given before any answer" in str(one.fault)

    @pytest.mark.parametrize("error", [SystemExit(2), StopIteration("over"), KeyError("key"), GeneratorExit()])
    def test_what_a_plain_function_raises_is_a_fault_too(self, error: BaseException) -> None:
        class Raises(Environment):
            def step(self, answer: Answer) -> Reply:  # type: ignore[override]
                raise error

        (one,), _ = played(Raises, say)
        assert one.ended == "failed" and type(error).__name__ in str(one.fault)

    def test_the_first_error_is_told_and_that_of_close_with_it(self) -> None:
        class Twice(Environment):
            async def step(self, answer: Answer) -> Reply:
                raise OSError("first")

            async def close(self) -> None:
                raise ValueError("second")

        (one,), _ = played(Twice, say)
        assert one.fault is not None and "OSError: first" in str(one.fault)
        cause = one.fault.__cause__
        assert cause is not None and cause.__notes__[0].startswith("and close() failed then: ValueError: second (at ")

    @pytest.mark.parametrize("turns", [1, 4])
    def test_a_close_that_fails_is_a_fault_however_the_episode_ended(self, turns: int) -> None:
        class Unclosed(Three):
            async def close(self) -> None:
                raise ValueError("planted")

        (one,), _ = played(Unclosed, say, turns=turns)
        assert one.ended == "failed" and "ValueError: planted" in str(one.fault)

    def test_to_close_takes_time_of_its_own(self) -> None:
        class Late(Three):
            async def step(self, answer: Answer) -> Reply:
                await asyncio.sleep(0.2)
                return Reply(done=True, reward=1.0)

            async def close(self) -> None:
                await asyncio.sleep(0.2)

        (one,), _ = played(Late, say, seconds=0.3)
        assert (one.ended, one.fault) == ("done", None)

    def test_it_is_tried_again_from_the_same_row_by_the_same_draws(self) -> None:
        begun: list[int] = []

        class Second(Environment):
            async def reset(self, row: Row) -> Reply:
                begun.append(row.attempt)
                self.attempt = row.attempt
                return Reply(row.messages)

            async def step(self, answer: Answer) -> Reply:
                if self.attempt == 0 and answer.turn == 1:
                    raise ConnectionError("gone")
                return Reply("on", reward=1.0, done=answer.turn == 1)

        (one,), engine = played(Second, say, tries=3)
        assert (one.ended, one.tries, one.fault, begun) == ("done", 2, None, [0, 1])
        assert one.chat.rewards == [1.0, 1.0]
        first, second = engine.requests[:2], engine.requests[2:]
        assert [request.key for request in first] == [request.key for request in second]
        assert [request.ids for request in first] == [request.ids for request in second]

    def test_each_episode_has_an_environment_of_its_own_which_is_closed(self) -> None:
        made: list[Environment] = []
        closed: list[Environment] = []

        class Counted(Three):
            def __init__(self) -> None:
                made.append(self)

            async def step(self, answer: Answer) -> Reply:
                if len(made) % 2:
                    raise RuntimeError("planted")
                return await super().step(answer)

            async def close(self) -> None:
                closed.append(self)

        played(Counted, say, count=4, tries=2)
        assert len(set(map(id, made))) == len(made) == len(closed)
        assert {*map(id, made)} == {*map(id, closed)}

    def test_planted_faults_take_nothing_from_the_others(self) -> None:
        class Flaky(Three):
            async def reset(self, row: Row) -> Reply:
                self.fails = row.ground_truth % 20 == 0
                return Reply(row.messages)

            async def step(self, answer: Answer) -> Reply:
                if self.fails and answer.turn == 1:
                    raise OSError("planted")
                return await super().step(answer)

        episodes, _ = played(Flaky, say, count=400)
        assert [i for i, one in enumerate(episodes) if one.fault] == list(range(0, 400, 20))
        assert all(one.chat.rewards == [0.0, 1.0, 2.0] for one in episodes if not one.fault)

    def test_what_it_leaves_behind_ends_with_the_batch(self) -> None:
        ended: list[str] = []

        class Leaks(Three):
            async def reset(self, row: Row) -> Reply:
                self.task = asyncio.create_task(self.forever(row.row_id))
                return Reply(row.messages)

            async def forever(self, name: str) -> None:
                try:
                    await asyncio.sleep(1000)
                finally:
                    ended.append(name)

        before = set(threading.enumerate())
        episodes, _ = played(Leaks, say, count=3)
        assert [one.ended for one in episodes] == ["done"] * 3
        assert sorted(ended) == ["row-0", "row-1", "row-2"]
        assert set(threading.enumerate()) == before

    @pytest.mark.usefixtures("interrupts")
    def test_an_interrupt_ends_all_and_closes_every_environment(self) -> None:
        opened: list[Any] = []
        closed: list[Any] = []

        class Interrupts(Three):
            async def reset(self, row: Row) -> Reply:
                opened.append(self)
                return Reply(row.messages)

            async def step(self, answer: Answer) -> Reply:
                if answer.turn == 1:
                    signal.raise_signal(signal.SIGINT)
                return await super().step(answer)

            async def close(self) -> None:
                closed.append(self)

        engines: list[Scripted] = []
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(scripted, "Scripted", lambda *given: engines.append(Scripted(*given)) or engines[0])
            played(Interrupts, say, count=4)
        assert {*map(id, opened)} == {*map(id, closed)} and len(opened) == 4
        assert {*engines[0].dropped} == {f"row-{i}" for i in range(4)}

    def test_a_fault_of_the_engine_ends_all(self) -> None:
        class Breaks(Scripted):
            def submit(self, request: Request) -> None:
                if len(self.requests) == 4:
                    raise MemoryError("planted")
                super().submit(request)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="planted"):
            patch.setattr(scripted, "Scripted", Breaks)
            played(Three, say, count=3)
