"""Metrics that merge exactly: a numerator with a denominator, or a number with the name of its reduction.

Ranks and micro-batches report parts, which merge to the number that one process would report over all rows, unlike a
mean of means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.errors import ParameterError

Reduction = Literal["mean", "sum", "min", "max", "groups"]
Number = float | int | Tensor
OfTokens = tuple[Tensor, Tensor]
"""The numbers of rows, int64 ``[rows]``, and values of their tokens, ``[rows response]``."""


@dataclass(frozen=True)
class Metric:
    """One number on its way to the log; for a mean, `value` is the numerator and `weight` the denominator."""

    reduction: Reduction
    value: float
    weight: float = 1.0

    def merge(self, other: Metric) -> Metric:
        """Both parts together."""
        if self.reduction != other.reduction:
            raise ParameterError(
                f"A metric is reported both as {self.reduction} and as {other.reduction}. Use one reduction, or two "
                f"names.",
                code="metrics.mixed-reductions",
                reductions=[self.reduction, other.reduction],
            )
        if self.reduction in ("mean", "sum"):
            return Metric(self.reduction, self.value + other.value, self.weight + other.weight)
        return self if (self.value <= other.value) == (self.reduction == "min") else other

    def compute(self) -> float:
        """The number; a mean over nothing is NaN."""
        if self.reduction == "mean":
            return self.value / self.weight if self.weight else float("nan")
        return self.value


@dataclass(frozen=True)
class GroupScores(Metric):
    """The scores of groups; logged as the fraction of groups whose responses do not all have the same score.

    Parts merge by concatenation.
    """

    reduction: Reduction = "groups"
    value: float = 0.0
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def merge(self, other: Metric) -> GroupScores:
        """Both parts together."""
        if not isinstance(other, GroupScores):
            raise ParameterError(
                f"A metric is reported both as groups and as {other.reduction}. Use two names.",
                code="metrics.mixed-reductions",
                reductions=["groups", other.reduction],
            )
        uids = [*self.scores, *(uid for uid in other.scores if uid not in self.scores)]
        return GroupScores(scores={uid: self.scores.get(uid, ()) + other.scores.get(uid, ()) for uid in uids})

    def compute(self) -> float:
        """The fraction of groups with different scores; NaN without groups."""
        differ = [len(set(scores)) > 1 for scores in self.scores.values()]
        return sum(differ) / len(differ) if differ else float("nan")


class Metrics(Mapping[str, Metric]):
    """The metrics of an operator: ``metrics.mean("actor/entropy", (h * mask).sum(), mask.sum())``.

    An operator that reports metrics has a parameter ``metrics: Metrics = INJECTED``; the executor passes a new
    collector to every call. Reporting a key twice merges the two parts.

    The operator's own reports cover the rows of its call. Metrics that it merges come from an engine: if several ranks
    process the same rows, each rank's engine reports its own part (`parts`).
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric] | None = None,
        parts: Mapping[str, Metric] | None = None,
        rows: Mapping[str, Mapping[str, float]] | None = None,
        columns: Mapping[str, OfTokens] | None = None,
    ) -> None:
        self._metrics: dict[str, Metric] = dict(metrics or {})
        self._parts: dict[str, Metric] = dict(parts or {})
        of_rows = rows if rows is not None else metrics.rows if isinstance(metrics, Metrics) else {}
        self._rows: dict[str, dict[str, float]] = {key: dict(values) for key, values in of_rows.items()}
        of_metrics = metrics.columns if isinstance(metrics, Metrics) else {}
        self._columns: dict[str, OfTokens] = dict(of_metrics if columns is None else columns)
        self.of_tokens: dict[str, tuple[Tensor, Tensor]] = {}

    def mean(self, key: str, numerator: Number, denominator: Number = 1.0) -> None:
        """Report ``numerator / denominator``; parts merge as sum of numerators over sum of denominators."""
        _add(self._metrics, key, Metric("mean", float(numerator), float(denominator)))

    def tokens(self, key: str, values: Tensor, mask: Tensor) -> None:
        """Report the mean of `values` ``[rows response]``, which are 0 off `mask`, over the tokens on `mask`.

        The sums and counts of the rows of the newest report are in ``of_tokens``.
        """
        self.mean(key, values.sum(), mask.sum())
        self.of_tokens[key] = values.sum(-1), mask.sum(-1)

    def sum(self, key: str, value: Number) -> None:
        """Report a number whose parts add up."""
        _add(self._metrics, key, Metric("sum", float(value)))

    def min(self, key: str, value: Number) -> None:
        """Report a number; of its parts, the smallest counts."""
        _add(self._metrics, key, Metric("min", float(value)))

    def max(self, key: str, value: Number) -> None:
        """Report a number; of its parts, the largest counts."""
        _add(self._metrics, key, Metric("max", float(value)))

    def groups(self, key: str, scores: Mapping[str, Sequence[float]]) -> None:
        """Report the scores of groups, by `uid`, so that samplers can learn from them."""
        _add(self._metrics, key, GroupScores(scores={str(uid): tuple(map(float, s)) for uid, s in scores.items()}))

    def row(self, key: str, row_id: str, value: Number) -> None:
        """Report a number of one row: not a metric, but a column of the run's row summaries."""
        self._rows.setdefault(key, {})[str(row_id)] = float(value)

    def column(self, key: str, rows: Tensor, values: Tensor) -> None:
        """Report numbers of tokens, float32 ``[rows response]``, of the rows with these numbers in the step, int64
        ``[rows]``: not a metric, but a column that the run may record. The newest report of a row counts."""
        rows, values = rows.cpu(), values.cpu()
        if (known := self._columns.get(key)) is not None:
            others = ~torch.isin(known[0], rows)  # ranks that are given all rows report the same ones
            rows, values = torch.cat([known[0][others], rows]), torch.cat([known[1][others], values])
        self._columns[key] = rows, values

    @property
    def columns(self) -> Mapping[str, OfTokens]:
        """The reported numbers of tokens: by key, the numbers of their rows, and the values."""
        return self._columns

    @property
    def rows(self) -> Mapping[str, Mapping[str, float]]:
        """The reported numbers of rows, by key and `row_id`."""
        return self._rows

    def scores(self) -> dict[str, tuple[float, ...]]:
        """All reported scores of groups."""
        found = GroupScores()
        for metric in self._metrics.values():
            if isinstance(metric, GroupScores):
                found = found.merge(metric)
        return dict(found.scores)

    def merge(self, other: Mapping[str, Metric]) -> None:
        """Merge the parts of `other` into this collector."""
        for key, metric in other.items():
            _add(self._metrics, key, metric)
            _add(self._parts, key, metric)
        for key, values in other.rows.items() if isinstance(other, Metrics) else ():
            self._rows.setdefault(key, {}).update(values)
        for key, of_tokens in other.columns.items() if isinstance(other, Metrics) else ():
            self.column(key, *of_tokens)

    def parts(self) -> Mapping[str, Metric]:
        """Only the merged parts."""
        return self._parts

    def compute(self) -> dict[str, float]:
        """Every key with its number, in the order of first report."""
        return {key: metric.compute() for key, metric in self._metrics.items()}

    def __getitem__(self, key: str) -> Metric:
        return self._metrics[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Metrics({self.compute()})"

    def __reduce__(self) -> Any:
        return Metrics, (self._metrics, self._parts, self._rows, self._columns)


def of_ranks(reports: Sequence[Metrics], replicated: bool) -> Metrics:
    """The metrics of a node that several data ranks ran.

    With `replicated`, every rank processed all rows, so the operator's own reports are the same on all ranks.
    """
    merged = Metrics(reports[0])
    for report in reports[1:]:
        merged.merge(Metrics(report.parts(), rows=report.rows, columns=report.columns) if replicated else report)
    return merged


def _add(metrics: dict[str, Metric], key: str, metric: Metric) -> None:
    known = metrics.get(key)
    try:
        metrics[key] = metric if known is None else known.merge(metric)
    except ParameterError as error:
        code, facts = error.code, {**error.facts, "metric": key}
        raise ParameterError(f"{key!r}: {error.message}", code=code, **facts) from None
