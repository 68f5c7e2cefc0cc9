"""Operators of installed packages: the entry-point group ``flowrl.operators``.

``flowrl operators`` lists them, and graph files may name them without a module (``$type: LengthPenalty``).
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flowrl.core.operators.function import OfFunction
from flowrl.core.operators.operator import Operator
from flowrl.errors import GraphError, offer

GROUP = "flowrl.operators"


def names() -> dict[str, EntryPoint]:
    """The entry points by name; two operators of one name are an error."""
    found: dict[str, EntryPoint] = {}
    for point in _points(_modified()):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            raise GraphError(
                f"Two installed packages have an operator named {point.name!r}: {known.value} and {point.value}. "
                f"Write the import path instead of the name, such as {point.value!r}.",
                code="operator.entry-point",
                operator=point.name,
                found=[known.value, point.value],
            )
    return found


def _modified() -> tuple[tuple[str, int], ...]:
    """The folders that Python imports from, with the time in ns at which a package was last installed or removed."""
    return tuple((path, os.stat(path or ".").st_mtime_ns) for path in sys.path if os.path.exists(path or "."))


@lru_cache(maxsize=1)
def _points(modified: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """The entry points of the group; kept until the folders change, because this reads a file of every package."""
    return tuple(entry_points(group=GROUP))


def load(name: str) -> Any:
    """The operator class, or `@operator` function, that an installed package names `name`."""
    points = names()
    if name not in points:
        raise GraphError(
            f"{name!r} is not an import path, and no installed package has an operator of that name. Write "
            f"'package.module:Class', or an installed name; {offer(name, sorted(points), 'these are')}",
            code="operator.unknown-name",
            operator=name,
            known=sorted(points),
        )
    found: Any = points[name].load()
    if not isinstance(found, OfFunction) and not (isinstance(found, type) and issubclass(found, Operator)):
        raise GraphError(
            f"The entry point {name!r} of the group {GROUP!r} names {points[name].value}, which is not an operator. "
            f"Name a subclass of Operator or an @operator function.",
            code="operator.entry-point",
            operator=name,
            found=points[name].value,
        )
    return found
