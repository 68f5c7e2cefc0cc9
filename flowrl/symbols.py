"""Symbols: what flows through an operator while a graph is recorded, and the types that they carry.

A symbol stands for one output of one node. Its type is a column type plus an *identity* for every axis: the node where
that axis came to be. Columns of equal shape whose rows were made by different nodes can therefore not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from flowrl.columns import ColumnType
from flowrl.errors import GraphError, PortError
from flowrl.ports import SlotType, ValueType, accepts

if TYPE_CHECKING:
    from flowrl.operator import Operator
    from flowrl.trace import Tracer


class Edge(NamedTuple):
    """One output of one node."""

    node: str
    output: str

    def __str__(self) -> str:
        return f"{self.node}.{self.output}"

    @classmethod
    def parse(cls, text: str) -> Edge:
        """``"gae.advantages"`` as an edge."""
        node, dot, output = text.partition(".")
        if not dot or not node or not output:
            raise GraphError(f"{text!r} does not name an output; expected 'node.column', such as 'gae.advantages'.")
        return cls(node, output)


@dataclass(frozen=True)
class Typed:
    """A slot type with the identity of each axis (``"batch@repeat"``); a batchless value has no axes."""

    type: SlotType
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.type)


class Symbol:
    """An output that is still to be computed. It can be passed to operators, and to nothing else."""

    def __init__(self, tracer: Tracer, edge: Edge, typed: Typed) -> None:
        self._tracer, self._edge, self._typed = tracer, edge, typed

    def __repr__(self) -> str:
        return f"<{self._edge}: {self._typed}>"

    def _refuse(self, what: str) -> NoReturn:
        raise GraphError(
            f"{self._edge} is a symbol ({self._typed}) while the graph is recorded, so it has no {what}; expected it "
            f"to be passed to operators only: move this into an operator's __call__, or run the lines on tensors with "
            f"algorithm.step(...)."
        )

    def __bool__(self) -> bool:
        self._refuse("truth value (`if`, `and`, `not`)")

    def __iter__(self) -> Any:
        self._refuse("elements to iterate over")

    def __len__(self) -> int:
        self._refuse("length")

    def __getitem__(self, *_: Any) -> Any:
        self._refuse("elements to index")

    __setitem__ = __getitem__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocol look-ups (copy, numpy, pickle) expect AttributeError
            raise AttributeError(name)
        self._refuse(f"attribute {name!r}")

    def _arithmetic(self, *_: Any) -> Any:
        self._refuse("arithmetic or comparison")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = _arithmetic
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _arithmetic
    __hash__ = object.__hash__

    def _number(self) -> Any:
        self._refuse("number in it")

    __float__ = __int__ = __index__ = _number

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse("array in it")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [
            a for arg in (*args, *(kwargs or {}).values()) for a in (arg if isinstance(arg, list | tuple) else [arg])
        ]
        symbol = next(a for a in flat if isinstance(a, Symbol))
        symbol._refuse(f"tensor for torch's {getattr(func, '__name__', func)}()")


Available = Mapping[Edge, Typed]
"""Every output that exists so far, for suggestions."""


def infer(
    name: str, operator: Operator, inputs: Mapping[str, tuple[Edge, Typed]], available: Available
) -> dict[str, Typed]:
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
            outputs[output] = Typed(slot_type)
            continue
        axes = []
        for axis in slot_type.axes:
            fresh = axis not in binding or (axis == "batch" and operator.changes_rows)
            axes.append(f"{axis}@{name}" if fresh else binding[axis][0])
        outputs[output] = Typed(slot_type, tuple(axes))
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

    def fits(typed: Typed) -> bool:
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
