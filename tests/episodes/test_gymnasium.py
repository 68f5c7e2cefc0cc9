"""Environments of Gymnasium, played by a policy that follows a script."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrl.episodes.gymnasium import Gym
from tests.episodes.scripted import played, row

gymnasium: Any = pytest.importorskip("gymnasium", reason="needs pip install 'flowrl[gymnasium]'")


class Lake(Gym):
    def make(self) -> Any:
        return gymnasium.make("FrozenLake-v1", is_slippery=False)

    def observation_text(self, observation: int) -> str:
        return f"field {observation}"


class Echo(gymnasium.Env):
    """Expects its number as the action, as text."""

    def __init__(self, fails_after: int = 99, actions: Any = None) -> None:
        self.observation_space = gymnasium.spaces.Text(9, charset="0123456789")
        self.action_space = actions or gymnasium.spaces.Text(9, charset="0123456789")
        self.fails_after = fails_after

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number, self.steps = str(self.np_random.integers(10**6)), 0
        return self.number, {}

    def step(self, action: str) -> Any:
        self.steps += 1
        if self.steps > self.fails_after:
            raise RuntimeError("out of order")
        right = action == self.number
        return self.number, np.float32(right), right, False, {}


class Echoed(Gym):
    def make(self) -> Any:
        return Echo()


def test_the_last_number_of_a_response_is_the_action() -> None:
    moves = ["I go down, 1", "1", "2", "2", "1", "so: 2"]
    [one], _ = played(Lake, lambda name, turn: moves[turn], turns=8)
    assert (one.ended, one.chat.rewards) == ("done", [0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    assert [m["content"] for m in one.chat.messages[::2]] == [
        "go\n\nfield 0",
        *(f"field {i}" for i in (4, 8, 9, 10, 14)),
    ]


@pytest.mark.parametrize("response", ["4", "9", "-1", "1 or 2", "left"])
def test_an_invalid_action_gets_an_error_reply_and_no_step(response: str) -> None:
    [one], _ = played(Lake, lambda name, turn: ["1", response, "1"][turn], turns=3)
    *_, error, again = [m["content"] for m in one.chat.messages]
    assert error == f"error: expected one number from 0 to 3, and this is {response!r}" and again == "1"
    assert one.ended == "turns" and one.chat.rewards == [0.0] * 3


def test_episodes_are_seeded_by_group() -> None:
    numbers = {}
    for seed in (row(0).seed, row(2).seed):
        env = Echo()
        numbers[seed] = env.reset(seed=seed)[0]
    rows = [row(i) for i in range(4)]  # two groups of two
    episodes, _ = played(Echoed, lambda name, turn: numbers[rows[int(name[-1])].seed], rows=rows)
    assert [one.chat.rewards for one in episodes] == [[1.0]] * 4
    assert len(set(numbers.values())) == 2


@pytest.mark.parametrize("response", ["x", "1234567890", ""])
def test_text_actions_must_be_in_the_action_space(response: str) -> None:
    [one], _ = played(Echoed, lambda name, turn: response or "1", turns=2)
    refused = "expected Text(" in one.chat.messages[2]["content"]
    assert refused == bool(response) and one.ended == "turns"


def test_a_retry_has_the_same_seed() -> None:
    class Fails(Gym):
        def make(self) -> Any:
            return Echo(fails_after=1)

    [one], engine = played(Fails, lambda name, turn: "0", tries=2)
    assert one.ended == "failed" and one.tries == 2
    assert "RuntimeError: out of order" in str(one.fault)
    assert engine.requests[0].ids == engine.requests[2].ids  # the same first observation


class Boxed(Gym):
    """Actions of a type without a conversion from text."""

    def make(self) -> Any:
        return Echo(actions=gymnasium.spaces.Box(0, 1, (2,)))


class NoObservationText(Lake):
    observation_text = Gym.observation_text


@pytest.mark.parametrize(
    ("environment", "code", "facts"),
    [
        (Boxed, "episode.no-conversion", {"environment": "Boxed", "method": "act"}),
        (
            NoObservationText,
            "episode.no-conversion",
            {"environment": "NoObservationText", "method": "observation_text"},
        ),
        (Gym, "episode.environment-failed", {"error": "NotImplementedError"}),
    ],
)
def test_a_missing_conversion_is_refused_with_the_method_to_define(
    environment: Any, code: str, facts: dict[str, Any]
) -> None:
    [one], _ = played(environment, lambda name, turn: "1")
    assert one.fault is not None and one.fault.code == code and facts.items() <= one.fault.facts.items()


def test_a_truncated_environment_is_done() -> None:
    class Brief(Lake):
        def make(self) -> Any:
            return gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=2)

    [one], _ = played(Brief, lambda name, turn: "0", turns=5)
    assert one.ended == "done" and len(one.chat.rewards) == 2
    assert isinstance(one.chat.rewards[0], float) and not isinstance(one.chat.rewards[0], np.floating)
