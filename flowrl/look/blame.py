"""`blame`: the rows that make a metric of a step, or its change since another step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from flowrl.errors import DataError, ParameterError, offer
from flowrl.run.alarms.shares import blamable, shares

_SHOWN = ("row_id", "prompt", "score", "response_tokens", "advantage", "fate")


class HasRows(Protocol):
    """What `blame` reads of a run; see `RecordedRun`."""

    @property
    def path(self) -> Path: ...
    @property
    def steps(self) -> Sequence[int]: ...
    @property
    def metrics(self) -> pa.Table: ...
    def rows(self, step: int | None = None) -> pa.Table: ...


@dataclass(frozen=True)
class Blame:
    """The rows of a metric.

    Args:
        metric: its name.
        step: counted from 1.
        value: the metric in this step.
        against: the other step; None without one.
        before: the metric in that step.
        rows: the rows, largest share first, with `value` (what the row has of the metric) and `share` (of the metric,
            or of its change; shares add up to 1).
        half: how many of the first rows make half.
        basis: how shares are computed.
    """

    metric: str
    step: int
    value: float | None
    against: int | None
    before: float | None
    rows: pa.Table
    half: int
    basis: str

    def __str__(self) -> str:
        what = f"{self.metric} of step {self.step} is {_number(self.value)}"
        if self.against is not None:
            what += f", and {_number(self.before)} in step {self.against}"
        of = "it" if self.against is None else "the change"
        return f"{what}. {self.half} of {len(self.rows)} rows make half of {of}. Basis: {self.basis}."


def blame(run: HasRows, metric: str, step: int | None = None, against: int | None = None) -> Blame:
    """The rows of a step by their share in a metric.

    Args:
        metric: such as ``"kl/ref"``, or a column of the row summaries.
        step: counted from 1; None is the newest.
        against: another step; shares are then of the change since.

    Raises:
        ParameterError: no column of the rows holds the metric.
        DataError: the run has no row summaries of the step, or no metrics of one of the steps.
    """
    number = step if step is not None else max(run.steps, default=0)
    table = run.rows(number)
    value = _metric(run, metric, number)
    before = None if against is None else _metric(run, metric, against)
    if against is not None and before is None:
        raise DataError(
            f"{run.path} has no {metric} in step {against}. Compare with another step.",
            code="look.not-recorded",
            path=run.path,
            step=against,
            found=metric,
        )
    found = shares(table, metric, before)
    if found is None:
        known = blamable(table)
        raise ParameterError(
            f"No column of the rows of {run.path} holds {metric}{'' if before is None else ' and its change'}; "
            f"{offer(metric, known, 'they hold')}",
            code="look.invalid-query",
            argument="metric",
            found=metric,
            known=known,
        )
    rows = table.take(pa.array(found.rows))
    shown = rows.select([name for name in _SHOWN if name in rows.column_names])
    shown = shown.append_column("value", pa.array(found.values)).append_column("share", pa.array(found.shares))
    return Blame(metric, number, value, against, before, shown, len(found.half()), found.basis)


def _metric(run: HasRows, metric: str, step: int) -> float | None:
    """A metric of a step; None if it has none, as columns of rows that are no metric."""
    table = run.metrics
    if metric not in table.column_names:
        return None
    values: dict[int, float | None] = dict(zip(table["step"].to_pylist(), table[metric].to_pylist(), strict=True))
    return values.get(step)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
