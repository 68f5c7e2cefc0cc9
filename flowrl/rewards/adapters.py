"""Reward functions of verl, TRL and OpenRLHF, called with their own signatures."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from flowrl.errors import RewardError
from flowrl.references import check, resolve
from flowrl.rewards.reward_function import RewardFunction

Messages = Sequence[Mapping[str, Any]]


class _Adapter(RewardFunction):
    """A function, or a reference to one, which is called with another signature."""

    references: ClassVar[frozenset[str]] = frozenset({"fn"})

    fn: Callable[..., Any] | str

    def __post_init__(self) -> None:
        if isinstance(self.fn, str):
            check(self.fn)

    def _call(self, **arguments: Any) -> Any:
        """What the function returns; that of an async one is awaited."""
        result = (resolve(self.fn) if isinstance(self.fn, str) else self.fn)(**arguments)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


class FromVerl(_Adapter):
    """A reward function of verl, ``compute_score(data_source, solution_str, ground_truth, extra_info)``; also async.

    Args:
        fn: the function, or a reference to it: ``"file.py:compute_score"``.
        reward_kwargs: further arguments, as verl's ``custom_reward_function.reward_kwargs``.
        key: the entry of the returned dict that is the score, as one of verl's ``gdpo_reward_keys``; None is ``score``.
    """

    reward_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    key: str | None = None

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        """What the function returns."""
        result = self._call(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **self.reward_kwargs,
        )
        if self.key is None:
            return result
        if not isinstance(result, Mapping) or self.key not in result:
            found = f"the entries {', '.join(map(str, result))}" if isinstance(result, Mapping) else repr(result)
            raise RewardError(
                f"The reward function returned {found}, expected a dict with {self.key!r}. Name an entry that it "
                f"returns: from_verl(fn, key=...).",
                code="reward.invalid-score",
                key=self.key,
            )
        return {**result, "score": result[self.key]}


class FromTRL(_Adapter):
    """A reward function of TRL, ``fn(prompts, completions, **columns) -> list[float]``; also async.

    It is called with one prompt and one completion. Its columns are the entries of `extra_info` and the ground truth;
    numbers that it passes to ``log_metric(name, value)`` are logged as ``reward/<name>``.

    Args:
        fn: the function, or a reference to it.
        ground_truth: the column that has the ground truth; TRL's own functions read ``solution``.
        conversational: prompts and completions are messages; else texts.
    """

    ground_truth: str = "solution"
    conversational: bool = True

    @property
    def reads_prompt(self) -> bool:
        """True."""
        return True

    def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt: Messages = ()
    ) -> dict[str, Any]:
        """The reward of the only completion."""
        metrics: dict[str, Any] = {}
        columns = {name: [value] for name, value in (extra_info or {}).items() if name not in _TAKEN}
        completion = [{"role": "assistant", "content": solution_str}] if self.conversational else solution_str
        rewards = self._call(
            **{**columns, self.ground_truth: [ground_truth]},
            prompts=[[dict(message) for message in prompt] if self.conversational else text_of(prompt)],
            completions=[completion],
            log_metric=metrics.__setitem__,
        )
        return {**metrics, "score": _only(rewards, "list[float]")}


class FromOpenRLHF(_Adapter):
    """A reward function of OpenRLHF, ``reward_func(queries, prompts, labels)``.

    It is called with one row: the text of the prompt's messages, the same followed by the response, and the ground
    truth. Its ``rewards`` are the score; ``scores`` and ``extra_logs`` are logged as ``reward/<name>``.

    Args:
        fn: the function, or a reference to it: ``"file.py:reward_func"``.
    """

    @property
    def reads_prompt(self) -> bool:
        """True."""
        return True

    def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt: Messages = ()
    ) -> dict[str, Any]:
        """The reward of the only row."""
        text = text_of(prompt)
        result = self._call(queries=[text + solution_str], prompts=[text], labels=[ground_truth])
        if not isinstance(result, Mapping):
            return {"score": _only(result, "a dict with 'rewards'")}
        logs = {"scores": result["scores"]} if "scores" in result else {}
        logs = {name: _only(value, "one number") for name, value in {**logs, **result.get("extra_logs", {})}.items()}
        return {**logs, "score": _only(result.get("rewards"), "a dict with 'rewards'")}


from_verl, from_trl, from_openrlhf = FromVerl, FromTRL, FromOpenRLHF

_TAKEN = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids", "log_metric"})
"""Names that TRL does not pass as columns."""


def text_of(messages: Messages) -> str:
    """The text of messages, a blank line between two."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        texts.append("".join(parts))
    return "\n\n".join(texts)


def _only(values: Any, expected: str) -> Any:
    """The only item of a list or tensor of one row; a number is itself."""
    if isinstance(values, int | float) or getattr(values, "shape", None) == ():
        return values
    if not hasattr(values, "__len__") or isinstance(values, str | Mapping) or len(values) != 1:
        raise RewardError(
            f"A reward function returned {values!r} for one row. Return {expected}, with one reward for each row.",
            code="reward.invalid-score",
            found=repr(values),
        )
    return values[0]
