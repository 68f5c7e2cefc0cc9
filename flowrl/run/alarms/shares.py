"""Which rows make a mean metric, and its change: the contribution of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

HALF = 0.5
_TOKENS = "tokens"
_ROWS = "rows"
_MEANS = "means"

_COLUMNS = {
    "kl/ref": ("kl", _TOKENS),
    "reward/mean": ("score", _ROWS),
    "response_length/mean": ("response_tokens", _ROWS),
    "response_length/clip_ratio": ("truncated", _ROWS),
    "rollout/logp_diff_max": ("mismatch", _ROWS),
    "rollout/logp_diff_mean": ("mismatch", _ROWS),
    "advantage/mean": ("advantage", _ROWS),
    "actor/entropy": ("entropy", _MEANS),
    "actor/pg_clipfrac": ("clipped", _MEANS),
}
"""By metric, the column of the row summaries whose mean it is: over tokens, of sums or means of a row, or over rows."""

_BY_SIZE = ("grad_norm", "actor/entropy", "actor/approx_kl", "actor/pg_loss", "actor/pg_clipfrac")
"""Metrics that no column may hold: their rows are ordered by the weight in the loss times the size of the advantage."""

BASIS_OF_SIZE = "loss weight times the size of the advantage, since no column of the rows holds this metric"


@dataclass(frozen=True)
class Shares:
    """The rows of a metric, largest contribution first.

    Args:
        rows: their numbers in the table.
        values: what each row has of the metric.
        shares: what each contributes, as a fraction of the metric, or of its change; they add up to 1.
        total: the metric, or its change, as computed from the rows.
        basis: how contributions are computed.
    """

    rows: Any
    values: Any
    shares: Any
    total: float
    basis: str

    def half(self) -> Any:
        """The fewest rows that make half of it."""
        enough = int(np.searchsorted(np.cumsum(self.shares), HALF - 1e-12)) + 1
        return self.rows[:enough]


def shares(table: pa.Table, metric: str, against: float | None = None) -> Shares | None:
    """The rows by their share in a metric, or in its change from another value; None if no column holds it.

    Args:
        against: the value of the metric that the change is measured from.
    """
    found = _values(table, metric)
    if found is None or not len(found[0]):
        return None
    values, weights, basis = found
    if against is not None and basis == BASIS_OF_SIZE:
        return None
    parts = weights * (values if against is None else values - against)
    total = float(parts.sum())
    relative = parts / total if total else np.zeros(len(parts))
    order = np.argsort(-relative, kind="stable")
    return Shares(order, values[order], relative[order], total, basis)


def blamable(table: pa.Table) -> list[str]:
    """The metrics that the columns of a table hold."""
    own = [name for name in table.column_names if "/" in name]
    return [*(metric for metric, (column, _) in _COLUMNS.items() if _has(table, column)), *own]


def _values(table: pa.Table, metric: str) -> tuple[Any, Any, str] | None:
    """What each row has of a metric, its weight in the mean, and how both were found."""
    known = next((found for key, found in _COLUMNS.items() if f"/{metric}".endswith(f"/{key}")), None)
    if known is None and metric in table.column_names:
        known = metric, _ROWS
    if known is not None and _has(table, known[0]):
        column, unit = known
        tokens = _numbers(table, "response_tokens")
        values = _numbers(table, column)
        live = np.isfinite(values)
        if unit == _ROWS:
            basis = f"the mean of {column} over {live.sum()} rows"
            return np.where(live, values, 0.0), live / max(1, live.sum()), basis
        per_token = np.where(live, values, 0.0) / (1 if unit == _MEANS else np.maximum(tokens, 1))
        count = tokens[live].sum()
        basis = f"the mean of {column} over the {count:.0f} tokens of {live.sum()} rows"
        return per_token, np.where(live, tokens, 0) / max(1, count), basis
    if metric.endswith(_BY_SIZE) and _has(table, "loss_weight") and _has(table, "advantage_max"):
        sizes = np.abs(np.nan_to_num(_numbers(table, "advantage_max")) * np.nan_to_num(_numbers(table, "loss_weight")))
        return sizes, np.ones(len(sizes)), BASIS_OF_SIZE
    return None


def _has(table: pa.Table, column: str) -> bool:
    return column in table.column_names and table[column].null_count < len(table)


def _numbers(table: pa.Table, column: str) -> Any:
    return table[column].cast("double").to_numpy(zero_copy_only=False)
