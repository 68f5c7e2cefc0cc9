"""`Explains`: an operator that explains one row of its outputs in words and numbers, for `RecordedRun.why`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
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


def number(value: Any) -> str:
    """A number as short text that reads back to the same bits."""
    if isinstance(value, Tensor):
        value = value.item() if value.dtype == torch.float64 else value.detach().cpu().numpy()[()]
    return (
        str(np.float32(value))
        if isinstance(value, np.float32)
        else str(float(value))
        if _is_float(value)
        else str(value)
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, float | np.floating)


def last_token(mask: Tensor, row: int) -> int | None:
    """The last token of a row on the mask; None if it has none."""
    on = mask[row].nonzero().flatten()
    return int(on[-1]) if len(on) else None
