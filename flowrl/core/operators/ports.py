"""Ports: what an operator or a loss reads and writes, by the annotations of its `__call__`.

A record port is flattened into its fields (``rollout.input_ids``), so each edge carries exactly one column or value,
and a plan knows which columns a node reads.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin

from flowrl import columns
from flowrl.columns import ColumnType
from flowrl.data.balance import Shard
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now, Round
from flowrl.errors import DefinitionError, PortError, article, type_of
from flowrl.record_types import FieldType, hints_of, located, record_columns, value_type

INJECTED: Any = None
"""Default of a parameter that the runner fills in: ``key: Key``, ``metrics: Metrics`` or ``now: Now``."""

INJECTABLE: tuple[type, ...] = (Key, Metrics, Now)


_OF_NOW: Mapping[type, str] = {Round: "round", Shard: "shard"}


if TYPE_CHECKING:
    FromParameters = Any  # type checkers do not know the ports, so they accept any column
else:

    class FromParameters:
        """Annotation of ``**columns`` in a `__call__`: ports of the parameters; see `Operator.more_ports`."""


class PortField(NamedTuple):
    """The end of an edge: a port, or a field of a port that takes a record."""

    port: str
    field: str | None = None

    def __str__(self) -> str:
        return self.port if self.field is None else f"{self.port}.{self.field}"

    @property
    def name(self) -> str:
        """The name of the column or value here: the field of the record, else the port."""
        return self.port if self.field is None else self.field

    @classmethod
    def parse(cls, text: str) -> PortField:
        """The port field of ``"rollout.input_ids"`` or ``"values"``."""
        port, _, field = text.partition(".")
        return cls(port, field or None)


@dataclass(frozen=True)
class Port:
    """One parameter of an operator.

    `fields` has the type of each field of the record; a port of one column or value has a single field.
    """

    name: str
    fields: Mapping[PortField, FieldType]
    record: type | None = None
    optional: bool = False


@dataclass(frozen=True, eq=False)  # hashed by identity, as a key of caches
class Signature:
    """All ports of an operator class or a loss, its injected parameters, and its outputs.

    Args:
        injected: the class of each parameter that the runner fills in.
        variadic: whether the parameters of the operator add ports; see `FromParameters`.
    """

    ports: Mapping[str, Port]
    injected: Mapping[str, type]
    outputs: Mapping[str, FieldType]
    output_record: type | None = None
    variadic: bool = False

    @cached_property
    def fields(self) -> Mapping[PortField, FieldType]:
        """Every field of every port."""
        return {field: t for port in self.ports.values() for field, t in port.fields.items()}

    def retyped(self, name: str, annotation: Any) -> Signature:
        """The same ports, but the one called `name` has this annotation."""
        fields, record = _fields(name, annotation, {})
        return replace(self, ports={**self.ports, name: replace(self.ports[name], fields=fields, record=record)})


@functools.cache
def signature_of_record(record: type) -> Signature:
    """The signature of what only outputs a record; kept, as evaluating annotations is a third of building a graph."""
    return Signature({}, {}, record_columns(record), record)


@functools.lru_cache(maxsize=256)
def with_more(own: Signature, more: Signature) -> Signature:
    """The signature of an operator with the ports of its parameters, such as its loss, added to its own.

    A column that a record of the operator already has is read from there. Optional ports come last.
    """
    fields = {field.name: type for field, type in own.fields.items()}
    for name, port in more.ports.items():
        if (found := port.fields[PortField(name)]) != fields.get(name, found):
            raise PortError(
                f"The loss reads {name} as {found}, but the operator reads {name} as {fields[name]}. Rename the "
                f"parameter of the loss.",
                code="loss.column-clash",
                column=name,
                expected=fields[name],
                found=found,
            )
    theirs = {name: port for name, port in more.ports.items() if name not in fields or name in own.ports}
    ports = dict(own.ports)
    for name, port in theirs.items():
        ports[name] = replace(port, optional=port.optional and own.ports.get(name, port).optional)
    in_order = sorted(ports.values(), key=lambda port: (port.optional, list(ports).index(port.name)))
    return replace(own, ports={port.name: port for port in in_order})


def _fields(port: str, annotation: Any, localns: Mapping[str, Any]) -> tuple[dict[PortField, FieldType], type | None]:
    """The fields of a port with this annotation, and the record class of a record."""
    annotation, own = columns.split_axes(annotation)
    column = columns.parse(annotation)
    if column is not None:
        return {PortField(port): replace(columns.register(column), own=own)}, None
    if isinstance(annotation, type) and (types := record_columns(annotation, localns)):
        placed = {f: replace(t, own=own) if isinstance(t, ColumnType) else t for f, t in types.items()}
        return {PortField(port, field): t for field, t in placed.items()}, annotation
    if own is not None:
        raise DefinitionError(
            f"A batchless value has no axes of its own. Remove the name {own.name!r}.",
            code="column.port-axes",
            axes=own.name,
        )
    return {PortField(port): value_type(annotation)}, None


def refuse_no_function(call: Any, where: str, example: str) -> None:
    """Refuse a `__call__` that is not an ordinary function; `example` is of one."""
    kind = (
        type_of(call)
        if not inspect.isfunction(call)
        else "async"
        if inspect.iscoroutinefunction(call)
        else "a generator"
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)
        else None
    )
    if kind is not None:
        raise DefinitionError(
            f"{where} is {kind}. Expected an ordinary method that returns what it declares: `{example}`.",
            code="operator.not-a-function",
            where=where,
            found=kind,
        )


def signature_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Signature:
    """The ports and outputs of an operator's `__call__`; `where` is ``file:line: Class.__call__`` for messages."""
    inputs = inputs_of(call, where, localns)
    returned = return_of(call, where, localns)
    with located(f"{where}, return value"):
        outputs, output_record = _outputs(returned, localns)
    return replace(inputs, outputs=outputs, output_record=output_record)


