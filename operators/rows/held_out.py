"""Validation metrics over several responses per prompt: pass@k and maj@k.

The functions are plain Python; the operators below them apply them to the groups of a batch, the rows that share a
`uid`, in order. A fully masked row counts as a response with score 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from flowrl import references
from flowrl.columns import ResponseMask, ResponseText, TokenLevelScores, Uid
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.data.proto.column_math import rows_of_groups
from flowrl.errors import DataError
from flowrl.operators.advantages.per_token import select_rewards


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The probability that one of k responses passes, given that c = `passed` of n did (Chen et al. 2021,
    arXiv:2107.03374, eq. 1).

    ``1 - C(n - c, k) / C(n, k)``: unbiased, unlike ``1 - (1 - c / n)^k``.

    Raises:
        DataError: there are fewer than k responses.
    """
    _refuse_fewer(f"pass@{k}", n, k)
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """The score of the most frequent of k answers, averaged over consecutive disjoint sets of k.

    Ties are broken at random, and the result is the expectation. The score of an answer is the mean of its responses.
    None is not a vote; without votes the score is 0. A remainder of fewer than k answers is ignored.

    Args:
        answers: the parsed answer of each response.
        scores: the score of each response.
        k: answers per set.
    """
    _refuse_fewer(f"maj@{k}", len(answers), k)
    sets = len(answers) // k
    return sum(_elected(answers[i * k : i * k + k], scores[i * k : i * k + k]) for i in range(sets)) / sets


def _refuse_fewer(metric: str, found: int, k: int) -> None:
    if found < k:
        raise DataError(
            f"{metric} needs {k} responses per prompt, and a prompt has {found}. Sample more, for example with "
            f"Repeat({k}).",
            code="rows.small-group",
            expected=k,
            found=found,
        )


def _elected(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    first = {answer for answer, count in votes.items() if count == most}
    return sum(s for a, s in zip(answers, scores, strict=True) if a in first) / (most * len(first)) if first else 0.0


class Estimated(NamedTuple):
    """A mean over the prompts of a batch."""

    mean: float


class PassAtK(Operator):
    """pass@k: the unbiased probability that one of k responses passes (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Metrics: ``pass@<k>``, the mean over prompts; see `pass_at_k`.

    Args:
        k: responses, at most as many as each prompt has.
        passed: a response passes if its score is above this value.

    Raises:
        DataError: a prompt has fewer than k responses.
    """

    granularity: ClassVar[Granularity] = "group"

    k: int = Field(default=1, ge=1)
    passed: float = 0.5

    @property
    def effects(self) -> frozenset[str]:
        """``{"several responses"}``, where `k` is more than 1."""
        return frozenset({Effect.SEVERAL_RESPONSES} if self.k > 1 else ())

    def __call__(
        self,
        token_level_scores: TokenLevelScores,
        response_mask: ResponseMask,
        uid: Uid,
        metrics: Metrics = INJECTED,
    ) -> Estimated:
        scores = _scores(token_level_scores, response_mask)
        found = [
            pass_at_k(len(rows), sum(scores[row] > self.passed for row in rows), self.k)
            for rows in rows_of_groups(uid).values()
        ]
        return _report(metrics, f"pass@{self.k}", found)


class MajorityAtK(Operator):
    """maj@k: the score of the most frequent of k answers to a prompt (Wang et al. 2022, arXiv:2203.11171).

    Metrics: ``maj@<k>``, the mean over prompts; see `majority_at_k`.

    Args:
        k: responses per vote, at most as many as each prompt has.
        parse: a function from a response's text to its answer (None for no vote), or a reference to one
            (``"package.module:name"``, ``"file.py:name"``). None uses the stripped text.

    Raises:
        DataError: a prompt has fewer than k responses.
    """

    granularity: ClassVar[Granularity] = "group"
    references: ClassVar[frozenset[str]] = frozenset({"parse"})

    k: int = Field(default=8, ge=1)
    parse: Callable[[str], Any] | str | None = None

    @property
    def effects(self) -> frozenset[str]:
        """``{"several responses"}``, where `k` is more than 1."""
        return frozenset({Effect.SEVERAL_RESPONSES} if self.k > 1 else ())

    def __post_init__(self) -> None:
        if isinstance(self.parse, str):
            references.check(self.parse)

    def __call__(
        self,
        response_text: ResponseText,
        token_level_scores: TokenLevelScores,
        response_mask: ResponseMask,
        uid: Uid,
        metrics: Metrics = INJECTED,
    ) -> Estimated:
        parse = references.resolve(self.parse) if isinstance(self.parse, str) else self.parse or str.strip
        votes = [parse(text) for text in response_text]
        scores = _scores(token_level_scores, response_mask)
        found = [
            majority_at_k([votes[row] for row in rows], [scores[row] for row in rows], self.k)
            for rows in rows_of_groups(uid).values()
        ]
        return _report(metrics, f"maj@{self.k}", found)


def _scores(token_level_scores: Tensor, response_mask: Tensor) -> list[float]:
    scores: list[float] = select_rewards(token_level_scores, response_mask, "token_level_scores").sum(-1).tolist()
    return scores


def _report(metrics: Metrics, key: str, found: Sequence[float]) -> Estimated:
    if found:
        metrics.mean(key, sum(found), len(found))
    return Estimated(sum(found) / max(1, len(found)))
