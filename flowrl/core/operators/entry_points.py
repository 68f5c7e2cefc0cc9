"""Operators that installed packages bring: the entry-point group ``flowrl.operators``.

A package that names its operators there has them listed by ``flowrl operators``, and lets graph files write them by
their bare name (``$type: LengthPenalty``). In Python none of this is needed.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flowrl.core.operators.function import OfFunction
from flowrl.core.operators.operator import Operator
from flowrl.errors import GraphError

GROUP = "flowrl.operators"


def names() -> dict[str, EntryPoint]:
    """The entry points by name.

    Raises:
        GraphError: two packages bring different operators under one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            raise GraphError(
                f"two installed packages bring an operator named {point.name!r}: {known.value} and {point.value}; "
                f"write the one you mean by its import path, such as {point.value!r}."
            )
    return found


def load(name: str) -> Any:
    """The operator class that an installed package brings under `name`, or the operator that is a function.

    Raises:
        GraphError: there is none, or it is not an operator.
    """
    points = names()
    if name not in points:
        raise GraphError(
            f"{name!r} is not an import path, and no installed package brings an operator of that name; expected "
            f"'package.module:Class', or one of {', '.join(sorted(points)) or 'none'}."
        )
    found: Any = points[name].load()
    if not isinstance(found, OfFunction) and not (isinstance(found, type) and issubclass(found, Operator)):
        raise GraphError(
            f"the entry point {name!r} of the group {GROUP!r} names {points[name].value}, which is not an operator."
        )
    return found
