"""Typing a node: what is wired to it is checked, and its outputs get their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flowrl.columns import ColumnType
from flowrl.core.operator import Operator
from flowrl.core.ports import PortField
from flowrl.core.symbols import Edge, EdgeType
from flowrl.data.record_types import FieldType, ValueType, accepts
from flowrl.errors import PortError

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

    Axes of the inputs are bound across all ports of the call; an axis of an output that no input binds comes to be
    here, and so do the rows of an operator that changes their number.

    Raises:
        PortError: a kind, dtype or axis does not fit, or a port is wired or left open against what the operator wants.
    """
    signature = operator.signature
    binding: dict[str, Bound] = {}
    for field, (edge, typed) in inputs.items():
        wanted = signature.fields[field]
        if not accepts(wanted, typed.type):
            raise PortError(
                f"{name}.{field} wants {wanted}, but {edge} is {typed}{_suggest(wanted, binding, available, edge)}"
            )
        if isinstance(wanted, ColumnType):
            for axis, identity in zip(wanted.axes, typed.axes, strict=True):
                bound = binding.setdefault(axis, Bound(identity, field, edge))
                if bound.identity != identity:
                    raise PortError(
                        f"{name}.{field} takes the {axis} axis of {edge}, which was made by {_maker(identity)}, but "
                        f"{name}.{bound.field} takes that of {bound.edge}, made by {_maker(bound.identity)}; expected "
                        f"one {axis} axis for all ports{_suggest(wanted, binding, available, edge)}"
                    )
    _check_wanted(name, operator, inputs, binding, available)
    outputs = {}
    for output, type in signature.outputs.items():
        if isinstance(type, ValueType):
            outputs[output] = EdgeType(type)
            continue
        axes = []
        for axis in type.axes:
            fresh = axis not in binding or (axis == "batch" and operator.changes_rows)
            axes.append(f"{axis}@{name}" if fresh else binding[axis].identity)
        outputs[output] = EdgeType(type, tuple(axes))
    return outputs


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


def fits(wanted: FieldType, binding: Binding, typed: EdgeType) -> bool:
    """Whether an output may be wired to a field, given the axes that other fields have bound."""
    if not accepts(wanted, typed.type):
        return False
    axes = wanted.axes if isinstance(wanted, ColumnType) else ()
    return all(
        axis not in binding or binding[axis].identity == identity
        for axis, identity in zip(axes, typed.axes, strict=True)
    )


def _kind(type: FieldType) -> Any:
    return type.kind if isinstance(type, ColumnType) else type.cls


def _maker(identity: str) -> str:
    return identity.partition("@")[2]


def _suggest(wanted: FieldType, binding: Binding, available: Available, found: Edge | None) -> str:
    near: Iterable[Edge] = [edge for edge in candidates(wanted, binding, available) if edge != found]
    named = [edge for edge in near if isinstance(wanted, ColumnType) and edge.output == wanted.name]
    best = (named or list(near))[-1:]
    if best:
        return f"; did you mean {best[0]}?"
    what = "column" if isinstance(wanted, ColumnType) else "value"
    return f"; no node before this one writes such a {what}: add the operator that does."
