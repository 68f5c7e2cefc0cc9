"""`Spec`: a frozen, validated record of parameters; operators, losses and backends are specs.

A subclass is turned into a frozen pydantic dataclass where it is defined, so ``Repeat(8)`` and ``GAE(gamma=0.99)`` both
work, unknown or ill-typed parameters are refused at once, and equality is by value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from flowrl.errors import DefinitionError, ParameterError

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, strict=False, validate_default=False)


@dataclass_transform(frozen_default=True, field_specifiers=(Field, dataclasses.field))
class Spec:
    """Base of everything that is declared by its parameters.

    Raises:
        DefinitionError: where the subclass is defined, for a field without annotation or with a mutable default.
        ParameterError: where it is called, for parameters that are missing, unknown or out of range.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_untyped_fields(cls)
        try:
            pydantic_dataclass(cls, frozen=True, config=_CONFIG)
        except (ValueError, TypeError) as error:
            raise DefinitionError(f"{where_defined(cls)}: {cls.__name__} is not well formed: {error}") from error
        raise_parameter_errors(cls)


def where_defined(cls: type) -> str:
    """``file:line`` of a class, as well as it can be known."""
    module = inspect.getmodule(cls)
    file = getattr(module, "__file__", None) or cls.__module__
    try:
        return f"{file}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return str(file)


def _refuse_untyped_fields(cls: type) -> None:
    """A plain ``gamma = 0.9`` would be a class attribute that cannot be set, and a list default would be shared."""
    annotations = cls.__dict__.get("__annotations__", {})
    constants = {
        n for base in cls.__mro__ for n, a in base.__dict__.get("__annotations__", {}).items() if "ClassVar" in str(a)
    }
    for name, value in cls.__dict__.items():
        if name.startswith("_") or name in constants:
            continue
        if isinstance(value, list | dict | set) or (
            isinstance(getattr(value, "default", None), list | dict | set) and name in annotations
        ):
            raise DefinitionError(
                f"{where_defined(cls)}: {cls.__name__}.{name} has the mutable default {value!r}, which all instances would "
                f"share; use a tuple, or Field(default_factory=...)."
            )
        plain = isinstance(value, str | int | float | bool | tuple | type(None))
        if plain and name not in annotations:
            raise DefinitionError(
                f"{where_defined(cls)}: {cls.__name__}.{name} = {value!r} has no annotation, so it could not be set; write "
                f"`{name}: {type(value).__name__} = {value!r}` (or ClassVar[...] where it is a constant)."
            )


def raise_parameter_errors(cls: type) -> None:
    """Make the constructor of `cls` raise `ParameterError` in place of pydantic's own error."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise ParameterError(_describe(cls, error)) from None

    cls.__init__ = __init__  # type: ignore[misc]


def _describe(cls: type, error: ValidationError) -> str:
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    parts = []
    for e in error.errors():
        # pydantic names a positional argument by its index
        location = (
            ".".join(names[p] if isinstance(p, int) and p < len(names) else str(p) for p in e["loc"]) or "arguments"
        )
        parts.append(f"{location}={e['input']!r}: {e['msg']}" if e["type"] != "missing" else f"{location} is missing")
    signature = ", ".join(f"{f.name}: {f.type}" for f in dataclasses.fields(cls))  # type: ignore[arg-type]
    return f"{cls.__name__}(...) was given {'; '.join(parts)}. It takes {cls.__name__}({signature})."
