"""Imports on first use, so that importing flowrl costs nothing, and of optional packages."""

from __future__ import annotations

import importlib
import logging
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


def hide_warnings_of_torchao() -> None:
    """Hide what torchao logs when transformers imports it, whether or not it is used: kernels that it cannot load on
    this machine, none of which flowrl calls, and torch's warning about enums of torchao."""

    def shows(record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        enum = any(str(getattr(one, "__module__", "")).startswith("torchao.") for one in arguments)
        return not (enum or str(record.msg).startswith("Failed to load "))

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(shows)
