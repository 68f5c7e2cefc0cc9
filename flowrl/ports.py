"""Ports: what an operator reads and writes, taken from the annotations of its `__call__`.

A port wants one column, a record of columns, or a batchless value such as `Updated`. A record port is flattened into
*slots* (``rollout.input_ids``), so that an edge always carries exactly one column or value and a plan knows just which
columns a node reads.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Union, get_args, get_origin

from flowrl import columns
from flowrl.columns import ColumnType
from flowrl.errors import ColumnNotFoundError, DefinitionError, offer
from flowrl.keys import Key
from flowrl.metrics import Metrics

INJECTED: Any = None
"""Default of a parameter that the executor fills in: ``key: Key = INJECTED`` or ``metrics: Metrics = INJECTED``."""

INJECTABLE: tuple[type, ...] = (Key, Metrics)


@dataclass(frozen=True)
class ValueType:
    """A batchless value of class `cls`."""

    cls: type

    def __str__(self) -> str:
        return self.cls.__name__


SlotType = ColumnType | ValueType


def accepts(wanted: SlotType, found: SlotType) -> bool:
    """Whether `found` may be wired to a slot of type `wanted` (axis *identity* aside)."""
    if isinstance(wanted, ColumnType):
        return isinstance(found, ColumnType) and wanted.accepts(found)
    return isinstance(found, ValueType) and issubclass(found.cls, wanted.cls)


@dataclass(frozen=True)
class Port:
    """One parameter of an operator.

    Args:
        name: the parameter's name.
        slots: slot name to type; a port of one column or value has one slot, named as the port.
        record: the record class, where the port takes a record.
        optional: declared ``X | None``.
    """

    name: str
    slots: Mapping[str, SlotType]
    record: type | None = None
    optional: bool = False

    def pack(self, values: Mapping[str, Any]) -> Any:
        """What the operator is called with, given the values of the slots; None for an optional port without any."""
        if any(slot not in values for slot in self.slots):
            return None
        if self.record is None:
            return values[self.name]
        fields = {slot.partition(".")[2]: values[slot] for slot in self.slots}
        return record_tuple(self.record)(**fields)


@dataclass(frozen=True)
class Signature:
    """All ports of an operator class, the parameters that the executor injects, and the outputs."""

    ports: Mapping[str, Port]
    injected: Mapping[str, type]
    outputs: Mapping[str, SlotType]
    output_record: type | None = None

    @cached_property
    def slots(self) -> Mapping[str, SlotType]:
        """Every input slot of every port."""
        return {slot: t for port in self.ports.values() for slot, t in port.slots.items()}

    def retyped(self, name: str, annotation: Any) -> Signature:
        """The same ports, but that the one named so wants what `annotation` says."""
        slots, record = _slots(name, annotation, {})
        return replace(self, ports={**self.ports, name: replace(self.ports[name], slots=slots, record=record)})

    def unpack(self, result: Any) -> dict[str, Any]:
        """What the operator returned, by output name."""
        if self.output_record is None:
            return {name: result for name in self.outputs}
        return {name: getattr(result, name) for name in self.outputs}


def record_tuple(record: type) -> type:
    """The NamedTuple class that carries `record`: itself, or for a Protocol one made of its properties."""
    return record if issubclass(record, tuple) else telling(record)


_telling: dict[type, type] = {}


def telling(record: type) -> type:
    """A NamedTuple class that fits `record`, and whose instances name their columns where one is asked for in vain."""
    if record not in _telling:
        base = record if issubclass(record, tuple) else namedtuple(record.__name__, list(record_columns(record)))
        _telling[record] = type(record.__name__, (base,), {"__slots__": (), "__getattr__": _refuse_attribute})
    return _telling[record]


def _refuse_attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):  # protocol look-ups (copy, numpy, pickle) expect a plain AttributeError
        raise AttributeError(name)
    raise ColumnNotFoundError(
        f"the record {type(self).__name__} has just the columns that its class declares, and no {name!r}; "
        f"{offer(name, self._fields)}"
    )


def hints_of(target: Any, localns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The annotations of a function or class, which may use the module's names and `localns`.

    Raises:
        DefinitionError: one names something that is not defined.
    """
    try:
        return typing.get_type_hints(target, localns=dict(localns or {}), include_extras=True)
    except (NameError, AttributeError) as error:
        raise DefinitionError(
            f"an annotation uses a name that is not defined: {error}; import it, or define the column or record above."
        ) from error


