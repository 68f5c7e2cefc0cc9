"""Episodes against a policy that follows a script: turns, rewards, time limits, faults and what is left of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from flowrl.core.protocols import Request
from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.environment import Answer, Environment, Reply, Row
from tests.episodes.scripted import KEY, NAME, Scripted, played, row
from tests.templates import tokenizer_of


def say(name: str, turn: int) -> str:
    return f"{name} says {turn}"


class Three(Environment):
    """Three turns, each worth its number."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"and {answer.turn}?", reward=float(answer.turn), done=answer.turn == 2)


class Plain(Environment):
    """The same by plain functions."""

    def reset(self, row: Row) -> Reply:  # type: ignore[override]
        return Reply([*row.messages])

    def step(self, answer: Answer) -> Reply:  # type: ignore[override]
        return Reply(f"and {answer.turn}?", reward=float(answer.turn), done=answer.turn == 2)


async def agent(chat: Chat, row: Row) -> float:
    for turn in range(3):
        await chat.answer(None if turn == 0 else f"and {turn - 1}?")
        chat.reward(float(turn))
    return 0.0


@pytest.mark.parametrize("world", [Three, Plain, agent])
def test_turns_and_their_rewards(world: Any) -> None:
    episodes, engine = played(world, say, count=5)
    tokenizer = tokenizer_of(NAME)
    for i, one in enumerate(episodes):
        assert (one.ended, one.tries, one.fault) == ("done", 1, None)
        assert one.chat.rewards == [0.0, 1.0, 2.0] and one.chat.versions == [3, 3, 3]
        assert [m["content"] for m in one.chat.messages] == [
            *["go", f"row-{i} says 0", "and 0?", f"row-{i} says 1", "and 1?", f"row-{i} says 2"]
        ]
        assert one.chat.transcript is not None
        text = tokenizer.shown(one.chat.transcript.ids)
        assert text == tokenizer.conversation_text(one.chat.messages).removesuffix("\n")
    assert len(engine.requests) == 15 and engine.most == 5
    assert sorted(engine.dropped) == [f"row-{i}" for i in range(5)]


def test_a_turn_draws_by_its_row_and_number() -> None:
    _, engine = played(Three, say, count=2)
    keys = {request.key for request in engine.requests}
    assert keys == {KEY.answer(f"row-{i}", turn) for i in range(2) for turn in range(3)}


def test_each_request_goes_on_from_what_was_there() -> None:
    _, engine = played(Three, say)
    first, second, third = engine.requests
    assert all(request.keep for request in engine.requests)
    assert second.ids[: len(first.ids)] == first.ids
    assert third.ids[: len(second.ids)] == second.ids


def test_one_that_waits_holds_nobody_up() -> None:
    """Rows of even numbers wait until an odd one is done."""
    done = asyncio.Event()

    class Waits(Environment):
        async def reset(self, row: Row) -> Reply:
            self.odd = row.ground_truth % 2
            return Reply(row.messages)

        async def step(self, answer: Answer) -> Reply:
            if self.odd and answer.turn == 2:
                done.set()
            if not self.odd:
                await done.wait()
            return Reply("more", done=answer.turn == 2)

    episodes, _ = played(Waits, say, count=6)
    assert [one.ended for one in episodes] == ["done"] * 6


@pytest.mark.parametrize("plain", [True, False])
def test_a_world_that_hangs_is_ended(plain: bool) -> None:
    freed = threading.Event()

    class Hangs(Environment):
        async def reset(self, row: Row) -> Reply:
            self.number = row.ground_truth
            return Reply(row.messages)

        if plain:

            def step(self, answer: Answer) -> Reply:  # type: ignore[override]
                if self.number == 1:
                    freed.wait(60)
                return Reply(done=True, reward=1.0)

        else:

            async def step(self, answer: Answer) -> Reply:
                if self.number == 1:
                    await asyncio.sleep(60)
                return Reply(done=True, reward=1.0)

    episodes, _ = played(Hangs, say, count=3, seconds=0.3, tries=2)
    freed.set()
    assert [one.ended for one in episodes] == ["done", "failed", "done"]
    assert episodes[1].tries == 2
    assert str(episodes[1].fault) == (
        "the episode of row 'row-1' failed after 1 answers, in try 2: its world took more than 0.3 s"
    )


def test_the_policy_may_take_its_time() -> None:
    class Slow(Scripted):
        def step(self) -> list[str]:
            threading.Event().wait(0.02)
            return super().step()

    engine = Slow(lambda name, turn: "a long answer, many tokens", tokenizer_of(NAME))
    from tests.episodes import scripted  # the same stage around another engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "Scripted", lambda *given: engine)
        episodes, _ = played(Three, say, seconds=0.25)
    assert episodes[0].ended == "done"


