"""`Gym`: adapts environments of Gymnasium."""

from __future__ import annotations

import re
from typing import Any

from flowrl.episodes.environment import Answer, InvalidToolCall, Reply, Row
from flowrl.episodes.text_env import TextEnvironment
from flowrl.errors import EpisodeError
from flowrl.lazy import package


class Gym(TextEnvironment):
    """An environment of Gymnasium; a subclass makes it and describes its observations in text::

        class Lake(Gym):
            def make(self):
                return gymnasium.make("FrozenLake-v1", is_slippery=False)

            def observation_text(self, observation):
                return f"You stand on field {observation} of 16."

    ``Interact(Lake, ...)`` then plays it. Each episode has its own environment, which ``Row.seed`` seeds. Numbered
    actions are the single number in an answer, and text actions its text; for other action spaces define `act`.
    """

    def reset(self, row: Row) -> Reply:  # type: ignore[override]  # plain, since it blocks: it runs in a thread
        """The prompt and the first observation."""
        self.env = self.make()
        observation, _ = self.env.reset(seed=row.seed)
        return Reply(self.opening(row, self.observation_text(observation)))

    def step(self, answer: Answer) -> Reply:  # type: ignore[override]
        """The observation after the action in the answer, and its reward."""
        try:
            action = self.act(answer.text)
        except InvalidToolCall as invalid:
            return self.invalid_reply(invalid)
        observation, reward, ended, cut_off, _ = self.env.step(action)
        return Reply(self.observation_text(observation), float(reward), bool(ended or cut_off))

    def act(self, text: str) -> Any:
        """The action in an answer: its single number if actions are numbered, its text if they are texts."""
        space, spaces = self.env.action_space, package("gymnasium.spaces", "gymnasium")
        if isinstance(space, spaces.Discrete):
            first, last = int(space.start), int(space.start + space.n) - 1
            numbers = re.findall(r"-?\d+", text)
            if len(numbers) != 1 or not first <= int(numbers[0]) <= last:
                raise InvalidToolCall(f"expected one number from {first} to {last}, and this is {text[:200]!r}")
            return int(numbers[0])
        if not isinstance(space, spaces.Text):
            name = type(self).__name__
            raise EpisodeError(
                f"The actions of {name} are {space}; expected numbers or text. Define act(self, text) in {name}, which "
                f"returns the action.",
                code="episode.no-conversion",
                environment=name,
                method="act",
                found=space,
            )
        if not space.contains(text):
            raise InvalidToolCall(f"expected {space}, and this is {text[:200]!r}")
        return text

    def close(self) -> None:  # type: ignore[override]
        """Close the environment, if there is one."""
        if hasattr(self, "env"):
            self.env.close()
