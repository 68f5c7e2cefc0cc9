"""Tests of faults in `environment.py` and `calls.py`: the error names the row; flowrl retries and closes the episode.

The other episodes are not affected.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes.environment import Answer, Environment, Reply, Row
from flowrl.episodes.play import EpisodeResult
from flowrl.errors import EpisodeError
from flowrl.protocols.protocols import Request
from tests.episodes import scripted
from tests.episodes.scripted import Scripted, Three, played, say


def raised(error: BaseException) -> Any:
    raise error


class Unreadable(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


def nested(depth: int) -> Any:
    """A list in a list, and so on."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def fault_of(wrong: Any) -> EpisodeError:
    """The fault of an episode whose environment replies with what `wrong` returns."""

    class Wrong(Environment):
        async def step(self, answer: Answer) -> Reply:
            reply: Reply = wrong()
            return reply

    (one,), _ = played(Wrong, say)
    assert one.ended == "failed" and one.fault is not None
    return one.fault


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Handle SIGINT, which background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestFaults:
    @pytest.mark.parametrize(
        ("wrong", "code", "facts"),
        [
            (lambda: 1 / 0, "episode.environment-failed", {"error": "ZeroDivisionError"}),
            (lambda: "a text", "episode.invalid-reply", {"found": "'a text'"}),
            (lambda: Reply("x", reward=float("nan")), "episode.invalid-reward", {"found": "nan"}),
            (lambda: Reply("x", reward="1"), "episode.invalid-reward", {"found": "'1'"}),  # type: ignore[arg-type]
            (lambda: Reply("x", reward=True), "episode.invalid-reward", {"found": "True"}),
            (lambda: Reply(), "episode.no-reply", {"answers": 1}),
            (lambda: raised(TimeoutError("planted")), "episode.environment-failed", {"error": "TimeoutError"}),
            (lambda: raised(SystemExit(2)), "episode.environment-failed", {"error": "SystemExit"}),
            (lambda: raised(asyncio.CancelledError()), "episode.environment-failed", {"error": "CancelledError"}),
            (lambda: raised(KeyboardInterrupt()), "episode.environment-failed", {"error": "KeyboardInterrupt"}),
            (lambda: raised(GeneratorExit()), "episode.environment-failed", {"error": "GeneratorExit"}),
            (
                lambda: raised(BaseExceptionGroup("two", [SystemExit(2), ValueError()])),
                "episode.environment-failed",
                {"error": "BaseExceptionGroup"},
            ),
            (lambda: raised(Unreadable()), "episode.environment-failed", {"error": "Unreadable"}),
            (lambda: asyncio.get_running_loop().stop(), "episode.environment-failed", {"error": "RuntimeError"}),
            (lambda: Reply("x", reward=1e300), "episode.invalid-reward", {"found": "1e+300"}),
            (lambda: nested(100_000), "episode.invalid-reply", {}),
            (lambda: Reply([5]), "tokenizer.bad-messages", {"found": "5"}),  # type: ignore[list-item]
            (lambda: Reply(nested(200)), "episode.invalid-reply", {"field": "messages", "limit": 100}),
            (lambda: Reply("\ud800"), "tokenizer.not-encodable", {}),
            (lambda: Reply(5), "episode.invalid-reply", {"field": "messages", "found": "5"}),  # type: ignore[arg-type]
            (lambda: Reply("x", done="no"), "episode.invalid-reply", {"field": "done"}),  # type: ignore[arg-type]
        ],
    )
    def test_a_fault_has_a_code_and_names_the_row(self, wrong: Any, code: str, facts: dict[str, Any]) -> None:
        fault = fault_of(wrong)
        assert fault.code == code and facts.items() <= fault.facts.items(), fault
        assert (fault.facts["row"], fault.facts["answers"], fault.facts["attempt"]) == ("row-0", 1, 1)

    @pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(2), asyncio.CancelledError()])
    def test_a_fault_names_the_line_that_raised(self, error: BaseException) -> None:
        message = fault_of(lambda: raised(error)).message
        assert f"{type(error).__name__}" in message and f"{error} (at {__file__}:" in message

    @pytest.mark.parametrize("reply", [Reply([{"content": "x"}]), Reply([{"role": "assistant", "content": "x"}])])
    def test_messages_refused_by_the_transcript_are_a_fault(self, reply: Reply) -> None:
        assert fault_of(lambda: reply).facts["row"] == "row-0"

    def test_a_long_reply_is_truncated_in_the_message(self) -> None:
        assert str(fault_of(lambda: "x" * 10_000).facts["found"]).endswith("x... (10002 characters)")

    def test_a_reward_before_the_first_response_is_a_fault(self) -> None:
        class Early(Three):
            async def reset(self, row: Row) -> Reply:
                return Reply(row.messages, reward=1.0)

        (one,), _ = played(Early, say)
        assert one.ended == "failed" and one.fault is not None
        assert (one.fault.code, one.fault.facts["found"]) == ("episode.reward-before-answer", 1.0)

    @pytest.mark.parametrize("error", [SystemExit(2), StopIteration("over"), KeyError("key"), GeneratorExit()])
    def test_an_error_of_a_plain_function_is_a_fault(self, error: BaseException) -> None:
        class Raises(Environment):
            def step(self, answer: Answer) -> Reply:  # type: ignore[override]
                raise error

        (one,), _ = played(Raises, say)
        assert one.ended == "failed" and one.fault is not None
        assert one.fault.code == "episode.environment-failed" and type(error).__name__ in one.fault.message

    @pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()])
    def test_an_error_of_a_task_or_a_constructor_is_a_fault(self, error: BaseException) -> None:
        class InTask(Environment):
            async def step(self, answer: Answer) -> Reply:
                async def fails() -> None:
                    raise error

                await asyncio.create_task(fails())
                raise AssertionError

        class InConstructor(Three):
            def __init__(self) -> None:
                raise error

        for environment in (InTask, InConstructor):
            (one,), _ = played(environment, say)
            assert one.ended == "failed" and one.fault is not None
            assert one.fault.facts["error"] == type(error).__name__

    def test_a_callback_cannot_stop_the_event_loop(self, caplog: pytest.LogCaptureFixture) -> None:
        class Stops(Three):
            async def step(self, answer: Answer) -> Reply:
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.stop)
                await asyncio.sleep(0)
                return await super().step(answer)

        episodes, _ = played(Stops, say, count=2)
        assert [one.ended for one in episodes] == ["done", "done"]
        assert "belongs to all episodes" in caplog.text

    def test_the_rewards_of_an_episode_add_up_within_float32(self) -> None:
        class Rich(Environment):
            async def step(self, answer: Answer) -> Reply:
                return Reply("x", reward=3e38)

        (one,), _ = played(Rich, say)
        assert one.fault is not None and one.fault.code == "episode.invalid-reward"
        assert one.fault.facts["row"] == "row-0" and one.fault.facts["answers"] == 2

    def test_the_error_of_close_is_a_note_of_the_first_error(self) -> None:
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
    def test_a_failing_close_is_a_fault_for_any_end_of_the_episode(self, turns: int) -> None:
        class Unclosed(Three):
            async def close(self) -> None:
                raise ValueError("planted")

        (one,), _ = played(Unclosed, say, turns=turns)
        assert one.ended == "failed" and "ValueError: planted" in str(one.fault)

    def test_close_has_its_own_time_limit(self) -> None:
        class Late(Three):
            async def step(self, answer: Answer) -> Reply:
                await asyncio.sleep(0.2)
                return Reply(done=True, reward=1.0)

            async def close(self) -> None:
                await asyncio.sleep(0.2)

        (one,), _ = played(Late, say, seconds=0.3)
        assert (one.ended, one.fault) == ("done", None)

    def test_a_retry_uses_the_same_row_and_random_numbers(self) -> None:
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

    def test_each_episode_has_its_own_environment_which_is_closed(self) -> None:
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

    def test_planted_faults_do_not_affect_other_episodes(self) -> None:
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

    def test_tasks_of_an_environment_end_with_the_batch(self) -> None:
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
    def test_an_interrupt_ends_all_episodes_and_closes_every_environment(self) -> None:
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

    def test_an_engine_error_ends_all_episodes(self) -> None:
        class Breaks(Scripted):
            def submit(self, request: Request) -> None:
                if len(self.requests) == 4:
                    raise MemoryError("planted")
                super().submit(request)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="planted"):
            patch.setattr(scripted, "Scripted", Breaks)
            played(Three, say, count=3)


