"""`Recording`: what a run records of its rows, and for how long."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from flowrl.spec import Spec

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class Recording(Spec):
    """What a run writes of its rows; summaries, a row of ``rows/`` for each sampled row, are always written.

    Recording changes no number of the run. Columns are a flight recorder: the newest `recent` steps are retained, and
    for good the first and the last step, every `every`-th, those with a checkpoint, and those that an alarm points at,
    with the step before and after.

    Args:
        texts: steps between two steps whose prompts, responses and episodes are written to ``texts/``; None writes
            none.
        columns: ``"recent"`` as above; ``"all"`` retains the columns of every step, within the budget; None writes
            none.
        recent: how many of the newest steps retain their columns.
        every: steps between two steps whose columns are retained; None retains none for this reason.
        budget: limit of ``columns/`` on disk, such as ``"5GB"``, or a number of bytes. Beyond it the oldest steps are
            removed first, those with alarms last; ``run.json`` lists them.
        strict: end the run if recording fails; otherwise the run continues without recording, and logs that once.

    Raises:
        ParameterError: the budget is not a size.
    """

    schedulable = False

    texts: int | None = Field(default=1, ge=1)
    columns: Literal["recent", "all"] | None = "recent"
    recent: int = Field(default=20, ge=1)
    every: int | None = Field(default=50, ge=1)
    budget: str | int = "5GB"
    strict: bool = False

    @field_validator("budget")
    @classmethod
    def _refuse_no_size(cls, budget: str | int) -> str | int:
        _bytes_of(budget)
        return budget

    @property
    def bytes(self) -> int:
        """The budget in bytes."""
        return _bytes_of(self.budget)

    @property
    def wants_columns(self) -> bool:
        """Whether columns are written at all."""
        return self.columns is not None


def _bytes_of(budget: str | int) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?b?)\s*", str(budget).lower())
    unit = "" if found is None else found[2] if found[2] in _UNITS else f"{found[2]}b"
    if found is None or not float(found[1]):
        raise ValueError(f"{budget!r} is not a size; pass a number of bytes, or text such as '5GB' or '500MB'")
    return int(float(found[1]) * _UNITS[unit])
