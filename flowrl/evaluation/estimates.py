"""avg@n, pass@k and maj@k of the rows of an evaluation, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from flowrl.operators.rows.held_out import majority_at_k, pass_at_k


class Estimate(NamedTuple):
    """A mean over prompts with its standard error; the error is NaN for a single prompt."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.error) else f"{self.mean:.4f} ± {self.error:.4f}"


class Response(NamedTuple):
    """The score of a response, and the answer that it votes for; None for no vote."""

    score: float
    answer: Hashable | None


def estimates(prompts: Iterable[Sequence[Response]], k: Sequence[int], passed: float = 0.5) -> dict[str, Estimate]:
    """The metrics of an evaluation by name.

    ``avg@<n>`` is the mean score of the n responses to a prompt, ``pass@<k>`` the probability that one of k responses
    passes (`pass_at_k`), and ``maj@<k>``, for k above 1, the score of the most frequent answer (`majority_at_k`). Each
    is averaged over prompts. The responses to a prompt are not independent, so the standard error clusters by prompt
    (Miller 2024, arXiv:2411.00640): it is that of one value per prompt, ``s / sqrt(N)`` with sample deviation ``s``.

    Args:
        prompts: the responses of each prompt, n of each.
        k: of pass@k and maj@k, each at most n.
        passed: a response passes if its score is above this value.
    """
    groups = list(prompts)
    found = {f"avg@{len(groups[0])}": _estimate([_mean([one.score for one in group]) for group in groups])}
    for size in k:
        counts = [(len(group), sum(one.score > passed for one in group)) for group in groups]
        found[f"pass@{size}"] = _estimate([pass_at_k(n, right, size) for n, right in counts])
    for size in (size for size in k if size > 1):
        votes = [([one.answer for one in group], [one.score for one in group]) for group in groups]
        found[f"maj@{size}"] = _estimate([majority_at_k(*vote, size) for vote in votes])
    return found


def as_metrics(found: Mapping[str, Estimate], prefix: str) -> dict[str, float]:
    """The estimates as metrics, the standard errors under ``<name>/stderr``."""
    means = {f"{prefix}/{name}": one.mean for name, one in found.items()}
    return means | {f"{prefix}/{name}/stderr": one.error for name, one in found.items()}


def _estimate(values: Sequence[float]) -> Estimate:
    """The mean of a value per prompt, and its standard error."""
    mean, count = _mean(values), len(values)
    if count == 1:
        return Estimate(mean, math.nan)
    return Estimate(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
