"""What several answers to a held-out prompt are worth: pass@k and maj@k, as metrics of a validation.

The functions are plain Python; the operators below them take them over the groups of a batch. A group is the rows that
share a `uid`, in their order. A row that is masked entirely is an answer, too, with a score of 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from flowrl.columns import ResponseMask, ResponseText, TokenLevelScores, Uid
from flowrl.core.operators import references
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.data.proto.column_math import rows_of_groups
from flowrl.errors import DataError
from flowrl.operators.advantages.per_token import select_rewards


def pass_at_k(n: int, passed: int, k: int) -> float:
    """How likely one of k answers passes, from n of which `passed` did (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    ``1 - C(n - c, k) / C(n, k)``, exactly: unbiased, which ``1 - (1 - c / n)^k`` is not.

    Raises:
        DataError: there are fewer than k answers.
    """
    if n < k:
        raise DataError(f"pass@{k} takes {k} answers at a time, and a prompt has {n}; sample more, as by Repeat({k}).")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """What the most frequent of k answers scores, over the disjoint sets of k answers in their order.

    Among answers that are equally frequent one is drawn; this is what is expected of that. An answer's score is the
    mean of its rows'. Whatever is None has no vote; where nothing has one, the score is 0. Further answers, too few for
    a set, are left out.

    Args:
        answers: as they were parsed.
        scores: one an answer.
        k: answers of a set.

    Raises:
        DataError: there are fewer than k answers.
    """
    if len(answers) < k:
        raise DataError(
            f"maj@{k} takes {k} answers at a time, and a prompt has {len(answers)}; sample more, as by Repeat({k})."
        )
    sets = len(answers) // k
    return sum(_elected(answers[i * k : i * k + k], scores[i * k : i * k + k]) for i in range(sets)) / sets


def _elected(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    first = {answer for answer, count in votes.items() if count == most}
    return sum(s for a, s in zip(answers, scores, strict=True) if a in first) / (most * len(first)) if first else 0.0


class Estimated(NamedTuple):
    """The mean over the prompts of a batch."""

    mean: float


class PassAtK(Operator):
    """pass@k: how often one of k answers to a prompt passes, without bias (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Metrics: ``pass@<k>``, the mean over prompts; see `pass_at_k`.

    Args:
        k: answers that are tried, at most as many as a prompt has.
        passed: an answer passes where its score is above.

    Raises:
        DataError: a prompt has fewer than k answers.
    """

    granularity: ClassVar[Granularity] = "group"

    k: int = Field(default=1, ge=1)
    passed: float = 0.5

    @property
    def effects(self) -> frozenset[str]:
        """``{"several answers"}``, where `k` is more than 1."""
        return frozenset({Effect.SEVERAL_ANSWERS} if self.k > 1 else ())

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
    """maj@k: how often the most frequent of k answers to a prompt is right (Wang et al. 2022, arXiv:2203.11171).

    Metrics: ``maj@<k>``, the mean over prompts; see `majority_at_k`.

    Args:
        k: answers of a vote, at most as many as a prompt has.
        parse: a function of a response's text, or where to find one (``"package.module:name"``, ``"file.py:name"``):
            what it votes for, or None for no vote. None is the text without the spaces around it.

    Raises:
        DataError: a prompt has fewer than k answers.
    """

    granularity: ClassVar[Granularity] = "group"
    references: ClassVar[frozenset[str]] = frozenset({"parse"})

    k: int = Field(default=8, ge=1)
    parse: Callable[[str], Any] | str | None = None

    @property
    def effects(self) -> frozenset[str]:
        """``{"several answers"}``, where `k` is more than 1."""
        return frozenset({Effect.SEVERAL_ANSWERS} if self.k > 1 else ())

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
