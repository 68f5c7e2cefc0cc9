"""`EarlyStopping` and `Best`: what a run makes of the metrics of its validations.

Both are functions of the lines that validations wrote, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from flowrl.errors import ParameterError, offer
from flowrl.spec import Spec

Mode = Literal["max", "min"]
Lines = Sequence[Mapping[str, Any]]


class Value(NamedTuple):
    """The value of a metric after a step."""

    step: int
    value: float


class Best(Spec):
    """The best value of a validation's metric, after any step of the training; of equal ones the first.

    Args:
        metric: such as ``"val/reward/mean"``.
        mode: whether a larger (``"max"``) or a smaller (``"min"``) value is better.
    """

    schedulable = False

    metric: str = Field(min_length=1)
    mode: Mode = "max"

    def of(self, lines: Lines, steps: Iterable[int]) -> Value | None:
        """The best value in the lines of these steps; None if there is none."""
        among, best = set(steps), None
        for found in _values(lines, self.metric):
            if found.step in among and (best is None or _gain(found.value, best.value, self.mode) > 0):
                best = found
        return best


class EarlyStopping(Spec):
    """Ends a run when a metric of a validation no longer improves.

    The value before the first step is the first to improve on.

    Args:
        metric: such as ``"val/reward/mean"``.
        patience: validations in a row without an improvement after which the run ends.
        mode: whether a larger (``"max"``) or a smaller (``"min"``) value is better.
        min_delta: an improvement exceeds the best value by more than this.
    """

    schedulable = False

    metric: str = Field(min_length=1)
    patience: int = Field(default=3, ge=1)
    mode: Mode = "max"
    min_delta: float = Field(default=0.0, ge=0)

    def reason(self, lines: Lines) -> str | None:
        """Why a run with these lines ends; None if it continues."""
        best: Value | None = None
        waited = 0
        for found in _values(lines, self.metric):
            if best is None or _gain(found.value, best.value, self.mode) > self.min_delta:
                best, waited = found, 0
            else:
                waited += 1
        if best is None or waited < self.patience:
            return None
        return f"{self.metric} has not improved on {best.value:g} of step {best.step} in {waited} validations"


def refuse_unknown_metric(setting: str, metric: str, names: Sequence[str]) -> None:
    """Refuse a metric that no validation of these names can report; raises ValueError."""
    if not any(metric.startswith(f"{name}/") for name in names):
        has = f"the validations are {', '.join(names)}; pass" if names else "there is none; pass validation= and"
        example = f"{names[0] if names else 'val'}/reward/mean"
        raise ValueError(f"{setting}={metric!r} is not a metric of a validation: {has} a metric such as {example!r}")


def refuse_unreported_metric(setting: str, metric: str, lines: Lines) -> None:
    """Refuse a metric that the first validations do not report.

    Raises:
        ParameterError: it is in none of the lines.
    """
    if not any(metric in line for line in lines):
        reported = sorted({key for line in lines for key in line} - {"step"})
        raise ParameterError(
            f"{setting} reads {metric!r}, which no validation reports; {offer(metric, reported, 'they report')}",
            code="run.validation",
            missing=metric,
            found=reported,
        )


def _values(lines: Lines, metric: str) -> Iterator[Value]:
    """The finite values of a metric, in the order of steps."""
    for line in lines:
        if metric in line and math.isfinite(line[metric]):
            yield Value(line["step"], line[metric])


def _gain(new: float, old: float, mode: Mode) -> float:
    """By how much `new` is better."""
    return new - old if mode == "max" else old - new
