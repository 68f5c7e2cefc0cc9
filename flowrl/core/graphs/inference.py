"""Type inference for a node: check its inputs, and type its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flowrl.columns import ColumnType
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.errors import PortError
from flowrl.record_types import FieldType, ValueType, accepts

Available = Mapping[Edge, EdgeType]
"""The type of every output so far, for suggestions."""


class Bound(NamedTuple):
    """An axis of one call: its identity, and the field and edge that bound it."""

    identity: str
    field: PortField
    edge: Edge


Binding = Mapping[str, Bound]
"""The axes of one call that are bound, by the axis's name."""


def infer(
    name: str, operator: Operator, inputs: Mapping[PortField, tuple[Edge, EdgeType]], available: Available
) -> dict[str, EdgeType]:
    """Check the inputs of a node, and type its outputs.

    The ports of a call share their axes, except for ports with axes of their own. An output gets a new axis if no input
    binds it, or if the operator declares it in `new_axes`.
    """
    binding: dict[str, Bound] = {}
    for field, (edge, typed) in inputs.items():
        expected = operator.signature.fields[field]
        if not accepts(expected, typed.type):
            nearest = _nearest(expected, binding, available, edge)
            raise PortError(
                f"{name}.{field} expects {expected}, but {edge} is {typed}{_hint(expected, nearest)}",
                code="graph.type-mismatch",
                node=name,
                port=str(field),
                edge=str(edge),
                suggestion=nearest,
            )
        if isinstance(expected, ColumnType):
            for axis, identity in zip(expected.here, typed.axes, strict=True):
                bound = binding.setdefault(axis, Bound(identity, field, edge))
                if bound.identity != identity:
                    used = {other for other, _ in inputs.values()}
                    free = {other: type for other, type in available.items() if other not in used}
                    nearest = _nearest(expected, binding, free, edge)
                    raise _axis_mismatch(name, axis, Bound(identity, field, edge), bound, nearest)
    _check_open_ports(name, operator, inputs, binding, available)
    _refuse_undeclared_axes(name, operator, binding)
    outputs = {}
    for output, type in operator.signature.outputs.items():
        if isinstance(type, ValueType):
            outputs[output] = EdgeType(type)
            continue
        made = (axis not in binding or operator.creates_axis(axis) for axis in type.here)
        axes = zip(type.here, type.axes, made, strict=True)
        identities = (f"{axis}@{name}" if new else binding[here].identity for here, axis, new in axes)
        outputs[output] = EdgeType(type, tuple(identities))
    return outputs


def _axis_mismatch(name: str, axis: str, new: Bound, bound: Bound, nearest: str | None) -> PortError:
    own = f"{new.field.port}: {'Rows' if axis == 'batch' else 'Widths'}[..., {new.field.port!r}]"
    hint = f"; did you mean {nearest}?" if nearest else f"; to join them, give the port axes of its own: {own}."
    return PortError(
        f"{name}.{new.field} reads {new.edge}, whose {axis} axis comes from {_maker(new.identity)}, but "
        f"{name}.{bound.field} reads {bound.edge}, whose {axis} axis comes from {_maker(bound.identity)}; expected one "
        f"{axis} axis for all ports{hint}",
        code="graph.axis-mismatch",
        node=name,
        port=str(new.field),
        axis=axis,
        edge=str(new.edge),
        suggestion=nearest or own,
    )


def _refuse_undeclared_axes(name: str, operator: Operator, binding: Binding) -> None:
    """Refuse an operator that joins columns of several widths but declares its output as wide as one of them."""
    for output, type in operator.signature.outputs.items():
        if not isinstance(type, ColumnType) or not (operator.creates_axis("batch") or type.kind == "tokens"):
            continue
        if type.own is not None:  # as wide as the column that it is made of
            continue
        for axis in type.axes[1:]:
            joined = {b.identity: b for here, b in binding.items() if here.rpartition(".")[2] == axis}
            if axis in binding and len(joined) > 1 and not operator.creates_axis(axis):
                widths = " and ".join(f"{bound.field} ({bound.edge})" for bound in joined.values())
                new_axes = (*operator.new_axes, axis)
                raise PortError(
                    f"{name}.{output} is declared as wide as {name}.{binding[axis].field}, but {name} joins {axis} "
                    f"axes of different widths: {widths}. Declare the axis as new in "
                    f"{operator.__class__.__name__}: new_axes: ClassVar = {new_axes}.",
                    code="graph.undeclared-axis",
                    node=name,
                    output=output,
                    axis=axis,
                    expected=new_axes,
                )


def _check_open_ports(
    name: str,
    operator: Operator,
    inputs: Mapping[PortField, Any],
    binding: Binding,
    available: Available,
) -> None:
    required = operator.in_step(0).optional_ports()
    for port in operator.signature.ports.values():
        wired = any(field in inputs for field in port.fields)
        needed = required.get(port.name)
        if wired and needed is False:
            raise PortError(
                f"{name}.{port.name} is wired, but {operator!r} does not use it. Remove the input, or change the "
                f"operator's parameters so that it uses it.",
                code="graph.unused-input",
                node=name,
                port=port.name,
            )
        for field, type in port.fields.items():
            if field not in inputs and (wired or needed or not port.optional):
                nearest = _nearest(type, binding, available, None)
                raise PortError(
                    f"{name}.{field} expects {type}, but nothing is wired to it{_hint(type, nearest)}",
                    code="graph.unwired-port",
                    node=name,
                    port=str(field),
                    suggestion=nearest,
                )


def candidates(expected: FieldType, binding: Binding, available: Available) -> list[Edge]:
    """The outputs that may be wired to a field: of exactly the expected kind if there are any, else acceptable."""
    fitting = [edge for edge, typed in available.items() if fits(expected, binding, typed)]
    exact = [edge for edge in fitting if _kind(available[edge].type) == _kind(expected)]
    return exact or fitting


def bind(binding: dict[str, Bound], field: PortField, expected: FieldType, edge: Edge, typed: EdgeType) -> None:
    """Bind the axes of a field that no other field has bound yet."""
    if isinstance(expected, ColumnType):
        for axis, identity in zip(expected.here, typed.axes, strict=True):
            binding.setdefault(axis, Bound(identity, field, edge))


def fits(expected: FieldType, binding: Binding, typed: EdgeType) -> bool:
    """Whether an output may be wired to a field, given the axes that other fields have bound."""
    if not accepts(expected, typed.type):
        return False
    axes = expected.here if isinstance(expected, ColumnType) else ()
    return all(
        axis not in binding or binding[axis].identity == identity
        for axis, identity in zip(axes, typed.axes, strict=True)
    )


def _kind(type: FieldType) -> Any:
    return type.kind if isinstance(type, ColumnType) else type.cls


def _maker(identity: str) -> str:
    return identity.partition("@")[2]


def _nearest(expected: FieldType, binding: Binding, available: Available, found: Edge | None) -> str | None:
    """The best output, other than `found`, to wire to a field."""
    near = [edge for edge in candidates(expected, binding, available) if edge != found]
    named = [edge for edge in near if isinstance(expected, ColumnType) and edge.output == expected.name]
    return next((str(edge) for edge in reversed(named or near)), None)


def _hint(expected: FieldType, nearest: str | None) -> str:
    """The end of a message."""
    if nearest is not None:
        return f"; did you mean {nearest}?"
    what = "column" if isinstance(expected, ColumnType) else "value"
    return f"; no node before this one writes such a {what}: add an operator that does."
