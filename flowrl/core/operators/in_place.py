"""Who writes into a column that it was given: every later reader would see that, without a word.

torch counts the writes to the memory of each tensor, so a look before and a look after cost nothing. What writes around
the counter (``tensor.data``, ``tensor.numpy()``) is not seen. Arrays of objects are handed out read-only, and NumPy
refuses a write; what is written into an object itself (a dict, say) is not seen either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flowrl.core.operators.ports import PortField
from flowrl.errors import InPlaceError

Seen = list[tuple[PortField, torch.Tensor, int]]
"""The tensors that an operator is given, each with how often it had been written to."""


def seen(inputs: Mapping[PortField, Any]) -> Seen:
    """What an operator is given, as it is before it runs. This is on the way of every call: it takes a microsecond."""
    tensors = [(place, c) for place, c in inputs.items() if type(c) is not np.ndarray and isinstance(c, torch.Tensor)]
    try:
        return [(place, column, column._version) for place, column in tensors]
    except RuntimeError:  # a tensor that was made under `torch.inference_mode` counts no writes
        return [(place, column, column._version) for place, column in tensors if not column.is_inference()]


def refuse_written(operator: Any, before: Seen) -> None:
    """Look again, after it ran.

    Raises:
        InPlaceError: it wrote into a column; names both.
    """
    written = [place for place, column, version in before if column._version != version]
    if written:
        names = ", ".join(dict.fromkeys(operator.signature.fields[place].name for place in written))
        raise InPlaceError(
            f"{operator.name} wrote into the column {names} that it was given as {', '.join(map(str, written))}, so "
            f"whoever reads it later would get other numbers; write into a copy: x = x.clone(), or use the form "
            f"without an underscore (x.masked_fill(...) in place of x.masked_fill_(...))."
        )


def guarded(column: Any) -> Any:
    """An array of objects as a view that refuses to be written into; all else as it is."""
    if type(column) is not np.ndarray or not column.flags.writeable:
        return column
    view = column.view()
    view.setflags(write=False)
    return view