def record_columns(record: type, localns: Mapping[str, Any] | None = None) -> dict[str, SlotType]:
    """The columns (and batchless values) of a record class by field; empty for a class that is no record.

    A NamedTuple lists its fields; a Protocol lists properties, its bases' first.

    Raises:
        DefinitionError: a field that is neither a column nor a batchless value.
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
    slots: dict[str, SlotType] = {}
    for name, column in found.items():
        if column is None:
            with _located(f"{record.__name__}.{name}"):
                slots[name] = _value(hints[name])
        else:
            slots[name] = columns.register(column)
    return slots


_NO_VALUES = ("builtins", "torch", "numpy", "jaxtyping", "typing")


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Definition errors of the block say where."""
    try:
        yield
    except DefinitionError as error:
        raise DefinitionError(f"{where}: {error}") from error


def _value(annotation: Any) -> ValueType:
    # a bare tensor, array or number says nothing of what it holds
    if not isinstance(annotation, type) or annotation.__module__.partition(".")[0] in _NO_VALUES:
        raise DefinitionError(
            f"the annotation {getattr(annotation, '__name__', annotation)} is neither a column, a record of columns "
            f"nor a class of value; use a column of flowrl.columns, or define one: "
            f'Annotated[Float32[Tensor, "batch response"], Column("my_column", "my kind")].'
        )
    return ValueType(annotation)


def _slots(name: str, annotation: Any, localns: Mapping[str, Any]) -> tuple[dict[str, SlotType], type | None]:
    """Slots of one annotation, and the record class where it is a record."""
    column = columns.parse(annotation)
    if column is not None:
        return {name: columns.register(column)}, None
    if isinstance(annotation, type) and (fields := record_columns(annotation, localns)):
        return {f"{name}.{field}": t for field, t in fields.items()}, annotation
    return {name: _value(annotation)}, None


def signature_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Signature:
    """Read the ports of a `__call__`.

    Args:
        call: the function.
        where: ``file:line: Class`` for messages.
        localns: names that annotations may use besides the module's.

    Raises:
        DefinitionError: a parameter or the return value lacks an annotation, or has one that is no port.
    """
    with _located(f"{where}.__call__"):
        hints = hints_of(call, localns)
    ports: dict[str, Port] = {}
    injected: dict[str, type] = {}
    parameters = list(inspect.signature(call).parameters.values())[1:]
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise DefinitionError(
                f"{where}.__call__ takes {str(p).partition(':')[0]} as {p.kind.description}; ports are fixed and bear "
                f"names, so declare each one as an ordinary parameter."
            )
        if p.name not in hints:
            raise DefinitionError(
                f"{where}.__call__ has the parameter {p.name!r} without an annotation; annotate it with a column "
                f"(flowrl.columns), a record (flowrl.records) or a class of value."
            )
        annotation, optional = _strip_none(hints[p.name])
        if annotation in INJECTABLE:
            injected[p.name] = annotation
            continue
        with _located(f"{where}.__call__({p.name})"):
            slots, record = _slots(p.name, annotation, localns)
        if optional and p.default is p.empty:
            raise DefinitionError(f"{where}.__call__({p.name}) is optional; give it the default None.")
        ports[p.name] = Port(p.name, slots, record, optional)
    if "return" not in hints or hints["return"] is type(None):
        raise DefinitionError(
            f"{where}.__call__ has no return annotation; say which column, record or value it returns."
        )
    returned = hints["return"]
    with _located(f"{where}.__call__, return value"):
        if (column := columns.parse(returned)) is not None:
            return Signature(ports, injected, {column.name: columns.register(column)})
        if isinstance(returned, type) and (fields := record_columns(returned, localns)):
            if not issubclass(returned, tuple):
                raise DefinitionError(
                    f"the Protocol {returned.__name__} can only be read; expected a NamedTuple of its columns."
                )
            return Signature(ports, injected, fields, returned)
        value = _value(returned)
        return Signature(ports, injected, {snake_case(value.cls.__name__): value})


def _strip_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [a for a in get_args(annotation) if a is not type(None)]
        if len(rest) == 1 and len(rest) < len(get_args(annotation)):
            return rest[0], True
    return annotation, False


def snake_case(name: str) -> str:
    """``UpdateActor`` -> ``update_actor``, ``GAE`` -> ``gae``, ``KLShape`` -> ``kl_shape``."""
    out = []
    for i, ch in enumerate(name):
        follows_lower = i > 0 and not name[i - 1].isupper()
        starts_word = i > 0 and i + 1 < len(name) and name[i - 1].isupper() and name[i + 1].islower()
        if ch.isupper() and (follows_lower or starts_word) and i > 0:
            out.append("_")
        out.append(ch.lower())
    return "".join(out)
