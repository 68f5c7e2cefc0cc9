"""`Explains`: an operator that explains one row of its outputs in words and numbers, for `RecordedRun.why`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor


@runtime_checkable
class Explains(Protocol):
    """An operator with an explanation."""

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """The formula of one row with its numbers, in a line or a few; empty if there is nothing to say.

        It is called on the operator as it was in the step: schedules are numbers, and state cells have their value.

        Args:
            inputs: the columns that the node read, with all rows, by the name of the port or of the record's field.
            outputs: the columns that it wrote.
        """
        ...


def exact(value: Any) -> str:
    """A number as the shortest text that reads back to the same bits: as float32 if it is one, else as float64."""
    value = value.detach().cpu().numpy()[()] if isinstance(value, Tensor) else value
    if isinstance(value, float | np.floating) and np.float32(value) == value:
        return str(np.float32(value))
    return str(value)


def tokens_on(mask: Tensor, row: int) -> list[int]:
    """The tokens of a row on the mask."""
    found: list[int] = mask[row].nonzero().flatten().tolist()
    return found
