"""`History`: what the rules of alarms read of a run: the steps up to one of them, and this step's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


Numbers = Mapping[str, float]


@dataclass(frozen=True)
class History:
    """The steps of a run up to the one that is judged.

    Args:
        steps: the metrics of each step, the judged one last.
        validations: the metrics of the validations until then.
        rows: the row summaries of the judged step; None if it has none.
        reported_by: by metric, the node that reports it.
        facts: what else is known of the run, such as why its recording stopped.
    """

    steps: Sequence[Numbers]
    validations: Sequence[Numbers] = ()
    rows: pa.Table | None = None
    reported_by: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The judged step, counted from 1."""
        return int(self.steps[-1]["step"])

    def keys(self, key: str) -> Iterator[str]:
        """The metrics of this name; a metric of two nodes has the node in front, such as ``update/kl/ref``."""
        return (name for name in self.steps[-1] if f"/{name}".endswith(f"/{key}"))

    def now(self, key: str) -> float | None:
        """The metric in the judged step; None if it is not there or not finite."""
        return _finite(self.steps[-1].get(key))

    def before(self, key: str, window: int | None = None) -> list[float]:
        """The finite values of a metric in so many steps before the judged one, or in all."""
        steps = self.steps[:-1] if window is None else self.steps[-1 - window : -1]
        return [value for step in steps if (value := _finite(step.get(key))) is not None]

    def newest(self, key: str, count: int) -> list[float] | None:
        """The values of the newest steps, the judged one last; None if there are fewer, or one is missing."""
        found = [_finite(step.get(key)) for step in self.steps[-count:]]
        values = [value for value in found if value is not None]
        return values if len(values) == count else None

    def column(self, name: str) -> list[Any]:
        """A column of the judged step's rows; empty if it is not there or has nulls."""
        if self.rows is None or name not in self.rows.column_names or self.rows[name].null_count:
            return []
        values: list[Any] = self.rows[name].to_pylist()
        return values


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
