"""`RewardFunction`: base of the reward functions with parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flowrl.spec import Spec, parameters


class RewardFunction(Spec):
    """A reward function with parameters, which worker processes can import and a graph file can name.

    An instance is called with verl's signature, ``fn(data_source, solution_str, ground_truth, extra_info)``. Called
    with parameters only, it returns a changed copy: ``math(boxed=True)``. A subclass defines `score`.
    """

    schedulable: ClassVar[bool] = False

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        """The score of a response: a number, or a dict with one under ``"score"``."""
        raise NotImplementedError(f"{type(self).__name__} does not define score")

    def answer(self, data_source: str, solution_str: str) -> str | None:
        """The answer of a response, which votes in maj@k; None for no vote. By default the whole response."""
        return solution_str.strip() or None

    @property
    def reads_prompt(self) -> bool:
        """Whether `score` also takes ``prompt``, the messages of the prompt."""
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The score of a response; or, called with parameters only, a copy with these parameters."""
        if kwargs and not args and "solution_str" not in kwargs:
            return dataclasses.replace(self, **kwargs)
        return self.score(*args, **kwargs)


def reads_prompt(fn: object) -> bool:
    """Whether a reward function takes the messages of the prompt as ``prompt``."""
    return isinstance(fn, RewardFunction) and fn.reads_prompt


def parts(fn: object) -> Sequence[object]:
    """The parameters of a reward function, and the items of those that are mappings."""
    values = list(parameters(fn).values()) if isinstance(fn, RewardFunction) else []
    return [item for value in values for item in (value.values() if isinstance(value, Mapping) else (value,))]
