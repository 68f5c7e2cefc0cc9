"""Environments of verifiers, played by a policy that follows a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.episodes.chat import Chat
from flowrl.episodes.environment import Row
from tests.episodes.scripted import played, row

REVERSED = '''
import verifiers.v1 as vf
from verifiers.v1.envs.single_agent.env import SingleAgentEnvConfig

__all__ = ["Reversed"]


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 4 or trace.is_truncated)


class Stopped(Task):
    @vf.stop
    async def early(self, trace: vf.Trace) -> bool:
        return True


class Reversed(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for kind, word in ((Task, "abc"), (Task, "hello"), (Stopped, "xyz")):
            yield kind(Data(prompt=f"Reverse {word}", system_prompt="Be brief.", answer=word[::-1]), self.config.task)


class Twice(vf.Env[SingleAgentEnvConfig]):
    """Repeats the question until the response is correct."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await interaction.turn("Again.")
        interaction.trace.record_reward("turns", -0.25 * interaction.trace.num_turns)

    async def finalize(self, task, episode):
        assert episode.ok and episode.traces[0].is_completed
        episode.traces[0].record_reward("ended", 0.125)


once = vf.load_environment(SingleAgentEnvConfig(taskset={"id": "reversed_words"}))
again = Twice(SingleAgentEnvConfig(taskset={"id": "reversed_words"}))
'''


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A taskset of verifiers, in a separate module."""
    pytest.importorskip("verifiers.v1", reason="needs pip install 'flowrl[verifiers]'")
    (tmp_path / "reversed_words.py").write_text(REVERSED)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("reversed_words")
    sys.modules.pop("reversed_words")


def by_verifiers(env: Any, script: Any, **limits: Any) -> Any:
    """Play episodes of the first tasks of an environment."""
    from flowrl.episodes.verifiers import play, prompts

    async def agent(chat: Chat, row: Row) -> float:
        return await play(env, chat, row)

    tasks = list(prompts(env, 3))
    rows = [row(i)._replace(messages=task["prompt"], extra_info=task["extra_info"]) for i, task in enumerate(tasks)]
    return played(agent, script, rows=rows, **limits)[0]


def test_verifiers_tasks_are_played_and_scored(words: Any) -> None:
    right, wrong, stopped = by_verifiers(words.once, lambda name, turn: "cba" if name == "row-0" else "hello")
    assert right.chat.rewards == [3.0] and wrong.chat.rewards == [0.0]
    assert [m["content"] for m in right.chat.messages] == ["Be brief.", "Reverse abc", "cba"]
    assert (stopped.fault.code, stopped.fault.facts["needs"]) == ("episode.unsupported-task", ("stops",))


def test_multi_turn_verifiers_environments_reply_and_score(words: Any) -> None:
    right, over, _ = by_verifiers(words.again, lambda name, turn: ["no", "cba", "no"][turn], turns=3)
    assert [m["content"] for m in right.chat.messages[2:]] == ["no", "Again.", "cba"]
    assert right.chat.rewards == [0.0, 3.0 - 0.5 + 0.125]
    assert over.chat.rewards == [0.0, 0.0, 1.0 - 0.75 + 0.125]  # it ran out of turns; verifiers scores what there is


def test_verifiers_is_informed_of_truncated_responses(words: Any) -> None:
    cut, *_ = by_verifiers(words.once, lambda name, turn: "long " * 300)
    assert cut.ended == "done" and cut.chat.rewards == [1.0]