LONG = "x" * 50_000_000


@pytest.mark.parametrize(
    "reply",
    [
        LONG,
        [{"role": "user", "content": ""}] * 200_000,
        [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
    ],
    ids=["long", "many", "parts"],
)
def test_a_reply_beyond_the_context_is_not_tokenized(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the episode as any reply without room does."""
    one, longest = _flooded(reply, monkeypatch)
    assert one.ended == "context" and len(one.chat.rewards) == 1
    assert longest < 10_000


@pytest.mark.parametrize("key", ["name", "role", "tool_calls"])
def test_large_values_outside_of_the_content_are_a_fault(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, longest = _flooded([{"role": "user", "content": "x", key: LONG}], monkeypatch)
    assert one.fault is not None and one.fault.code == "episode.invalid-reply"
    assert longest < 10_000 and len(str(one.fault)) < 1000


def _flooded(reply: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[EpisodeResult, int]:
    """An episode with this reply, and the longest text that was tokenized."""

    class Floods(Environment):
        async def step(self, answer: Answer) -> Reply:
            return Reply(reply)

    encode, seen = ChatTokenizer.encode, list[int]()
    monkeypatch.setattr(ChatTokenizer, "encode", lambda self, text: (seen.append(len(text)), encode(self, text))[1])
    (one,), _ = played(Floods, say)
    return one, max(seen, default=0)
