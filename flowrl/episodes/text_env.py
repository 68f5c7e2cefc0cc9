"""`TextEnvironment`: base of adapters for environments of other libraries, which convert observations and actions."""

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
    """Base of adapters: `make` creates the environment of an episode, `tell` and `act` convert to and from text.

    An answer that is not an action is the policy's fault: the policy gets an error message, the environment does not
    step, and the answer counts as a turn.
    """

    misfit: float | None = None
    """The reward of an answer that is not an action."""

    def make(self) -> Any:
        """The environment of an episode."""
        raise NotImplementedError(f"{type(self).__name__} does not make its environment: define make(self).")

    def tell(self, seen: Any) -> str:
        """An observation as text; by default one that is a string already."""
        if not isinstance(seen, str):
            name = type(self).__name__
            raise EpisodeError(
                f"An observation of {name} is {type_of(seen)}; expected a string. Define tell(self, seen) -> str in "
                f"{name}.",
                code="episode.no-conversion",
                environment=name,
                method="tell",
                found=type(seen).__name__,
            )
        return seen

    def act(self, text: str) -> Any:
        """The action in an answer; by default its text.

        Raises:
            InvalidToolCall: it is not an action; the policy gets the message.
        """
        return text

    def opening(self, row: Row, observation: str) -> Sequence[Message]:
        """The messages before the first answer: by default the prompt, then the first observation."""
        *before, last = row.messages or [{"role": "user", "content": ""}]
        if last["role"] != "user":
            return [*row.messages, {"role": "user", "content": observation}]
        return [*before, {**last, "content": f"{last['content']}\n\n{observation}".strip()}]

    def misfits(self, misfit: InvalidToolCall) -> Reply:
        """The reply to an answer that is not an action."""
        return Reply(f"error: {misfit}", reward=self.misfit)


def package(name: str, extra: str) -> ModuleType:
    """A package that an extra of flowrl installs; raises `DefinitionError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise DefinitionError(
            f"The package {name} is not installed. Run pip install 'flowrl[{extra}]'.",
            code="package.not-installed",
            package=name,
            extra=extra,
        ) from error