class TestFaults:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
            (lambda: "a text", "an environment replied 'a text'; expected a Reply"),
            (lambda: Reply("x", reward=float("nan")), "a reward is nan; expected a finite number"),
            (lambda: Reply("x", reward="1"), "a reward is '1'; expected a finite number"),  # type: ignore[arg-type]
            (lambda: Reply(), "nothing was said to the last one"),
            (lambda: Reply([{"content": "x"}]), 'expected "role"'),
            (lambda: (_ for _ in ()).throw(TimeoutError("theirs")), "TimeoutError: theirs"),
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

    def test_a_fault_of_the_engine_ends_all(self) -> None:
        class Breaks(Scripted):
            def submit(self, request: Request) -> None:
                if len(self.requests) == 4:
                    raise MemoryError("planted")
                super().submit(request)

        from tests.episodes import scripted

        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="planted"):
            patch.setattr(scripted, "Scripted", Breaks)
            played(Three, say, count=3)


class TestLimits:
    def test_turns(self) -> None:
        (one,), engine = played(Three, say, turns=2)
        assert (one.ended, one.chat.rewards, len(engine.requests)) == ("turns", [0.0, 1.0], 2)

    def test_context(self) -> None:
        (whole,), _ = played(Three, say)
        assert whole.chat.transcript is not None
        longest = len(whole.chat.transcript.ids)
        (one,), engine = played(Three, say, context=longest - 3)
        assert one.chat.transcript is not None and len(one.chat.transcript.ids) == longest - 3
        assert engine.requests[-1].sampling.max_new_tokens < 256
        (early,), _ = played(Three, say, context=len(engine.requests[-1].ids))
        assert (early.ended, len(early.chat.rewards)) == ("context", 2)

    def test_an_agent_may_score_what_is_over(self) -> None:
        async def goes_on(chat: Chat, row: Row) -> float:
            try:
                while True:
                    await chat.answer("more" if chat.rewards else None)
            except EpisodeOver:
                return 7.0

        (one,), _ = played(goes_on, say, turns=2)
        assert (one.ended, one.chat.rewards) == ("done", [0.0, 7.0])

    def test_concurrency(self) -> None:
        episodes, engine = played(Three, say, count=9, concurrency=2)
        assert engine.most == 2 and all(one.ended == "done" for one in episodes)


class TestTools:
    def test_calls_are_made_and_told(self) -> None:
        def add(a: int, b: int) -> int:
            """The sum."""
            return a + b

        async def twice(text: str) -> dict[str, str]:
            return {"twice": text * 2}

        said = [
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "2"}}</tool_call>'
            '<tool_call>{"name": "twice", "arguments": {"text": "x"}}</tool_call>',
            "3",
        ]
        (one,), _ = played(None, lambda name, turn: said[turn], tools=[add, twice])
        replies = [m["content"] for m in one.chat.messages if m["role"] == "tool"]
        assert replies == ["3", '{"twice": "xx"}']
        assert (one.ended, one.chat.tool_calls, one.chat.tool_errors) == ("done", 2, 0)

    @pytest.mark.parametrize(
        ("call", "told"),
        [
            ("{", "'{' is no call"),
            ('{"name": "ad", "arguments": {}}', "there is no tool 'ad'; there are add; did you mean 'add'?"),
            ('{"name": "add", "arguments": {"a": 1}}', "add does not take these arguments (b: Missing"),
            ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', "add does not take these arguments (b: Input"),
            ('{"name": "add", "arguments": [1, 2]}', "the arguments of 'add' are [1, 2]; expected an object"),
        ],
    )
    def test_calls_that_are_wrong_are_told_to_the_policy(self, call: str, told: str) -> None:
        def add(a: int, b: int) -> int:
            return a + b

        said = [f"<tool_call>{call}</tool_call>", "sorry"]
        (one,), _ = played(None, lambda name, turn: said[turn], tools=[add])
        (reply,) = [m["content"] for m in one.chat.messages if m["role"] == "tool"]
        assert reply.startswith("error: ") and told in reply
        assert (one.ended, one.chat.tool_errors) == ("done", 1)

    def test_a_tool_that_raises_is_a_fault_of_the_world(self) -> None:
        def broken(a: int) -> int:
            raise ValueError(f"no {a}")

        call = '<tool_call>{"name": "broken", "arguments": {"a": 1}}</tool_call>'
        (one,), _ = played(None, lambda name, turn: call, tools=[broken])
        assert one.ended == "failed" and "ValueError: no 1" in str(one.fault)

    def test_an_environment_sees_answers_without_calls_alone(self) -> None:
        seen: list[str] = []

        class Last(Environment):
            async def step(self, answer: Answer) -> Reply:
                seen.append(answer.text)
                return Reply(reward=1.0, done=True)

        async def look() -> str:
            return "a wall"

        said = ['<tool_call>{"name": "look"}</tool_call>', "I see a wall"]
        (one,), _ = played(Last, lambda name, turn: said[turn], tools=[look], rows=[row(0)])
        assert seen == ["I see a wall"] and one.chat.rewards == [0.0, 1.0]