def return_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Any:
    """The return annotation of a `__call__`; the type of None if it returns nothing."""
    with located(where):
        hints = hints_of(call, localns)
    if "return" not in hints:
        raise DefinitionError(
            f"{where} has no return annotation. Annotate the column, record or value that it returns, or `-> None`.",
            code="operator.missing-annotation",
            where=where,
            parameter="return",
        )
    return hints["return"]


def inputs_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Signature:
    """The inputs of a `__call__`; see `signature_of`."""
    with located(where):
        hints = hints_of(call, localns)
    ports: dict[str, Port] = {}
    injected: dict[str, type] = {}
    variadic = False
    for parameter in list(inspect.signature(call).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD and hints.get(parameter.name) is FromParameters:
            variadic = True
            continue
        _refuse_unnamed(parameter, hints, where)
        name, (annotation, optional) = parameter.name, strip_none(hints[parameter.name])
        if is_injected(annotation, f"{where}({name})"):
            _refuse_default(parameter, where, "the runner fills it in. Write `= INJECTED`")
            if annotation in injected.values():
                kind = annotation.__name__
                raise DefinitionError(
                    f"{where}({name}) is a second {kind}. Expected one {kind} per operator.",
                    code="operator.injected-parameter",
                    where=where,
                    parameter=name,
                )
            injected[name] = annotation
            continue
        with located(f"{where}({name})"):
            fields, record = _fields(name, annotation, localns)
        _refuse_unmatched_none(parameter, optional, where)
        _refuse_default(parameter, where, "a port reads its edge. Remove the default, or annotate `X | None = None`")
        ports[name] = Port(name, fields, record, optional)
    if not ports:
        raise DefinitionError(
            f"{where} has no port, so no edge can lead to it. Declare at least one: "
            f"`def __call__(self, values: Values) -> Returns`.",
            code="operator.no-port",
            where=where,
        )
    return Signature(ports, injected, {}, variadic=variadic)


def _refuse_unnamed(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str) -> None:
    """Refuse a parameter that cannot be passed by name, or has no annotation."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        name, kind = str(parameter).partition(":")[0], parameter.kind.description
        raise DefinitionError(
            f"{where} has the {kind} parameter {name}, but ports are passed by name. Declare each port as an ordinary "
            f"parameter.",
            code="operator.unnamed-port",
            where=where,
            parameter=name,
            kind=kind,
        )
    if parameter.name not in hints:
        raise DefinitionError(
            f"{where} has the parameter {parameter.name!r} without an annotation. Annotate it with a column "
            f"(flowrl.columns), a record (flowrl.records) or a class of value.",
            code="operator.missing-annotation",
            where=where,
            parameter=parameter.name,
        )


def _refuse_unmatched_none(parameter: inspect.Parameter, optional: bool, where: str) -> None:
    """Refuse `X | None` without the default None, and the default None without it."""
    if optional == (parameter.default is None) or (optional and parameter.default is not parameter.empty):
        return
    problem = "is optional but has no default" if optional else "has the default None but is not optional"
    raise DefinitionError(
        f"{where}({parameter.name}) {problem}. Write `{parameter.name}: X | None = None`.",
        code="operator.port-default",
        where=where,
        port=parameter.name,
    )


def _refuse_default(parameter: inspect.Parameter, where: str, instead: str) -> None:
    """Refuse a default that would never be used."""
    if parameter.default is not parameter.empty and parameter.default is not None:
        found = type(parameter.default).__name__
        raise DefinitionError(
            f"{where}({parameter.name}) has a default of type {found}, but {instead}.",
            code="operator.port-default",
            where=where,
            port=parameter.name,
            found=found,
        )


def _outputs(returned: Any, localns: Mapping[str, Any]) -> tuple[Mapping[str, FieldType], type | None]:
    """The outputs of a return annotation by name, and the record class of a record; ``None`` has none."""
    if (axes := columns.split_axes(returned)[1]) is not None:
        raise DefinitionError(
            "The output has axes of its own, which only ports can have. Declare the axes that the operator creates in "
            "its class: `new_axes: ClassVar = ('batch', 'response')`.",
            code="column.port-axes",
            axes=axes.name,
        )
    if returned is type(None):
        return {}, None
    if (column := columns.parse(returned)) is not None:
        return {column.name: columns.register(column)}, None
    if isinstance(returned, type) and (outputs := record_columns(returned, localns)):
        if not issubclass(returned, tuple):
            raise DefinitionError(
                f"The Protocol {returned.__name__} is read-only. Return a NamedTuple of its columns.",
                code="operator.return-type",
                found=returned.__name__,
            )
        return outputs, returned
    value = value_type(returned)
    return {snake_case(value.cls.__name__): value}, None


def is_injected(annotation: Any, where: str) -> bool:
    """Whether the runner fills in a parameter of this annotation; a part of `Now` is an error."""
    injected = strip_none(annotation)[0]
    if (part := next((part for cls, part in _OF_NOW.items() if cls is injected), None)) is not None:
        raise DefinitionError(
            f"{where} is {article(injected.__name__)}, which is a part of Now. Declare `now: Now = INJECTED` and read "
            f"now.{part}.",
            code="operator.injected-parameter",
            where=where,
            found=injected.__name__,
        )
    return injected in INJECTABLE


def strip_none(annotation: Any) -> tuple[Any, bool]:
    """``X | None`` as X and True; anything else as it is and False."""
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
