"""`Call`: an operator with live engines in its role fields, ready to compute on tensors again and again.

Columns are checked where they are written, once: `Call.run` trusts what other nodes wrote, and checks what this one
writes. Whoever calls an operator by hand has its inputs checked too (`Operator.run`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from flowrl.columns import ColumnType
from flowrl.core.ports import PortField
from flowrl.core.roles import RoleRef
from flowrl.core.session import Session
from flowrl.core.state import Cell
from flowrl.data.metrics import Metrics
from flowrl.data.record_types import FieldType, ValueType
from flowrl.errors import PortError


class Call:
    """One operator, bound to engines.

    Args:
        operator: under its node's name.
        engine: gives the live engine of a role, given its name and who asks for it.
    """

    def __init__(self, operator: Any, engine: Callable[[str, str], Any]) -> None:
        signature = operator.signature
        self.operator = operator
        self._bound = copy.copy(operator)
        for field in operator.role_uses:
            if isinstance(ref := getattr(operator, field), RoleRef):
                self._bound.__dict__[field] = engine(ref.name, f"{operator.name}.{field}")
        self._compute = inspect.unwrap(type(operator).__call__)
        self._ports = tuple(signature.ports.values())
        self._injected = tuple(signature.injected.items())
        self._record, self._outputs = signature.output_record, tuple(signature.outputs)
        # Of each axis that outputs share with inputs, where its size is seen; rows that are made anew have no size yet.
        self._axes: dict[str, tuple[PortField, int]] = {}
        for place, wanted in signature.fields.items():
            if isinstance(wanted, ColumnType):
                for dimension, axis in enumerate(wanted.axes):
                    if not (axis == "batch" and operator.changes_rows):
                        self._axes.setdefault(axis, (place, dimension))
        self._checks = tuple((name, Check(name, wanted)) for name, wanted in signature.outputs.items())

    def run(self, inputs: Mapping[PortField, Any], injected: Mapping[str, Any], cells: Mapping[str, Cell[Any]]) -> Any:
        """What the operator returns, given its inputs and what is injected into it.

        Args:
            inputs: columns and values, those of optional ports perhaps missing.
            injected: keys and metrics, by parameter.
            cells: its state, by field; what they hold afterwards is the new state.

        Raises:
            PortError: what it returns is not what its `__call__` declares.
        """
        bound = self._bound
        if cells:
            bound = copy.copy(bound)
            bound.__dict__.update(cells)
        result = self._compute(bound, **{port.name: port.pack(inputs) for port in self._ports}, **injected)
        if self._record is not None and not isinstance(result, self._record):
            raise PortError(
                f"{self.operator.name} returned {article(type(result).__name__)}; expected the record that its "
                f"__call__ declares: return {self._record.__name__}({', '.join(f'{n}=...' for n in self._outputs)})."
            )
        sizes = {axis: inputs[at].shape[dim] for axis, (at, dim) in self._axes.items() if inputs.get(at) is not None}
        for name, check in self._checks:
            check(self.operator.name, result if self._record is None else getattr(result, name), sizes, "declares")
        return result

    def run_in(self, session: Session, inputs: Mapping[PortField, Any], given: Mapping[str, Any] | None = None) -> Any:
        """What the operator returns; keys, state and metrics are those of `session`.

        Args:
            session: what surrounds the call.
            inputs: see `run`.
            given: what is passed by hand in place of what would be injected.
        """
        name, given = self.operator.name, given or {}
        cells = {field: Cell(session.cell(self.operator, field)) for field in self.operator.states}
        injected = {
            parameter: found if (found := given.get(parameter)) is not None else self._inject(cls, session)
            for parameter, cls in self._injected
        }
        result = self.run(inputs, injected, cells)
        for field, cell in cells.items():
            session.state[f"{name}.{field}"] = cell.value
        for parameter, cls in self._injected:
            if cls is Metrics:
                session.report(name, injected[parameter])
        return result

    def _inject(self, cls: type, session: Session) -> Any:
        return Metrics() if cls is Metrics else session.key(self.operator.name)


class Check:
    """Whether a value is what a port or an output declares.

    Args:
        name: of the port or output, for messages.
        wanted: its type.
    """

    def __init__(self, name: PortField | str, wanted: FieldType) -> None:
        self._name, self._wanted = name, wanted
        self._cls: Final[type | None] = wanted.cls if isinstance(wanted, ValueType) else None
        self._dtype = None if isinstance(wanted, ValueType) else _dtype(wanted.dtype)
        self._axes = () if isinstance(wanted, ValueType) else wanted.axes

    def __call__(self, node: str, value: Any, sizes: dict[str, int], verb: str) -> None:
        """Check class, or dtype and shape; sizes of axes that are not known yet are entered in `sizes`.

        Args:
            node: for messages.
            value: what is there.
            sizes: by axis, of the columns of this call.
            verb: what the node does with the type, for messages.

        Raises:
            PortError: it is something else; names what is declared, what was found, and what mends it.
        """
        if self._cls is not None:
            if not isinstance(value, self._cls):
                self._refuse(node, verb, f"{article(type(value).__name__)}; pass {article(self._cls.__name__)}.")
            return
        if not isinstance(value, np.ndarray if self._dtype is np.dtype(object) else torch.Tensor):
            self._refuse(node, verb, f"{article(type(value).__name__)}; pass {self._example()}.")
        if value.dtype != self._dtype:
            found = str(value.dtype).removeprefix("torch.")
            call = "astype(object)" if self._dtype is np.dtype(object) else f"to({self._dtype})"
            self._refuse(node, verb, f"{found}; convert it: .{call}.")
        shape = value.shape
        if len(shape) != len(self._axes):
            axes = " ".join(self._axes)
            self._refuse(node, verb, f"of the shape {tuple(shape)}; expected {len(self._axes)} axes: {axes}.")
        for axis, size in zip(self._axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise PortError(
                    f"{node}.{self._name} has the shape {tuple(shape)}, so its {axis} axis is {size} long, but other "
                    f"columns of this call have {sizes[axis]}; expected one length for all."
                )

    def _refuse(self, node: str, verb: str, found: str) -> None:
        raise PortError(f"{node}.{self._name} {verb} {self._wanted}, but is {found}")

    def _example(self) -> str:
        if self._dtype is np.dtype(object):
            return "a numpy array of dtype object"
        return f"a torch.Tensor of dtype {str(self._dtype).removeprefix('torch.')}"


def article(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _dtype(name: str) -> Any:
    return np.dtype(object) if name == "object" else getattr(torch, name)
