"""`TextEnvironment`: environments of other makers, whose observations and actions a subclass puts in words."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from flowrl.data.text.transcript import Message
from flowrl.episodes.environment import Environment, Reply, Row
from flowrl.episodes.tools import InvalidToolCall
from flowrl.errors import DefinitionError, EpisodeError, type_of


class TextEnvironment(Environment):
    """Base of environments that `make` makes, one an episode, and whose observations and actions are put in words.

    An answer that is no action is the policy's fault: it is told so, nothing moves in the environment, and that counts
    as a turn.
    """

    misfit: float | None = None
    """The reward of an answer that is no action."""

    def make(self) -> Any:
        """The environment of an episode."""
        raise NotImplementedError(f"{type(self).__name__} does not make its environment; define make(self).")

    def tell(self, seen: Any) -> str:
        """An observation, as the policy reads it: by default one that is text, as it is."""
        if not isinstance(seen, str):
            raise EpisodeError(
                f"{type(self).__name__} observes {type_of(seen)}, which the policy cannot read; define in it "
                f"tell(self, seen) -> str."
            )
        return seen

    def act(self, text: str) -> Any:
        """The action that an answer is; by default its text.

        Raises:
            InvalidToolCall: it is none; the message is what the policy is told.
        """
        return text

    def opening(self, row: Row, told: str) -> Sequence[Message]:
        """What stands before the first answer: by default the prompt, and behind it what is seen at first."""
        *before, last = row.messages or [{"role": "user", "content": ""}]
        if last["role"] != "user":
            return [*row.messages, {"role": "user", "content": told}]
        return [*before, {**last, "content": f"{last['content']}\n\n{told}".strip()}]

    def misfits(self, misfit: InvalidToolCall) -> Reply:
        """What is said to an answer that is no action."""
        return Reply(f"error: {misfit}", reward=self.misfit)


def package(name: str, extra: str) -> ModuleType:
    """A package that an extra of flowrl installs.

    Raises:
        DefinitionError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise DefinitionError(f"{name} is not installed; pip install 'flowrl[{extra}]'.") from error
