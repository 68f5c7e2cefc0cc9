"""`summarize`: messages, rewards and the end of an episode, as JSON-serializable data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowrl.episodes.chat import Chat
from flowrl.episodes.environment import Answer, Environment, Reply, Row
from flowrl.episodes.summary import summarize
from tests.episodes.scripted import played


class Counts(Environment):
    """Two turns; the second one is rewarded."""

    async def reset(self, row: Row) -> Reply:
        example_turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2", "sampled": "no"}]
        return Reply([*example_turns, *row.messages])

    async def step(self, answer: Answer) -> Reply:
        return Reply("and?", reward=0.5 if answer.turn else None, done=answer.turn == 1)


class Breaks(Counts):
    async def step(self, answer: Answer) -> Reply:
        if answer.turn:
            raise OSError("planted")
        return await super().step(answer)


def of(environment: Any, **settings: Any) -> dict[str, Any]:
    (episode,), _ = played(environment, lambda name, turn: f"says {turn}", **settings)
    found: dict[str, Any] = json.loads(json.dumps(summarize(episode)))
    return found


def test_sampled_messages_are_marked() -> None:
    found = of(Counts)
    contents = [(m["role"], m["content"]) for m in found["messages"]]
    example_turns = [("user", "1?"), ("assistant", "2")]  # an assistant message of the prompt is not sampled
    assert contents == [
        *example_turns,
        ("user", "go"),
        ("assistant", "says 0"),
        ("user", "and?"),
        ("assistant", "says 1"),
    ]
    marks = [m.get("sampled") for m in found["messages"]]
    expected = {"tokens": len("says 0") + 1, "cut": False, "version": 3}
    assert [mark is not None for mark in marks] == [False, False, False, True, False, True]
    assert marks[3] == {"turn": 0, "reward": 0.0} | expected and marks[5] == {"turn": 1, "reward": 0.5} | expected
    assert (found["ended"], found["tries"], found["fault"]) == ("done", 1, None)


@pytest.mark.parametrize(("settings", "ended"), [({"turns": 1}, "turns"), ({"context": 60}, "context")])
def test_a_summary_has_the_end_of_the_episode(settings: dict[str, int], ended: str) -> None:
    assert of(Counts, **settings)["ended"] == ended


def test_a_summary_marks_truncated_responses() -> None:
    (whole,), _ = played(Counts, lambda name, turn: "says much")
    assert whole.chat.transcript is not None
    [first] = [m["sampled"] for m in of(Counts, context=whole.chat.transcript.prompt_length + 3)["messages"][3:4]]
    assert (first["tokens"], first["cut"]) == (3, True)


def test_a_failed_episode_is_summarized_up_to_its_failure() -> None:
    found = of(Breaks, tries=2)
    assert (found["ended"], found["tries"]) == ("failed", 2)
    assert "planted" in found["fault"] and "after 2 answers, in try 2" in found["fault"]
    assert [m["content"] for m in found["messages"]][-3:] == ["says 0", "and?", "says 1"]


def test_a_summary_without_rewards_has_reward_none() -> None:
    async def no_rewards(chat: Chat, row: Row) -> None:
        await chat.answer()

    assert of(no_rewards)["messages"][1]["sampled"]["reward"] is None


def test_a_summary_without_responses_has_the_prompt() -> None:
    class Never(Environment):
        async def reset(self, row: Row) -> Reply:
            raise OSError("planted")

    found = of(Never)
    assert found["messages"] == [{"role": "user", "content": "go"}] and "planted" in found["fault"]
