"""How an operator is run: the session around it, its state cells, and the call that binds it to engines.

A `Session` resolves roles to live engines, derives keys, holds the state cells and collects the metrics. Runners run
each node inside one; ``with job.eager():`` opens one for code that calls operators by hand. Both run the same operators
the same way.

Columns are checked where they are written, once: a `Call` trusts what other nodes wrote, and checks what this one
writes. Whoever calls an operator by hand has its inputs checked too (`Operator.run`).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar, cast, overload

import numpy as np
import torch

from flowrl.columns import ColumnType
from flowrl.core.operators.in_place import guarded, refuse_written, seen
from flowrl.core.operators.ports import Port, PortField
from flowrl.core.operators.roles import RoleRef
from flowrl.data.keys import Key, node_key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.errors import BindError, DefinitionError, PortError, article, type_of
from flowrl.record_types import FieldType, ValueType, record_tuple
from flowrl.spec import where_defined

T = TypeVar("T")
_active: ContextVar[Session | None] = ContextVar("flowrl_session", default=None)


class Session:
    """Engines, seed, step, state and metrics of running operators.

    Args:
        engines: live engines by role.
        seed: root of all keys.
        state: state cells as a checkpoint left them: ``{"node.field": value}``.
    """

    def __init__(self, engines: Mapping[str, Any], seed: int, state: Mapping[str, Any] | None = None) -> None:
        self.engines = dict(engines)
        self.seed = seed
        self.step = 0
        self._now: Now | None = None
        self._given = state or {}
        self.state: dict[str, Any] = dict(self._given)
        self.metrics: dict[str, Metrics] = {}

    def engine(self, role: str, asked_by: str) -> Any:
        """The live engine of `role`.

        Raises:
            BindError: the role is not bound.
        """
        if role not in self.engines:
            raise BindError(
                f"{asked_by} is the role {role!r}, which is not bound; bound are {sorted(self.engines) or 'none'}. "
                f"Bind it: graph.bind({role}=...)."
            )
        return self.engines[role]

    def cell(self, node: str, field: str, operator: Any) -> Any:
        """What a state cell of a node holds; at first, what the node's operator begins with."""
        name = f"{node}.{field}"
        return self.state[name] if name in self.state else operator.states[field].initial(operator)

    def key(self, node: str) -> Key:
        """The key of a node in this step and round."""
        key = node_key(self.seed, self.step, node)
        return key.derive("round", self.now.round.number) if self.now.round.number else key

    def report(self, node: str, metrics: Metrics) -> None:
        """Keep what a node reported in this step."""
        if node in self.metrics:
            self.metrics[node].merge(metrics)
        else:
            self.metrics[node] = metrics

    def changed(self) -> dict[str, Any]:
        """The state cells that hold something else than what was given."""
        return {cell: value for cell, value in self.state.items() if self._given.get(cell, self) is not value}

    def all_metrics(self) -> Metrics:
        """What all nodes reported in this step."""
        first, *others = self.metrics.values() or [Metrics()]
        for other in others:
            first.merge(other)
        return first

    @property
    def now(self) -> Now:
        """What is injected; parameters over time are taken by its step, and keys by `step`."""
        return Now(self.step) if self._now is None else self._now

    def begin_step(self, step: int, now: Now | None = None) -> None:
        """Go to `step`: keys change, metrics start empty. In a validation, what changes over time is as it is `now`."""
        self.step, self._now, self.metrics = step, now, {}

    @contextmanager
    def active(self) -> Iterator[Session]:
        """Make this the session of the operators that are called inside the block."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)


def current() -> Session | None:
    """The active session, or None."""
    return _active.get()


class Cell(Generic[T]):
    """The value of a state field during one call; what it holds at the end is kept for the next step."""

    def __init__(self, value: T) -> None:
        self.value = value


class State(Generic[T]):
    """A field that changes over steps, such as an adaptive coefficient: ``beta = State(lambda self: self.coef)``.

    Inside `__call__` it is a `Cell`: read and assign ``self.beta.value``. Whoever runs the operator owns the cell: it
    is handed in, stored when the call succeeded, and goes into checkpoints; the operator itself stays frozen.

    Args:
        initial: the first value, given the operator. Values must be JSON-able.

    Raises:
        DefinitionError: `initial` is not a function of one argument.
    """

    def __init__(self, initial: Callable[[Any], T]) -> None:
        if not callable(initial):
            raise DefinitionError(
                f"{where_defined(sys._getframe(1))}: State({initial!r}) wants a function of the operator that gives "
                f"the first value; write State(lambda self: {initial!r})."
            )
        try:
            inspect.signature(initial).bind(None)
        except ValueError:  # an `attrgetter`, say, which does not tell what it takes
            pass
        except TypeError as error:
            raise DefinitionError(
                f"{where_defined(sys._getframe(1))}: State(...) wants a function of the operator alone, and calling it "
                f"with that fails: {error}; write State(lambda self: ...)."
            ) from None
        self.initial = initial

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> State[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Cell[T]: ...
    def __get__(self, instance: Any, owner: type) -> State[T] | Cell[T]:
        if instance is None:
            return self
        # Outside a session the operator's own instance keeps the cell (this descriptor does not shadow __dict__).
        return cast(Cell[T], instance.__dict__.setdefault(self.name, Cell(self.initial(instance))))


class Call:
    """One operator, bound to engines.

    Args:
        operator: under its node's name.
        engine: gives the live engine of a role, given its name and who asks for it.
    """

    def __init__(self, operator: Any, engine: Callable[[str, str], Any]) -> None:
        self._name, self._operator, self._states = operator.name, operator, tuple(operator.states)
        self._bound = copy.copy(operator)
        for field in operator.role_uses:
            if isinstance(ref := getattr(operator, field), RoleRef):
                self._bound.__dict__[field] = engine(ref.name, f"{operator.name}.{field}")
        self._layout = _layout_of(operator)

    def run(
        self,
        inputs: Mapping[PortField, Any],
        injected: Mapping[str, Any],
        cells: Mapping[str, Cell[Any]],
        supply: Callable[[type], Any],
    ) -> tuple[Any, dict[str, Any]]:
        """What the operator returns, as it is and by output.

        Args:
            inputs: columns and values, those of optional ports perhaps missing.
            injected: keys and metrics, by parameter.
            cells: its state, by field; what they hold afterwards is the new state.
            supply: gives what a `__call__` that is called by ``super()`` wants injected, by class.

        Raises:
            PortError: what it returns is not what its `__call__` declares.
            InPlaceError: it wrote into a column that it was given.
        """
        bound, layout = self._bound, self._layout
        if cells or layout.supplies:
            bound = object.__new__(type(bound))
            bound.__dict__.update(self._bound.__dict__ | dict(cells) | {_SUPPLY: supply})
        arguments: dict[str, Any] = {}
        for name, record, places in layout.ports:
            if any(place not in inputs for place in places):
                arguments[name] = None
            elif record is None:
                arguments[name] = guarded(inputs[places[0]])
            else:
                arguments[name] = record(*[guarded(inputs[place]) for place in places])
        before = seen(inputs)
        result = layout.compute(bound, **arguments, **injected)
        refuse_written(self._operator, before)
        if not layout.outputs:
            if result is not None:
                raise PortError(
                    f"{self._name} returned {type_of(result)}, which nothing could read, since its "
                    f"__call__ declares `-> None`; declare what it returns, or return nothing."
                )
            written = {}
        elif layout.record is None:
            written = {layout.outputs[0]: result}
        elif isinstance(result, layout.record):
            written = {name: getattr(result, name) for name in layout.outputs}
        else:
            raise PortError(
                f"{self._name} returned {type_of(result)}; expected the record that its __call__ "
                f"declares: return {layout.record.__name__}({', '.join(f'{name}=...' for name in layout.outputs)})."
            )
        sizes = {axis: inputs[at].shape[dim] for axis, (at, dim) in layout.axes.items() if at in inputs}
        for name, check in layout.checks:
            check(self._name, written[name], sizes, "declares")
        return result, written

    def run_in(
        self, session: Session, inputs: Mapping[PortField, Any], given: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """What the operator returns, as it is and by output; keys, state and metrics are those of `session`.

        Args:
            session: what surrounds the call.
            inputs: see `run`.
            given: what is passed by hand in place of what would be injected.
        """
        cells = {field: Cell(session.cell(self._name, field, self._operator)) for field in self._states}
        injected: dict[str, Any] = {}
        supplied: dict[type, Any] = {}
        for parameter, cls in self._layout.injected:
            value = None if given is None else given.get(parameter)
            injected[parameter] = supplied[cls] = self._inject(cls, session) if value is None else value

        def supply(cls: type) -> Any:
            if cls not in supplied:
                supplied[cls] = self._inject(cls, session)
            return supplied[cls]

        result, written = self.run(inputs, injected, cells, supply)
        for field, cell in cells.items():
            session.state[f"{self._name}.{field}"] = cell.value
        if Metrics in supplied:
            session.report(self._name, supplied[Metrics])
        return result, written

    def _inject(self, cls: type, session: Session) -> Any:
        if cls is Metrics:
            return Metrics()
        return session.now if cls is Now else session.key(self._name)


_SUPPLY = "_supply"


def computes(operator: type) -> Callable[..., Any]:
    """The `__call__` of an operator class as it was written, with its decorators."""
    written: Callable[..., Any] = operator.__call__.__wrapped__  # type: ignore[attr-defined]
    return written


def supplied_to(bound: Any, cls: type) -> Any:
    """What a bound operator that runs is given of `cls` (a key, say); None outside of a call."""
    supply = bound.__dict__.get(_SUPPLY)
    return None if supply is None else supply(cls)


class _Layout:
    """What calls of an operator class have in common."""

    def __init__(self, operator: Any) -> None:
        signature = self.signature = operator.signature
        self.compute = computes(type(operator))
        calls = (vars(base).get("__call__") for base in type(operator).__mro__)
        self.supplies = sum(hasattr(call, "__wrapped__") for call in calls) > 1  # it may call one by super()
        self.ports = tuple(_packed(port) for port in signature.ports.values())
        self.injected = tuple(signature.injected.items())
        self.record, self.outputs = signature.output_record, tuple(signature.outputs)
        self.checks = tuple((name, Check(name, wanted)) for name, wanted in signature.outputs.items())
        self.takes = {place: Check(place, wanted) for place, wanted in signature.fields.items()}
        # Where the size of each axis is seen; one that is made anew has no size before the call.
        self.axes: dict[str, tuple[PortField, int]] = {}
        for port in sorted(signature.ports.values(), key=lambda port: port.optional):
            for place, wanted in port.fields.items():
                for dimension, axis in enumerate(wanted.here if isinstance(wanted, ColumnType) else ()):
                    if not operator.creates_axis(axis):
                        self.axes.setdefault(axis, (place, dimension))


_layouts: dict[type, _Layout] = {}


def _layout_of(operator: Any) -> _Layout:
    """The layout of the operator's class, made once unless its parameters change its ports."""
    layout = _layouts.get(type(operator))
    if layout is None or layout.signature is not operator.signature:
        layout = _layouts[type(operator)] = _Layout(operator)
    return layout


