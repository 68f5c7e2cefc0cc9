"""Public names in files: ``$type: TorchTrainer`` instead of the module and name."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from flowrl.core.operators import entry_points
from flowrl.errors import GraphError
from flowrl.references import imported

UNKNOWN = "operator.unknown-name"
"""The code of the error about a name that nothing has."""
MODULES = ("flowrl", "flowrl.backends", "flowrl.operators", "flowrl.schedules", "flowrl.run.alarms")
"""The modules whose public names files may use; imported by name, when a file has one."""


def public(name: str) -> Any | None:
    """The class of flowrl with a public name; None if there is none."""
    for module in map(import_module, MODULES):
        if name in module.__all__ and isinstance(found := getattr(module, name), type):
            return found
    return None


def named(name: str) -> Any:
    """The object that a file names without a module: an installed operator, or a public class of flowrl.

    Raises:
        GraphError: there is none.
    """
    if name not in entry_points.names():
        if (found := public(name)) is not None:
            return found
        known = {one for module in MODULES for one in import_module(module).__all__} - {name}
        if near := difflib.get_close_matches(name, sorted(known), n=1):
            raise GraphError(
                f"{name!r} is not an import path, and neither flowrl nor an installed package has that name; did you "
                f"mean {near[0]!r}?",
                code="operator.unknown-name",
                operator=name,
                known=near,
            )
    return entry_points.load(name)


def short(path: str) -> str:
    """The public name of the object at an import path; else the path."""
    name = path.rpartition(":")[2]
    return name if name.isidentifier() and public(name) is not None and public(name) is imported(path) else path
