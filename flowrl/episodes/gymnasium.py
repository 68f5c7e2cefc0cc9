"""`Gym`: environments of Gymnasium as environments."""

from __future__ import annotations

import re
from typing import Any

from flowrl.episodes.environment import Answer, Reply, Row
from flowrl.episodes.text_env import TextEnvironment, package
from flowrl.episodes.tools import InvalidToolCall
from flowrl.errors import EpisodeError


class Gym(TextEnvironment):
    """An environment of Gymnasium; a subclass makes it, and puts what it observes in words::

        class Lake(Gym):
            def make(self):
                return gymnasium.make("FrozenLake-v1", is_slippery=False)

            def tell(self, seen):
                return f"You stand on field {seen} of 16."

    ``Interact(Lake, ...)`` then plays it. Each episode has an environment of its own, which is reset by ``Row.seed``.
    Where actions are numbered, an answer's number is taken; where they are texts, its text; for others define `act`.
    """

    def reset(self, row: Row) -> Reply:  # type: ignore[override]  # it blocks, so it runs in a thread
        """The prompt, and what is seen at first."""
        self.env = self.make()
        seen, _ = self.env.reset(seed=row.seed)
        return Reply(self.opening(row, self.tell(seen)))

    def step(self, answer: Answer) -> Reply:  # type: ignore[override]
        """What is seen after the action that the answer is, and its reward."""
        try:
            action = self.act(answer.text)
        except InvalidToolCall as misfit:
            return self.misfits(misfit)
        seen, reward, ended, cut_off, _ = self.env.step(action)
        return Reply(self.tell(seen), float(reward), bool(ended or cut_off))

    def act(self, text: str) -> Any:
        """The action that an answer is: the one number in it where actions are numbered, its text where they are
        texts."""
        space, spaces = self.env.action_space, package("gymnasium.spaces", "gymnasium")
        if isinstance(space, spaces.Discrete):
            first, last = int(space.start), int(space.start + space.n) - 1
            numbers = re.findall(r"-?\d+", text)
            if len(numbers) != 1 or not first <= int(numbers[0]) <= last:
                raise InvalidToolCall(f"expected one number from {first} to {last}, and this is {text[:200]!r}")
            return int(numbers[0])
        if not isinstance(space, spaces.Text):
            raise EpisodeError(f"its actions are {space}; define act(self, text) in {type(self).__name__}.")
        if not space.contains(text):
            raise InvalidToolCall(f"expected {space}, and this is {text[:200]!r}")
        return text

    def close(self) -> None:  # type: ignore[override]
        """End the environment, if it was made."""
        if hasattr(self, "env"):
            self.env.close()
