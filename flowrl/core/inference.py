"""Typing a node: what is wired to it is checked, and its outputs get their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowrl.columns import ColumnType
from flowrl.core.operator import Operator
from flowrl.core.symbols import Edge, EdgeType
from flowrl.data.record_types import SlotType, ValueType, accepts
from flowrl.errors import PortError

Available = Mapping[Edge, EdgeType]
"""Every output that exists so far, for suggestions."""


def infer(
    name: str, operator: Operator, inputs: Mapping[str, tuple[Edge, EdgeType]], available: Available
) -> dict[str, EdgeType]:
    """Check what is wired to a node, and type its outputs.

    Axes of the inputs are bound across all ports of the call; an axis of an output that no input binds comes to be
    here, and so do the rows of an operator that changes their number.

    Raises:
        PortError: a kind, dtype or axis does not fit, or a port is wired or left open against what the operator wants.
    """
    signature = operator.signature
    binding: dict[str, tuple[str, str, Edge]] = {}  # axis -> identity, slot, edge that bound it
    for slot, (edge, typed) in inputs.items():
        wanted = signature.slots[slot]
        if not accepts(wanted, typed.type):
            raise PortError(
                f"{name}.{slot} wants {wanted}, but {edge} is {typed}{_suggest(wanted, binding, available, edge)}"
            )
        if isinstance(wanted, ColumnType):
            for axis, identity in zip(wanted.axes, typed.axes, strict=True):
                bound, by_slot, by_edge = binding.setdefault(axis, (identity, slot, edge))
                if bound != identity:
                    raise PortError(
                        f"{name}.{slot} takes the {axis} axis of {edge}, which was made by {_maker(identity)}, but "
                        f"{name}.{by_slot} takes that of {by_edge}, made by {_maker(bound)}; expected one {axis} axis "
                        f"for all "
                        f"ports{_suggest(wanted, {**binding, axis: (bound, by_slot, by_edge)}, available, edge)}"
                    )
    _check_wanted(name, operator, inputs, binding, available)
    outputs = {}
    for output, slot_type in signature.outputs.items():
        if isinstance(slot_type, ValueType):
            outputs[output] = EdgeType(slot_type)
            continue
        axes = []
        for axis in slot_type.axes:
            fresh = axis not in binding or (axis == "batch" and operator.changes_rows)
            axes.append(f"{axis}@{name}" if fresh else binding[axis][0])
        outputs[output] = EdgeType(slot_type, tuple(axes))
    return outputs


def _check_wanted(
    name: str,
    operator: Operator,
    inputs: Mapping[str, Any],
    binding: Mapping[str, tuple[str, str, Edge]],
    available: Available,
) -> None:
    wants = operator.wants()
    for port in operator.signature.ports.values():
        wired = any(slot in inputs for slot in port.slots)
        wanted = wants.get(port.name)
        if wired and wanted is False:
            raise PortError(
                f"{name}.{port.name} is wired, but {operator!r} does not use it; leave it out, or change the "
                f"operator's parameters so that it does."
            )
        for slot, slot_type in port.slots.items():
            if slot not in inputs and (wired or wanted or not port.optional):
                nearest = _suggest(slot_type, binding, available, None)
                raise PortError(f"{name}.{slot} wants {slot_type}, but nothing is wired to it{nearest}")


def candidates(wanted: SlotType, binding: Mapping[str, tuple[str, str, Edge]], available: Available) -> list[Edge]:
    """The outputs that may be wired to a slot, given the axes that other slots have bound.

    Those of exactly the wanted kind where there are any, else those of an acceptable one.
    """

    def fits(typed: EdgeType) -> bool:
        if not accepts(wanted, typed.type):
            return False
        axes = wanted.axes if isinstance(wanted, ColumnType) else ()
        return all(
            axis not in binding or binding[axis][0] == identity for axis, identity in zip(axes, typed.axes, strict=True)
        )

    fitting = [edge for edge, typed in available.items() if fits(typed)]
    exact = [edge for edge in fitting if _kind(available[edge].type) == _kind(wanted)]
    return exact or fitting


def _kind(slot: SlotType) -> Any:
    return slot.kind if isinstance(slot, ColumnType) else slot.cls


def _maker(identity: str) -> str:
    return identity.partition("@")[2]


def _suggest(
    wanted: SlotType, binding: Mapping[str, tuple[str, str, Edge]], available: Available, found: Edge | None
) -> str:
    near: Iterable[Edge] = [edge for edge in candidates(wanted, binding, available) if edge != found]
    named = [edge for edge in near if isinstance(wanted, ColumnType) and edge.output == wanted.name]
    best = (named or list(near))[-1:]
    if best:
        return f"; did you mean {best[0]}?"
    what = "column" if isinstance(wanted, ColumnType) else "value"
    return f"; no node before this one writes such a {what}: add the operator that does."
