"""Episodes with the tools, environments and rewards of TRL, against a policy that follows a script; tests trl.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.episodes.chat import Chat
from flowrl.episodes.environment import Row
from flowrl.episodes.tools import Toolbox
from flowrl.episodes.trl import play_as_trl
from flowrl.errors import EpisodeError
from tests.episodes.scripted import played, row

SCRIPT = '''
import threading

SEEN = []


def double(number: int) -> int:
    """Double a number."""
    if number > 9 or threading.current_thread() is not threading.main_thread():
        raise ValueError("too large")
    return [2 * number]


class Counter:
    def reset(self, prompt, start, **kwargs):
        self.value = start
        return f" from {start}"

    def add(self, step: int) -> str:
        """Add to the counter."""
        self.value += step
        return f"now {self.value}"

    async def get_reward(self):
        return float(self.value)


def calls(completions, prompts, answer, **kwargs):
    SEEN.append((prompts, completions, answer))
    return [float(sum(len(turn.get("tool_calls", [])) for turn in completions[0]))]


async def nothing(completions, environments=None, **kwargs):
    return [None]
'''


def _call(name: str, **arguments: int) -> str:
    values = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'I try.\n<tool_call>\n{{"name": "{name}", "arguments": {{{values}}}}}\n</tool_call>'


def _play(folder: Path, responses: list[str], extra: dict[str, Any], turns: int = 5, **given: Any) -> tuple[Any, Any]:
    (folder / "script.py").write_text(SCRIPT)

    async def agent(chat: Chat, row: Row) -> float:
        references = {key: value.format(folder) if isinstance(value, str) else value for key, value in given.items()}
        rewards = {f"{folder}/script.py:calls": 2.0, f"{folder}/script.py:nothing": 1.0}
        return await play_as_trl(chat, row, rewards=rewards, ground_truth="answer", **references)

    (one,), engine = played(
        agent, lambda _, turn: responses[turn], rows=[row(0)._replace(extra_info=extra)], turns=turns, context=4000
    )
    assert one.fault is None
    return one, engine


def test_tools_and_rewards_read_what_trl_gives(tmp_path: Path) -> None:
    responses = [_call("double", number=4), _call("double", number=10), "8"]
    one, _ = _play(tmp_path, responses, {}, tools=[f"{tmp_path}/script.py:double"])
    assert sum(one.chat.rewards) == 4.0  # 2 calls with weight 2
    results = [message["content"] for message in one.chat.messages if message["role"] == "tool"]
    assert results == ["[8]", "{'error': 'too large'}"]


def test_an_environment_has_its_text_tools_and_reward(tmp_path: Path) -> None:
    responses = [_call("add", step=2), "done"]
    one, _ = _play(tmp_path, responses, {"start": 5}, environment="{}/script.py:Counter")
    assert sum(one.chat.rewards) == 2.0 + 7.0
    assert one.chat.messages[0]["content"] == "go from 5"


def test_an_episode_without_turns_left_is_scored(tmp_path: Path) -> None:
    one, _ = _play(tmp_path, [_call("double", number=1)] * 9, {}, turns=3, tools=[f"{tmp_path}/script.py:double"])
    assert sum(one.chat.rewards) == 6.0


def test_tools_are_set_before_the_first_answer() -> None:
    async def agent(chat: Chat, row: Row) -> float:
        await chat.answer()
        chat.use_tools(Toolbox([], "hermes"))
        return 0.0

    (one,), _ = played(agent, lambda name, turn: "yes")
    assert isinstance(one.fault, EpisodeError) and "before chat.answer" in str(one.fault)
