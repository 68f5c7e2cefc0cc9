"""`by_data_source`: a reward function for each data source, as in verl's ``default_compute_score``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import field_validator

from flowrl.errors import ParameterError, RewardError, offer
from flowrl.rewards.adapters import FromVerl
from flowrl.rewards.answers import gsm8k
from flowrl.rewards.programs import Code
from flowrl.rewards.question_answering import exact_match
from flowrl.rewards.reward_function import RewardFunction, parts, reads_prompt
from flowrl.rewards.sandboxes.sandbox import Sandbox


class ByDataSource(RewardFunction):
    """Score each response by the function of its `data_source`, as verl's ``default_compute_score`` does.

    Args:
        rewards: reward functions, or references to them, by data source. A name may be a pattern, such as
            ``"aime*"``; an equal name comes first, then the first pattern that matches.
        default: for all other data sources; with None, these are an error.
    """

    rewards: Mapping[str, Callable[..., Any] | str]
    default: Callable[..., Any] | str | None = None

    @field_validator("rewards", "default", mode="after")
    @classmethod
    def _by_reference(cls, value: Any) -> Any:
        """Let an adapter load what a string names."""
        if isinstance(value, Mapping):
            return {name: cls._by_reference(fn) for name, fn in value.items()}
        return FromVerl(value) if isinstance(value, str) else value

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ParameterError(
                "by_data_source(...) has no reward functions. Pass them by data source: {'openai/gsm8k': gsm8k}.",
                code="reward.invalid-settings",
            )

    @property
    def reads_prompt(self) -> bool:
        """Whether one of the functions does."""
        return any(map(reads_prompt, parts(self)))

    def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt: Any = ()
    ) -> Any:
        """What the function of this data source returns."""
        fn: Any = self._function(data_source)
        more = {"prompt": prompt} if reads_prompt(fn) else {}
        return fn(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **more,
        )

    def answer(self, data_source: str, solution_str: str) -> str | None:
        """The answer as the function of this data source finds it."""
        fn = self._function(data_source)
        if isinstance(fn, RewardFunction):
            return fn.answer(data_source, solution_str)
        return super().answer(data_source, solution_str)

    def _function(self, data_source: str) -> Any:
        if data_source in self.rewards:
            return self.rewards[data_source]
        matching = [fn for name, fn in self.rewards.items() if fnmatchcase(data_source, name)]
        found = matching[0] if matching else self.default
        if found is None:
            raise RewardError(
                f"There is no reward function for the data source {data_source!r}; "
                f"{offer(data_source, self.rewards, 'there are some for')} Add one, or pass default=.",
                code="reward.unknown-data-source",
                data_source=data_source,
                known=tuple(self.rewards),
            )
        return found


by_data_source = ByDataSource


_OF_CODE = ("codecontests", "apps", "codeforces", "taco")


def verl_sources(sandbox: Sandbox | None = None) -> dict[str, Callable[..., Any]]:
    """The data sources that verl's ``default_compute_score`` knows, each with the function of flowrl for it.

    ``by_data_source({**verl_sources(), "my/data": mine})`` adds one. ``hiyouga/geometry3k`` is scored by its answer
    only, without verl's format reward.

    Args:
        sandbox: for the sources of code; None leaves them out.
    """
    from flowrl.rewards.math_answers import math  # which needs an extra

    numina = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
    of_math = ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hiyouga/geometry3k"]
    of_math += ["math_dapo", "math", "math_dapo_reasoning", "aime*", *(f"numina_{name}" for name in numina)]
    of_search = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    of_code = {} if sandbox is None else {name: Code(sandbox, continuous=True) for name in _OF_CODE}
    return {
        "openai/gsm8k": gsm8k,
        **dict.fromkeys(of_math, math),
        **{f"searchR1_{name}": exact_match(tag="answer") for name in of_search},
        **of_code,
    }
