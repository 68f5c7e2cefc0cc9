"""Record types: the column or value type of each field, and the tuple class of a record."""

from __future__ import annotations

import typing
from collections import namedtuple
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flowrl import columns
from flowrl.columns import ColumnType
from flowrl.errors import ColumnNotFoundError, DataError, DefinitionError, offer


@dataclass(frozen=True)
class ValueType:
    """A batchless value of class `cls`."""

    cls: type

    def __str__(self) -> str:
        return self.cls.__name__


FieldType = ColumnType | ValueType


def accepts(expected: FieldType, found: FieldType) -> bool:
    """Whether `found` may be wired to a field of type `expected`, regardless of axis *identity*."""
    if isinstance(expected, ColumnType):
        return isinstance(found, ColumnType) and expected.accepts(found)
    return isinstance(found, ValueType) and issubclass(found.cls, expected.cls)


def record_tuple(record: type) -> type:
    """The NamedTuple class of `record`: itself, or for a Protocol one with its properties."""
    return record if issubclass(record, tuple) else with_clear_attribute_errors(record)


_classes: dict[type, type] = {}


def with_clear_attribute_errors(record: type) -> type:
    """A NamedTuple class for `record` whose instances list their columns when a missing one is accessed."""
    if record not in _classes:
        base = record if issubclass(record, tuple) else namedtuple(record.__name__, list(record_columns(record)))
        _classes[record] = type(record.__name__, (base,), {"__slots__": (), "__getattr__": _refuse_attribute})
    return _classes[record]


def _refuse_attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):  # lookups of protocols (copy, numpy, pickle) expect a plain AttributeError
        raise AttributeError(name)
    raise ColumnNotFoundError(
        f"The record {type(self).__name__} has no column {name!r}: its class does not declare it; "
        f"{offer(name, self._fields)}",
        code="column.not-in-record",
        record=type(self).__name__,
        column=name,
        known=list(self._fields),
    )


def hints_of(target: Any, localns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The annotations of a function or class, which may use the module's names and `localns`."""
    try:
        return typing.get_type_hints(target, localns=dict(localns or {}), include_extras=True)
    except (NameError, AttributeError) as error:
        raise DefinitionError(
            f"An annotation uses a name that is not defined: {error}. Import it, or define the column or record above.",
            code="column.undefined-name",
            reason=str(error),
        ) from error


def record_columns(record: type, localns: Mapping[str, Any] | None = None) -> dict[str, FieldType]:
    """The columns (and batchless values) of a record class by field; empty for a class that is not a record.

    A NamedTuple lists its fields; a Protocol lists properties, its bases' first.
    """
    if issubclass(record, tuple) and hasattr(record, "_fields"):
        hints = hints_of(record, localns)
    elif getattr(record, "_is_protocol", False):
        hints = {}
        for base in reversed(record.__mro__):
            for name, member in vars(base).items():
                if isinstance(member, property) and member.fget is not None:
                    hints[name] = hints_of(member.fget, localns).get("return")
    else:
        return {}
    found = {name: columns.parse(hint) for name, hint in hints.items()}
    if not any(found.values()):
        return {}  # a plain value such as Receipt
    types: dict[str, FieldType] = {}
    for name, column in found.items():
        if column is None:
            with located(f"{record.__name__}.{name}"):
                types[name] = value_type(hints[name])
        else:
            types[name] = columns.register(column)
    return types


def column_fields(record: type) -> dict[str, str]:
    """Field to column name of a record class whose fields are all columns."""
    names: dict[str, str] = {}
    for field, slot in record_columns(record).items() if isinstance(record, type) else ():
        if not isinstance(slot, ColumnType):
            raise DataError(
                f"{record.__name__}.{field} is {slot}, not a column. Use a record of columns only.",
                code="column.not-a-record",
                record=record.__name__,
                field=field,
            )
        names[field] = slot.name
    if not names:
        raise DataError(
            f"{getattr(record, '__name__', repr(record))} is not a record of columns. Use a NamedTuple or Protocol as "
            f"in flowrl.records.",
            code="column.not-a-record",
            record=getattr(record, "__name__", repr(record)),
        )
    return names


_NO_VALUES = ("builtins", "torch", "numpy", "jaxtyping", "typing")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix the message of a definition error in the block with `where`."""
    try:
        yield
    except DefinitionError as error:
        code, facts = error.code, {**error.facts, "where": where}
        raise DefinitionError(f"{where}: {error.message}", code=code, **facts) from error


def value_type(annotation: Any) -> ValueType:
    # a bare tensor, array or number does not define what it contains
    if not isinstance(annotation, type) or annotation.__module__.partition(".")[0] in _NO_VALUES:
        raise DefinitionError(
            f"The annotation {getattr(annotation, '__name__', annotation)} is neither a column, a record of columns "
            f"nor a class of value. Use a column of flowrl.columns, or define one: "
            f'Annotated[Float32[Tensor, "batch response"], Column("my_column", "my kind")].',
            code="column.untyped",
            annotation=getattr(annotation, "__name__", str(annotation)),
        )
    return ValueType(annotation)
