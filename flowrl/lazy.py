"""Imports on first use, so that importing flowrl costs nothing, and of optional packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from flowrl.errors import DefinitionError


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        modules: by public name, the module that defines it, relative to the package; ``".protocols.backend"`` is one
            level up.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


def package(name: str, extra: str) -> ModuleType:
    """A package that an extra of flowrl installs; raises `DefinitionError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise DefinitionError(
            f"The package {name} is not installed. Run pip install 'flowrl[{extra}]'.",
            code="package.not-installed",
            package=name,
            extra=extra,
        ) from error
