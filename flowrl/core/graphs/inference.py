"""Typing a node: what is wired to it is checked, and its outputs get their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flowrl.columns import ColumnType
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.errors import PortError
from flowrl.record_types import FieldType, ValueType, accepts

Available = Mapping[Edge, EdgeType]
"""Every output that exists so far, for suggestions."""


class Bound(NamedTuple):
    """What an axis of one call stands for: its identity, and the field and edge that settled it."""

    identity: str
    field: PortField
    edge: Edge


Binding = Mapping[str, Bound]
"""The axes of one call that are settled, by the axis's name."""


def infer(
    name: str, operator: Operator, inputs: Mapping[PortField, tuple[Edge, EdgeType]], available: Available
) -> dict[str, EdgeType]:
    """Check what is wired to a node, and type its outputs.

    Axes of the inputs are bound across all ports of the call, but for those of ports that have their own. An axis of an
    output comes to be here where no input binds it, or where the operator makes it anew.

    Raises:
        PortError: a kind, dtype or axis does not fit, or a port is wired or left open against what the operator wants;
            what is joined out of several widths is declared to have one of them.
    """
    binding: dict[str, Bound] = {}
    for field, (edge, typed) in inputs.items():
        wanted = operator.signature.fields[field]
        if not accepts(wanted, typed.type):
            raise PortError(
                f"{name}.{field} wants {wanted}, but {edge} is {typed}{_suggest(wanted, binding, available, edge)}"
            )
        if isinstance(wanted, ColumnType):
            for axis, identity in zip(wanted.here, typed.axes, strict=True):
                bound = binding.setdefault(axis, Bound(identity, field, edge))
                if bound.identity != identity:
                    own = f"{'Rows' if axis == 'batch' else 'Widths'}[..., {field.port!r}]"
                    free = {e: t for e, t in available.items() if all(e != other for other, _ in inputs.values())}
                    join = f"; to join them, let the port say that its axes are its own: {field.port}: {own}."
                    raise PortError(
                        f"{name}.{field} takes the {axis} axis of {edge}, which was made by {_maker(identity)}, but "
                        f"{name}.{bound.field} takes that of {bound.edge}, made by {_maker(bound.identity)}; expected "
                        f"one {axis} axis for all ports{_suggest(wanted, binding, free, edge, join)}"
                    )
    _check_wanted(name, operator, inputs, binding, available)
    _refuse_recut(name, operator, binding)
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


def _refuse_recut(name: str, operator: Operator, binding: Binding) -> None:
    """Refuse an operator that joins what is of several widths, and says that what it writes is as wide as one of these.

    It would fail as soon as another one is the widest, which may be in the first step or in the seventh.
    """
    for output, type in operator.signature.outputs.items():
        if not isinstance(type, ColumnType) or not (operator.creates_axis("batch") or type.kind == "tokens"):
            continue
        if type.own is not None:  # it is as wide as the column that it is made of
            continue
        for axis in type.axes[1:]:
            met = {b.identity: b for here, b in binding.items() if here.rpartition(".")[2] == axis}
            if axis in binding and len(met) > 1 and not operator.creates_axis(axis):
                found = " and ".join(f"{bound.field} ({bound.edge})" for bound in met.values())
                said = (*operator.new_axes, axis)
                raise PortError(
                    f"{name}.{output} would be as wide as {name}.{binding[axis].field}, but {name} joins {axis} axes "
                    f"of several widths, those of {found}; let {operator.__class__.__name__} say that it makes the "
                    f"axis anew: new_axes: ClassVar = {said}."
                )


def _check_wanted(
    name: str,
    operator: Operator,
    inputs: Mapping[PortField, Any],
    binding: Binding,
    available: Available,
) -> None:
    wants = operator.in_step(0).wants()
    for port in operator.signature.ports.values():
        wired = any(field in inputs for field in port.fields)
        wanted = wants.get(port.name)
        if wired and wanted is False:
            raise PortError(
                f"{name}.{port.name} is wired, but {operator!r} does not use it; leave it out, or change the "
                f"operator's parameters so that it does."
            )
        for field, type in port.fields.items():
            if field not in inputs and (wired or wanted or not port.optional):
                nearest = _suggest(type, binding, available, None)
                raise PortError(f"{name}.{field} wants {type}, but nothing is wired to it{nearest}")


def candidates(wanted: FieldType, binding: Binding, available: Available) -> list[Edge]:
    """The outputs that may be wired to a field, given the axes that other fields have bound.

    Those of exactly the wanted kind where there are any, else those of an acceptable one.
    """
    fitting = [edge for edge, typed in available.items() if fits(wanted, binding, typed)]
    exact = [edge for edge in fitting if _kind(available[edge].type) == _kind(wanted)]
    return exact or fitting


def bind(binding: dict[str, Bound], field: PortField, wanted: FieldType, edge: Edge, typed: EdgeType) -> None:
    """Settle the axes of a field by what is wired to it, where no other field has."""
    if isinstance(wanted, ColumnType):
        for axis, identity in zip(wanted.here, typed.axes, strict=True):
            binding.setdefault(axis, Bound(identity, field, edge))


def fits(wanted: FieldType, binding: Binding, typed: EdgeType) -> bool:
    """Whether an output may be wired to a field, given the axes that other fields have bound."""
    if not accepts(wanted, typed.type):
        return False
    axes = wanted.here if isinstance(wanted, ColumnType) else ()
    return all(
        axis not in binding or binding[axis].identity == identity
        for axis, identity in zip(axes, typed.axes, strict=True)
    )


def _kind(type: FieldType) -> Any:
    return type.kind if isinstance(type, ColumnType) else type.cls


def _maker(identity: str) -> str:
    return identity.partition("@")[2]


def _suggest(
    wanted: FieldType, binding: Binding, available: Available, found: Edge | None, otherwise: str | None = None
) -> str:
    near: Iterable[Edge] = [edge for edge in candidates(wanted, binding, available) if edge != found]
    named = [edge for edge in near if isinstance(wanted, ColumnType) and edge.output == wanted.name]
    best = (named or list(near))[-1:]
    if best:
        return f"; did you mean {best[0]}?"
    if otherwise is not None:
        return otherwise
    what = "column" if isinstance(wanted, ColumnType) else "value"
    return f"; no node before this one writes such a {what}: add the operator that does."
