"""Ports: what an operator or a loss reads and writes, taken from the annotations of its `__call__`.

A port takes one column, a record of columns, or a batchless value such as `Updated`. A record port is flattened into
its fields (``rollout.input_ids``), so that an edge always carries exactly one column or value and a plan knows just
which columns a node reads.
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
from flowrl.data.balance import Share
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now, Round
from flowrl.errors import DefinitionError, PortError, article, type_of
from flowrl.record_types import FieldType, hints_of, located, record_columns, value_type

INJECTED: Any = None
"""Default of a parameter that the runner fills in: ``key: Key``, ``metrics: Metrics`` or ``now: Now``."""

INJECTABLE: tuple[type, ...] = (Key, Metrics, Now)


_OF_NOW: Mapping[type, str] = {Round: "round", Share: "share"}


if TYPE_CHECKING:
    FromParameters = Any  # to a type checker, which knows no ports, any column may be passed
else:

    class FromParameters:
        """Annotation of ``**columns`` in a `__call__`: ports that come by the parameters; see `Operator.more_ports`."""


class PortField(NamedTuple):
    """Where an edge ends: a port, and in a port that takes a record, one of the record's fields."""

    port: str
    field: str | None = None

    def __str__(self) -> str:
        return self.port if self.field is None else f"{self.port}.{self.field}"

    @property
    def name(self) -> str:
        """What the column or value is called here: the field of the record, else the port."""
        return self.port if self.field is None else self.field

    @classmethod
    def parse(cls, text: str) -> PortField:
        """``"rollout.input_ids"`` or ``"values"``, as a user or a file writes it."""
        port, _, field = text.partition(".")
        return cls(port, field or None)


@dataclass(frozen=True)
class Port:
    """One parameter of an operator.

    Args:
        name: the parameter's name.
        fields: the type of each field of the record; a port of one column or value has a single field.
        record: the record class, where the port takes a record.
        optional: declared ``X | None``.
    """

    name: str
    fields: Mapping[PortField, FieldType]
    record: type | None = None
    optional: bool = False


@dataclass(frozen=True, eq=False)  # so that what is made of one can be kept by it
class Signature:
    """All ports of an operator class or a loss, the parameters that are injected, and the outputs.

    Args:
        ports: by the parameter's name.
        injected: the class of each parameter that the runner fills in.
        outputs: by name; a loss has none.
        output_record: the record that an operator returns, where it returns one.
        takes_more: further ports come to these by the parameters of the operator; see `FromParameters`.
    """

    ports: Mapping[str, Port]
    injected: Mapping[str, type]
    outputs: Mapping[str, FieldType]
    output_record: type | None = None
    takes_more: bool = False

    @cached_property
    def fields(self) -> Mapping[PortField, FieldType]:
        """Every field of every port."""
        return {field: t for port in self.ports.values() for field, t in port.fields.items()}

    def retyped(self, name: str, annotation: Any) -> Signature:
        """The same ports, but the one called `name` takes what `annotation` says."""
        fields, record = _fields(name, annotation, {})
        return replace(self, ports={**self.ports, name: replace(self.ports[name], fields=fields, record=record)})


@functools.lru_cache(maxsize=256)
def with_more(own: Signature, more: Signature) -> Signature:
    """The signature of an operator whose ports are its own and those that come by its parameters, as by its loss.

    What a record of the operator's own has already, these read there. Ports that may be left open come last.

    Raises:
        PortError: a name is that of two different columns.
    """
    fields = {field.name: type for field, type in own.fields.items()}
    for name, port in more.ports.items():
        if (wanted := port.fields[PortField(name)]) != fields.get(name, wanted):
            raise PortError(
                f"the loss reads {name} as {wanted}, and the operator that takes it as {fields[name]}; expected one "
                f"column of that name: call the parameter of the loss something else."
            )
    theirs = {name: port for name, port in more.ports.items() if name not in fields or name in own.ports}
    ports = dict(own.ports)
    for name, port in theirs.items():
        ports[name] = replace(port, optional=port.optional and own.ports.get(name, port).optional)
    in_order = sorted(ports.values(), key=lambda port: (port.optional, list(ports).index(port.name)))
    return replace(own, ports={port.name: port for port in in_order})


def _fields(port: str, annotation: Any, localns: Mapping[str, Any]) -> tuple[dict[PortField, FieldType], type | None]:
    """The fields of a port with this annotation, and the record class where it is a record."""
    annotation, own = columns.apart(annotation)
    column = columns.parse(annotation)
    if column is not None:
        return {PortField(port): replace(columns.register(column), own=own)}, None
    if isinstance(annotation, type) and (types := record_columns(annotation, localns)):
        placed = {f: replace(t, own=own) if isinstance(t, ColumnType) else t for f, t in types.items()}
        return {PortField(port, field): t for field, t in placed.items()}, annotation
    if own is not None:
        raise DefinitionError(f"a value without rows has no axes to be its own; take the name {own.name!r} out.")
    return {PortField(port): value_type(annotation)}, None


