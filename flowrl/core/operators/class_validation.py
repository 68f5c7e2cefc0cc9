"""Validation of what an operator's class declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from flowrl.columns import ColumnType
from flowrl.core.operators.ports import snake_case
from flowrl.errors import DefinitionError

Granularity = Literal["row", "group", "batch"]


def refuse_misdeclared_class(cls: Any, base: Any, fields: Mapping[str, Any], where: str) -> None:
    """Raise a `DefinitionError` for class attributes of the wrong type, and for reserved names."""
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    _refuse_taken_names(cls, base, fields, where)
    if cls.__call__ is not base.__call__ and not hasattr(cls.__call__, "__wrapped__"):
        raise DefinitionError(
            f"{where} inherits __call__ from a class that is not an Operator, so it has no ports. Define __call__ in "
            f"the class itself, or derive the other class from Operator.",
            code="operator.no-call",
            where=where,
        )
    _refuse_attributes(cls, where)
    has_more = cls.more_ports is not base.more_ports or hasattr(cls, "loss") or "loss" in fields
    if ports and cls._signature.variadic and not has_more:
        raise DefinitionError(
            f"{where}.__call__ takes the columns of its loss, but the class has no field `loss`. Declare one: "
            f"`loss: Loss = PPOClip()`.",
            code="loss.missing-field",
            where=where,
        )


def _refuse_taken_names(cls: Any, base: type, fields: Mapping[str, Any], where: str) -> None:
    names = {*fields, *cls.states} - {"prior_updates"}  # which a subclass may make a parameter
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    if taken := next((name for name in sorted(names) if hasattr(base, name)), None):
        raise DefinitionError(
            f"{where}.{taken} is a parameter or state, but all operators have a member of that name. Rename it, or "
            f"write `{taken}: ClassVar[...] = ...` to set that member.",
            code="operator.name-taken",
            where=where,
            name=taken,
        )
    if both := next((name for name in ports if name in fields or name in cls.states), None):
        raise DefinitionError(
            f"{where}.{both} is both a port and a parameter or state. Rename one of them, so that "
            f"'{snake_case(cls.__name__)}.{both}' is unique.",
            code="operator.name-taken",
            where=where,
            name=both,
        )


def _refuse_attributes(cls: Any, where: str) -> None:
    """Refuse invalid granularity, new axes or replicated columns."""
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    outputs = cls._signature.outputs.values() if ports else ()
    axes = {axis for output in outputs if isinstance(output, ColumnType) for axis in output.axes}
    columns = {place.name for port in ports.values() for place in port.fields}
    are_axes = isinstance(cls.new_axes, tuple) and all(isinstance(axis, str) for axis in cls.new_axes)
    are_columns = isinstance(cls.replicated, frozenset) and (not ports or cls.replicated <= columns)
    granularities = get_args(Granularity)
    for what, found, valid, expected in (
        ("granularity", cls.granularity, cls.granularity in granularities, ", ".join(map(repr, granularities))),
        ("new_axes", cls.new_axes, are_axes, "a tuple of axes, such as ('batch',)"),
        (
            "new_axes",
            cls.new_axes,
            not ports or not are_axes or set(cls.new_axes) <= axes,
            f"a tuple of axes of its outputs: {', '.join(sorted(axes)) or 'none'}",
        ),
        (
            "replicated",
            cls.replicated,
            are_columns,
            f"a frozenset of columns that it reads: {', '.join(sorted(columns))}",
        ),
    ):
        if not valid:
            raise DefinitionError(
                f"{where}.{what} is {found!r}. Expected {expected}.",
                code="operator.invalid-attribute",
                where=where,
                attribute=what,
                found=repr(found),
            )
