"""`Reward`: scores responses by a user's function, in parallel and with a timeout per call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl import references as functions
from flowrl.columns import (
    DataSource,
    ExtraInfo,
    GroundTruth,
    RawPrompt,
    ResponseMask,
    ResponseText,
    RowId,
    TokenLevelScores,
)
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED, Signature
from flowrl.data.metrics import Metrics
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError, RewardError, type_of
from flowrl.operators.reward.pool import Outcome, Pool, ProcessWorker, ThreadWorker, Worker, process_pool
from flowrl.operators.reward.sources import FunctionSource, source_of
from flowrl.operators.reward.worker import NoScore, Scored, why_invalid
from flowrl.rewards.reward_function import RewardFunction, reads_prompt

logger = logging.getLogger(__name__)

TAKEN = frozenset({"mean", "min", "max", "errors"})
"""Reserved metrics under ``<log>/``."""

MAX_SCORE = torch.finfo(torch.float32).max


class Scorable(Protocol):
    """The columns of the response that a reward reads."""

    @property
    def response_text(self) -> ResponseText: ...
    @property
    def response_mask(self) -> ResponseMask: ...


class Verifiable(Protocol):
    """The columns of the prompt that a reward function reads."""

    @property
    def data_source(self) -> DataSource: ...
    @property
    def ground_truth(self) -> GroundTruth: ...
    @property
    def extra_info(self) -> ExtraInfo: ...
    @property
    def row_id(self) -> RowId: ...


class VerifiableWithPrompt(Verifiable, Protocol):
    """The columns of the prompt that a reward function with a ``prompt`` reads."""

    @property
    def raw_prompt(self) -> RawPrompt: ...


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Put each row's score on its last token on the mask, and 0 elsewhere; fully masked rows get no score.

    Args:
        scores: float ``[batch]``.
        response_mask: bool ``[batch response]``.

    Returns:
        float32 ``[batch response]``.
    """
    remaining = response_mask.flip(-1).cumsum(-1).flip(-1)  # tokens from this one on
    last = response_mask & (remaining == 1)
    return torch.where(last, scores.float().unsqueeze(-1), 0.0)