def refuse_no_function(call: Any, where: str, example: str) -> None:
    """Refuse what would not compute when it is called: a `__call__`, or a function that is to be one.

    Args:
        call: what stands there.
        where: for messages.
        example: of what is expected.

    Raises:
        DefinitionError: it is no function, or one that is async or yields.
    """
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
            f"{where} is {kind}; expected an ordinary method that returns what it declares: `{example}`."
        )


def signature_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Signature:
    """Read the ports of an operator's `__call__`.

    Args:
        call: the function.
        where: ``file:line: Class.__call__`` for messages.
        localns: names that annotations may use besides the module's.

    Raises:
        DefinitionError: a parameter or the return value lacks an annotation, or has one that is no port.
    """
    inputs = inputs_of(call, where, localns)
    returned = return_of(call, where, localns)
    with located(f"{where}, return value"):
        outputs, output_record = _outputs(returned, localns)
    return replace(inputs, outputs=outputs, output_record=output_record)


def return_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Any:
    """What a `__call__` is annotated to return; the type of None where it returns nothing."""
    with located(where):
        hints = hints_of(call, localns)
    if "return" not in hints:
        raise DefinitionError(
            f"{where} has no return annotation; say which column, record or value it returns, or `-> None` where it "
            f"returns nothing."
        )
    return hints["return"]


def inputs_of(call: Callable[..., Any], where: str, localns: Mapping[str, Any]) -> Signature:
    """What a `__call__` reads; see `signature_of`."""
    with located(where):
        hints = hints_of(call, localns)
    ports: dict[str, Port] = {}
    injected: dict[str, type] = {}
    takes_more = False
    for parameter in list(inspect.signature(call).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD and hints.get(parameter.name) is FromParameters:
            takes_more = True
            continue
        _refuse_unfixed(parameter, hints, where)
        name, (annotation, optional) = parameter.name, strip_none(hints[parameter.name])
        if is_injected(annotation, f"{where}({name})"):
            _refuse_default(parameter, where, "the runner fills it in; write `= INJECTED`")
            if annotation in injected.values():
                raise DefinitionError(
                    f"{where}({name}) is a second {annotation.__name__}; expected one, which is the node's."
                )
            injected[name] = annotation
            continue
        with located(f"{where}({name})"):
            fields, record = _fields(name, annotation, localns)
        if optional and parameter.default is parameter.empty:
            raise DefinitionError(f"{where}({name}) is optional; give it the default None.")
        if not optional and parameter.default is None:
            raise DefinitionError(f"{where}({name}) has the default None; annotate it with `X | None`.")
        _refuse_default(parameter, where, "a port reads what is wired to it; leave the default out, or make it None")
        ports[name] = Port(name, fields, record, optional)
    if not ports:
        raise DefinitionError(
            f"{where} has no port, so nothing could be wired to it; expected a method with at least one: "
            f"`def __call__(self, values: Values) -> Returns`."
        )
    return Signature(ports, injected, {}, takes_more=takes_more)


def _refuse_unfixed(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str) -> None:
    """Refuse a parameter that has no name to be given by, or no annotation."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise DefinitionError(
            f"{where} takes {str(parameter).partition(':')[0]} as {parameter.kind.description}; ports are "
            f"fixed and have names, so declare each one as an ordinary parameter."
        )
    if parameter.name not in hints:
        raise DefinitionError(
            f"{where} has the parameter {parameter.name!r} without an annotation; annotate it with a column "
            f"(flowrl.columns), a record (flowrl.records) or a class of value."
        )


def _refuse_default(parameter: inspect.Parameter, where: str, instead: str) -> None:
    """Refuse a default that would never be used."""
    if parameter.default is not parameter.empty and parameter.default is not None:
        said = type(parameter.default).__name__
        raise DefinitionError(f"{where}({parameter.name}) has a default, of type {said}, but {instead}.")


def _outputs(returned: Any, localns: Mapping[str, Any]) -> tuple[Mapping[str, FieldType], type | None]:
    """The outputs of a return annotation by name, and the record class where it is a record; ``None`` has none."""
    if columns.apart(returned)[1] is not None:
        raise DefinitionError(
            "what is returned has axes of its own; expected them on the ports. Axes that the operator makes itself are "
            "named by the class: `new_axes: ClassVar = ('batch', 'response')`."
        )
    if returned is type(None):
        return {}, None
    if (column := columns.parse(returned)) is not None:
        return {column.name: columns.register(column)}, None
    if isinstance(returned, type) and (outputs := record_columns(returned, localns)):
        if not issubclass(returned, tuple):
            raise DefinitionError(
                f"the Protocol {returned.__name__} can only be read; expected a NamedTuple of its columns."
            )
        return outputs, returned
    value = value_type(returned)
    return {snake_case(value.cls.__name__): value}, None


def is_injected(annotation: Any, where: str) -> bool:
    """Whether the runner fills in a parameter of this annotation.

    Raises:
        DefinitionError: it is a part of `Now`.
    """
    wanted = strip_none(annotation)[0]
    if (part := next((part for cls, part in _OF_NOW.items() if cls is wanted), None)) is not None:
        raise DefinitionError(
            f"{where} asks for {article(wanted.__name__)}, which is a part of Now; take `now: Now = INJECTED`, and "
            f"read now.{part}."
        )
    return wanted in INJECTABLE


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