def refuse_misfits(operator: Any, inputs: Mapping[PortField, Any]) -> None:
    """Check what an operator is given by hand.

    Raises:
        PortError: an array has a wrong dtype or shape.
    """
    sizes: dict[str, int] = {}
    for place, value in inputs.items():
        _layout_of(operator).takes[place](operator.name, value, sizes, "wants")


def _packed(port: Port) -> tuple[str, type | None, tuple[PortField, ...]]:
    """The port's parameter, the record that it takes, and its fields in the order of that record."""
    if port.record is None:
        return port.name, None, tuple(port.fields)
    record: Any = record_tuple(port.record)
    by_name = {place.name: place for place in port.fields}
    return port.name, record, tuple(by_name[name] for name in record._fields)


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
        self._axes = () if isinstance(wanted, ValueType) else wanted.here

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
                self._refuse(node, verb, f"{type_of(value)}; pass {article(self._cls.__name__)}.")
            return
        if not isinstance(value, np.ndarray if self._dtype is np.dtype(object) else torch.Tensor):
            self._refuse(node, verb, f"{type_of(value)}; pass {self._example()}.")
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
                fix = f", or that {node} makes it anew: new_axes: ClassVar = ({axis!r},)" if verb == "declares" else ""
                raise PortError(
                    f"{node}.{self._name} has the shape {tuple(shape)}, so its {axis} axis is {size} long, but other "
                    f"columns of this call have {sizes[axis]}; expected one length for all{fix}."
                )

    def _refuse(self, node: str, verb: str, found: str) -> None:
        raise PortError(f"{node}.{self._name} {verb} {self._wanted}, but is {found}")

    def _example(self) -> str:
        if self._dtype is np.dtype(object):
            return "a numpy array of dtype object"
        return f"a torch.Tensor of dtype {str(self._dtype).removeprefix('torch.')}"


def _dtype(name: str) -> Any:
    return np.dtype(object) if name == "object" else getattr(torch, name)