class Reward(Operator):
    """Score each response by a function with verl's signature, on the last token on the mask.

    The function is called by keyword, ``fn(data_source=, solution_str=, ground_truth=, extra_info=)``, and returns a
    finite number, or a dict with one under ``"score"``; further numbers in that dict are logged as ``<log>/<key>``
    (mean over the rows that have it), other entries are ignored. It should depend on its arguments only. It is not
    called for fully masked rows, which get no score.

    An importable function, or one of `flowrl.rewards`, runs in worker processes, which import its module and receive
    the arguments as JSON; a call that times out is terminated there, even in C code that holds the GIL. A lambda,
    closure, `functools.partial` or other callable object runs in threads of the main process, and so does a function
    of a running script without ``if __name__ == "__main__":`` (importing it would run the script again). There a call
    that times out continues in its thread, and one that holds the GIL cannot be interrupted; but a debugger works.

    Args:
        fn: a function, or a reference to one: ``"package.module:name"`` or ``"path/to/file.py:name"``. None is a
            placeholder for an edit, which sets the function or drops the node (if an environment gives the rewards).
        timeout: seconds allowed for one call.
        on_error: ``"raise"``, or the score of a row whose call raised, timed out, crashed or returned no finite number;
            ``<log>/errors`` counts such rows, and the first is logged.
        workers: number of parallel calls; None is one per CPU, at most 4.
        log: prefix of the metrics, such as ``reward/accuracy`` with several rewards (`WeighRewards`).

    Reads:
        rollout: `response_text` and `response_mask`.
        prompts: `data_source`, `ground_truth`, `extra_info`, `row_id`.

    Returns:
        `token_level_scores`, float32 ``[batch response]``. Metrics: ``<log>/mean, <log>/min, <log>/max``.

    Raises:
        ParameterError: on construction: the function does not exist, is async or does not accept these arguments;
            before anything is loaded: `fn` is None.
        RewardError: before anything is loaded: a worker cannot import the function, or it is async or does not accept
            these arguments. In a step: a call returned no score, and `on_error` is ``"raise"``; names the row.
        DataError: a value cannot be sent to a process as JSON; names row and column.
    """

    granularity: ClassVar[Granularity] = "row"
    references: ClassVar[frozenset[str]] = frozenset({"fn"})

    fn: Callable[..., Any] | str | None
    timeout: float = Field(default=10.0, gt=0, le=86400, strict=True)
    on_error: Literal["raise"] | Annotated[float, Field(allow_inf_nan=False, strict=True)] = "raise"
    workers: int | None = Field(default=None, ge=1, strict=True)
    log: str = "reward"

    def __post_init__(self) -> None:
        if self.fn is None:
            return
        if isinstance(self.fn, str):
            functions.check(self.fn)
        elif (message := why_invalid(self.fn, self._function_name)) is not None:
            raise ParameterError(message, code="reward.invalid-function", function=self._function_name)
        self._source  # noqa: B018 (the source file at this time)

    @property
    def own_ports(self) -> Signature:
        """The ports of `__call__`; `prompts` also has `raw_prompt` if the function reads it."""
        return _with_prompt if reads_prompt(self.fn) else self._signature

    def rehearse(self, tokenizer_of: Callable[[str], ChatTokenizer | None]) -> None:
        """Refuse to run without a function, or with one that cannot be imported or called."""
        if isinstance(self._function, str | RewardFunction):
            worker = self._worker()
            worker.start()
            worker.end()

    def __call__(self, rollout: Scorable, prompts: Verifiable, metrics: Metrics = INJECTED) -> TokenLevelScores:
        self._function  # noqa: B018
        rows = rollout.response_mask.any(-1).nonzero().flatten().tolist()
        calls = [self._arguments(rollout, prompts, row) for row in rows]
        scores = torch.zeros(len(rollout.response_mask), dtype=torch.float32)
        errors = 0
        with closing(self._outcomes(calls)) as outcomes:
            for row, outcome in zip(rows, outcomes, strict=True):
                scored = _checked(outcome)
                if isinstance(scored, NoScore):
                    message = self._describe(scored, prompts, row)
                    if self.on_error == "raise":
                        raise RewardError(message, code=scored.code, node=self.name, row=prompts.row_id[row])
                    if errors == 0:
                        logger.warning("%s Its score is on_error=%s.", message, self.on_error)
                    errors += 1
                    metrics.row(f"{self.log}/errors", prompts.row_id[row], 1.0)
                    scored = Scored(float(self.on_error), {})
                scores[row] = scored.score
                metrics.mean(f"{self.log}/mean", scored.score)
                metrics.min(f"{self.log}/min", scored.score)
                metrics.max(f"{self.log}/max", scored.score)
                metrics.row(f"{self.log}/score", prompts.row_id[row], scored.score)
                for key, value in scored.extras.items():
                    metrics.mean(f"{self.log}/{key}", value)
                    metrics.row(f"{self.log}/{key}", prompts.row_id[row], value)
        if self.on_error != "raise":
            metrics.sum(f"{self.log}/errors", errors)
        return place_scores(scores.to(rollout.response_mask.device), rollout.response_mask)

    @cached_property
    def _source(self) -> FunctionSource | None:
        """The importable function; None if it must run in this process."""
        return source_of(self._function)

    @property
    def _function(self) -> Callable[..., Any] | str:
        """`fn`; refuses None."""
        if self.fn is None:
            raise ParameterError(
                f"{self.name} has no reward function. Set one: edit(set={{'{self.name}.fn': score}}); if an "
                f"environment gives the rewards, drop the node: edit(drop=[{self.name!r}]).",
                code="reward.no-function",
                node=self.name,
            )
        return self.fn

    @property
    def _function_name(self) -> str:
        return self.fn if isinstance(self.fn, str) else getattr(self.fn, "__qualname__", repr(self.fn))

    def _arguments(self, rollout: Scorable, prompts: Verifiable, row: int) -> dict[str, Any]:
        columns = {
            "data_source": prompts.data_source,
            "solution_str": rollout.response_text,
            "ground_truth": prompts.ground_truth,
            "extra_info": prompts.extra_info,
            **({"prompt": cast("VerifiableWithPrompt", prompts).raw_prompt} if reads_prompt(self.fn) else {}),
        }
        if self._source is None:
            return {name: column[row] for name, column in columns.items()}
        arguments = {}
        for name, column in columns.items():
            try:
                arguments[name] = _plain(column[row])
            except (TypeError, RecursionError) as error:
                found = error if isinstance(error, TypeError) else "values that nest too deeply"
                column_name = {"solution_str": "response_text", "prompt": "raw_prompt"}.get(name, name)
                raise DataError(
                    f"{self.name}: {column_name} of row {prompts.row_id[row]!r} contains {found}, which cannot be sent "
                    f"as JSON to the worker processes of the reward function {self._function_name}. Use strings, "
                    f"numbers, booleans, None, lists and dicts with string keys only.",
                    code="reward.not-json",
                    node=self.name,
                    row=prompts.row_id[row],
                    column=column_name,
                ) from None
        return arguments

    def _outcomes(self, calls: Sequence[Mapping[str, Any]]) -> Generator[Outcome, None, None]:
        workers = self.workers or min(4, os.cpu_count() or 1)
        if self._source is not None:
            yield from process_pool(self._source, workers).results(calls, self.timeout)
            return
        pool = Pool(self._worker, workers)
        try:
            yield from pool.results(calls, self.timeout)
        finally:
            pool.close()

    def _worker(self) -> Worker:
        if self._source is not None:
            return ProcessWorker(self._source)
        fn = functions.resolve(self._function) if isinstance(self._function, str) else self._function
        return ThreadWorker(fn, self._function_name)

    def _describe(self, failure: NoScore, prompts: Verifiable, row: int) -> str:
        cls = type(self).__name__
        more_time = f", raise the limit by {cls}(..., timeout=...)" if failure.code == "reward.timeout" else ""
        details = f"\n{failure.traceback}\n" if failure.traceback else ""
        return (
            f"{self.name}: the reward function {self._function_name} {failure.what}, for row {prompts.row_id[row]!r} "
            f"(data_source {prompts.data_source[row]!r}, number {row} of {len(prompts.row_id)}). Fix the "
            f"function{more_time}, or score such rows by {cls}(..., on_error=0.0).{details}"
        )


_with_prompt = Reward._signature.retyped("prompts", VerifiableWithPrompt)  # one object: call layouts depend on it


def _checked(outcome: Outcome) -> Outcome:
    """The outcome, or a failure if the score is not finite or a metric has a reserved name."""
    if isinstance(outcome, NoScore):
        return outcome
    if not abs(outcome.score) <= MAX_SCORE:  # NaN compares false
        what = f"returned the score {outcome.score}, expected a finite number in the range of float32"
        return NoScore(what, "reward.invalid-score")
    if taken := TAKEN & outcome.extras.keys():
        what = f"returned a number named {min(taken)!r}, a reserved name, since reward/{min(taken)} is logged already"
        return NoScore(what, "reward.invalid-score")
    return outcome


def _plain(value: Any) -> Any:
    """`value` in JSON types, with NumPy numbers and arrays converted; raises `TypeError` for all others."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a dict with the key {key!r} ({type(key).__name__})")
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(type_of(value))
