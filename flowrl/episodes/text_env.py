"""`TextEnvironment`: base of adapters for environments of other libraries, which convert observations and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.data.text.transcript import Message
from flowrl.episodes.environment import Environment, InvalidToolCall, Reply, Row
from flowrl.errors import EpisodeError, type_of


class TextEnvironment(Environment):
    """Base of adapters: `make` creates the environment of an episode, `observation_text` and `act` convert to and from
    text.

    If a response is not an action, the policy gets an error message, the environment does not step, and the response
    counts as a turn.
    """

    invalid_reward: float | None = None
    """The reward of a response that is not an action."""

    def make(self) -> Any:
        """The environment of an episode."""
        raise NotImplementedError(f"{type(self).__name__} does not make its environment: define make(self).")

    def observation_text(self, observation: Any) -> str:
        """An observation as text; by default one that is a string already."""
        if not isinstance(observation, str):
            name = type(self).__name__
            raise EpisodeError(
                f"An observation of {name} is {type_of(observation)}; expected a string. Define "
                f"observation_text(self, observation) -> str in {name}.",
                code="episode.no-conversion",
                environment=name,
                method="observation_text",
                found=type(observation).__name__,
            )
        return observation

    def act(self, text: str) -> Any:
        """The action in a response; by default its text.

        Raises:
            InvalidToolCall: it is not an action; the policy gets the message.
        """
        return text

    def opening(self, row: Row, observation: str) -> Sequence[Message]:
        """The messages before the first response: by default the prompt, then the first observation."""
        *before, last = row.messages or [{"role": "user", "content": ""}]
        if last["role"] != "user":
            return [*row.messages, {"role": "user", "content": observation}]
        return [*before, {**last, "content": f"{last['content']}\n\n{observation}".strip()}]

    def invalid_reply(self, invalid: InvalidToolCall) -> Reply:
        """The reply to a response that is not an action."""
        return Reply(f"error: {invalid}", reward=self.invalid_reward)
