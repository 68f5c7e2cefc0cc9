"""Detect operators that write into their input columns, which every later reader would silently see.

torch counts the writes to each tensor's memory, so comparing the counters costs nothing. Writes around the counter
(``tensor.data``, ``tensor.numpy()``) are not detected. Operators get arrays of objects as read-only views, so NumPy
refuses a write; writes into an object itself (such as a dict) are not detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flowrl.core.operators.ports import PortField
from flowrl.errors import InPlaceError

Versions = list[tuple[PortField, torch.Tensor, int]]
"""The input tensors of an operator, each with its write counter."""


def versions(inputs: Mapping[PortField, Any]) -> Versions:
    """The write counters before an operator runs; every call pays for this, about a microsecond."""
    tensors = [(place, c) for place, c in inputs.items() if type(c) is not np.ndarray and isinstance(c, torch.Tensor)]
    try:
        return [(place, column, column._version) for place, column in tensors]
    except RuntimeError:  # a tensor that was made under `torch.inference_mode` counts no writes
        return [(place, column, column._version) for place, column in tensors if not column.is_inference()]


def refuse_written(operator: Any, before: Versions) -> None:
    """Compare the write counters after the operator ran."""
    written = [place for place, column, version in before if column._version != version]
    if written:
        columns = list(dict.fromkeys(operator.signature.fields[place].name for place in written))
        raise InPlaceError(
            f"{operator.name} wrote into its input {', '.join(map(str, written))} (column {', '.join(columns)}), which "
            f"other nodes read as well. Write into a copy, x = x.clone(), or use the function without an underscore: "
            f"x.masked_fill(...) instead of x.masked_fill_(...).",
            code="operator.wrote-input",
            node=operator.name,
            port=[str(place) for place in written],
            column=columns,
        )


def guarded(column: Any) -> Any:
    """An array of objects as a read-only view; anything else unchanged."""
    if type(column) is not np.ndarray or not column.flags.writeable:
        return column
    view = column.view()
    view.setflags(write=False)
    return view
