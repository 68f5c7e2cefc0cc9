"""How an operator runs: its session, its state cells, and the call that binds it to engines.

Runners run each node inside a `Session`; ``with job.eager():`` opens one for code that calls operators directly.

Columns are checked once, where they are written: a `Call` checks its outputs and trusts its inputs. Direct calls of an
operator check the inputs too (`Operator.run`).
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
from flowrl.core.operators.in_place import guarded, refuse_written, versions
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
        state: state cells of a checkpoint: ``{"node.field": value}``.
    """

    def __init__(self, engines: Mapping[str, Any], seed: int, state: Mapping[str, Any] | None = None) -> None:
        self.engines = dict(engines)
        self.seed = seed
        self.step = 0
        self._now: Now | None = None
        self._given = state or {}
        self.state: dict[str, Any] = dict(self._given)
        self.metrics: dict[str, Metrics] = {}
        self._before: Mapping[str, Any] = self.state  # the state at the start of the step
        self.skipped = False  # whether a gate has skipped the update of this step

    def engine(self, role: str, field: str) -> Any:
        """The live engine of `role`, for the field of a node, which an error names."""
        if role not in self.engines:
            raise BindError(
                f"{field} is the role {role!r}, which is not bound; bound are {sorted(self.engines) or 'none'}. Bind "
                f"it: graph.bind({role}=...).",
                code="job.unbound-role",
                role=role,
                field=field,
                known=sorted(self.engines),
            )
        return self.engines[role]

    def cell(self, node: str, field: str, operator: Any) -> Any:
        """The value of a state cell of a node; at first, the initial value of the operator."""
        name = f"{node}.{field}"
        return self.state[name] if name in self.state else operator.states[field].initial(operator)

    def key(self, node: str) -> Key:
        """The key of a node in this step and round."""
        key = node_key(self.seed, self.step, node)
        return key.derive("round", self.now.round.number) if self.now.round.number else key

    def report(self, node: str, metrics: Metrics) -> None:
        """Add the metrics of a node in this step."""
        if node in self.metrics:
            self.metrics[node].merge(metrics)
        else:
            self.metrics[node] = metrics

    def changed(self) -> dict[str, Any]:
        """The state cells whose value is not the given one."""
        return {cell: value for cell, value in self.state.items() if self._given.get(cell, self) is not value}

    def all_metrics(self) -> Metrics:
        """The metrics of all nodes in this step."""
        first, *others = self.metrics.values() or [Metrics()]
        for other in others:
            first.merge(other)
        return first

    @property
    def now(self) -> Now:
        """The injected `Now`; schedules use its step, and keys use `step`."""
        return Now(self.step) if self._now is None else self._now

    def begin_step(self, step: int, now: Now | None = None) -> None:
        """Start `step`: keys change, metrics start empty. In a validation, schedules use the step of `now`."""
        self.step, self._now, self.metrics = step, now, {}
        self._before, self.skipped = dict(self.state), False

    def skip_step(self) -> None:
        """Skip the update of this step: state cells have their values from its start, and operators that write weights
        are skipped."""
        self.state, self.skipped = dict(self._before), True

    @contextmanager
    def active(self) -> Iterator[Session]:
        """Make this the session of operator calls inside the block."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)


def current() -> Session | None:
    """The active session, or None."""
    return _active.get()


class Cell(Generic[T]):
    """The value of a state field during one call; its last value becomes the state of the next step."""

    def __init__(self, value: T) -> None:
        self.value = value


class State(Generic[T]):
    """A field that changes over steps, such as an adaptive coefficient: ``beta = State(lambda self: self.coef)``.

    Inside `__call__` it is a `Cell`: read and assign ``self.beta.value``. The session owns the cell, stores its value
    after a successful call, and writes it to checkpoints; the operator itself stays frozen.

    Args:
        initial: the first value, as a function of the operator. Values must be JSON-serializable.

    Raises:
        DefinitionError: `initial` is not a function of one argument.
    """

    def __init__(self, initial: Callable[[Any], T]) -> None:
        where = where_defined(sys._getframe(1))
        if not callable(initial):
            raise DefinitionError(
                f"{where}: State({initial!r}) got no function of the operator. Write State(lambda self: {initial!r}).",
                code="operator.state",
                where=where,
                found=repr(initial),
            )
        try:
            inspect.signature(initial).bind(None)
        except ValueError:  # without a signature, such as an `attrgetter`
            pass
        except TypeError as error:
            raise DefinitionError(
                f"{where}: State(...) needs a function of the operator alone, but calling it with one argument fails: "
                f"{error}. Write State(lambda self: ...).",
                code="operator.state",
                where=where,
                reason=str(error),
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
        if self.name not in getattr(owner, "states", ()):
            raise DefinitionError(
                f"{owner.__name__}.{self.name} is a State, which only operators have: nothing would save it in "
                f"checkpoints. Move it to an operator.",
                code="operator.state",
                owner=owner.__name__,
                state=self.name,
            )
        # Outside a session the operator's own instance has the cell (this descriptor does not shadow __dict__).
        return cast(Cell[T], instance.__dict__.setdefault(self.name, Cell(self.initial(instance))))


class Call:
    """One operator, bound to engines.

    The live engine of a role is ``engine(role, field of the node)``.
    """

    def __init__(self, operator: Any, engine: Callable[[str, str], Any]) -> None:
        self._name, self._operator, self._states = operator.name, operator, tuple(operator.states)
        self._bound = copy.copy(operator)
        for field, use in operator.role_uses.items():
            engines = {
                path: engine(ref.name, f"{operator.name}.{path}") if isinstance(ref, RoleRef) else ref
                for path, ref in use.of(operator, field).items()
            }
            by_name = {path.partition(".")[2]: found for path, found in engines.items()}
            self._bound.__dict__[field] = by_name if use.several else engines[field]
        self._layout = _layout_of(operator)

    def run(
        self,
        inputs: Mapping[PortField, Any],
        injected: Mapping[str, Any],
        cells: Mapping[str, Cell[Any]],
        supply: Callable[[type], Any],
    ) -> tuple[Any, dict[str, Any]]:
        """The return value of the operator, and its outputs by name.

        Args:
            inputs: columns and values; those of optional ports may be missing.
            cells: its state, by field; their last values are the new state.
            supply: returns the injected value of a class, for a `__call__` that is called by ``super()``.
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
        before = versions(inputs)
        result = layout.compute(bound, **arguments, **injected)
        refuse_written(self._operator, before)
        if not layout.outputs:
            if result is not None:
                raise PortError(
                    f"{self._name} returned {type_of(result)}, but its __call__ declares `-> None`. Declare what it "
                    f"returns, or return nothing.",
                    code="call.return",
                    node=self._name,
                    expected=None,
                    found=type_of(result),
                )
            written = {}
        elif layout.record is None:
            written = {layout.outputs[0]: result}
        elif isinstance(result, layout.record):
            written = {name: getattr(result, name) for name in layout.outputs}
        else:
            raise PortError(
                f"{self._name} returned {type_of(result)}. Return the record that its __call__ declares: "
                f"{layout.record.__name__}({', '.join(f'{name}=...' for name in layout.outputs)}).",
                code="call.return",
                node=self._name,
                expected=layout.record.__name__,
                found=type_of(result),
            )
        sizes = {axis: inputs[at].shape[dim] for axis, (at, dim) in layout.axes.items() if at in inputs}
        for name, check in layout.checks:
            check(self._name, written[name], sizes, "declares")
        return result, written

    def run_in(
        self, session: Session, inputs: Mapping[PortField, Any], given: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Like `run`, with keys, state and metrics of `session`; `given` replaces injected values, by parameter."""
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
        for field, cell in cells.items() if not session.skipped else ():
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
    """The original `__call__` of an operator class, with its decorators."""
    written: Callable[..., Any] = operator.__call__.__wrapped__  # type: ignore[attr-defined]
    return written


def supplied_to(bound: Any, cls: type) -> Any:
    """The injected value of `cls`, such as the key, of a bound operator during a call; None outside of a call."""
    supply = bound.__dict__.get(_SUPPLY)
    return None if supply is None else supply(cls)


class _Layout:
    """The common data of all calls of an operator class."""

    def __init__(self, operator: Any) -> None:
        signature = self.signature = operator.signature
        self.compute = computes(type(operator))
        calls = (vars(base).get("__call__") for base in type(operator).__mro__)
        self.supplies = sum(hasattr(call, "__wrapped__") for call in calls) > 1  # it may call one by super()
        self.ports = tuple(_packed(port) for port in signature.ports.values())
        self.injected = tuple(signature.injected.items())
        self.record, self.outputs = signature.output_record, tuple(signature.outputs)
        self.checks = tuple((name, Check(name, declared)) for name, declared in signature.outputs.items())
        self.takes = {place: Check(place, declared) for place, declared in signature.fields.items()}
        # The column that has the size of each axis; a new axis has no size before the call.
        self.axes: dict[str, tuple[PortField, int]] = {}
        for port in sorted(signature.ports.values(), key=lambda port: port.optional):
            for place, declared in port.fields.items():
                for dimension, axis in enumerate(declared.here if isinstance(declared, ColumnType) else ()):
                    if not operator.creates_axis(axis):
                        self.axes.setdefault(axis, (place, dimension))


_layouts: dict[type, _Layout] = {}


def _layout_of(operator: Any) -> _Layout:
    """The layout of the operator's class, created once unless its parameters change its ports."""
    layout = _layouts.get(type(operator))
    if layout is None or layout.signature is not operator.signature:
        layout = _layouts[type(operator)] = _Layout(operator)
    return layout


def refuse_wrong_inputs(operator: Any, inputs: Mapping[PortField, Any]) -> None:
    """Check dtypes and shapes of the inputs of a direct call."""
    sizes: dict[str, int] = {}
    for place, value in inputs.items():
        _layout_of(operator).takes[place](operator.name, value, sizes, "expects")


def _packed(port: Port) -> tuple[str, type | None, tuple[PortField, ...]]:
    """The port's parameter, its record class, and its fields in the order of that record."""
    if port.record is None:
        return port.name, None, tuple(port.fields)
    record: Any = record_tuple(port.record)
    by_name = {place.name: place for place in port.fields}
    return port.name, record, tuple(by_name[name] for name in record._fields)


class Check:
    """The check of a value against the type of a port or an output."""

    def __init__(self, name: PortField | str, declared: FieldType) -> None:
        self._name, self._declared = name, declared
        self._cls: Final[type | None] = declared.cls if isinstance(declared, ValueType) else None
        self._dtype = None if isinstance(declared, ValueType) else _dtype(declared.dtype)
        self._axes = () if isinstance(declared, ValueType) else declared.here

    def __call__(self, node: str, value: Any, sizes: dict[str, int], verb: str) -> None:
        """Check class, or dtype and shape.

        `sizes` by axis are those of the columns of this call, extended in place; `verb` is "expects" for a port,
        "declares" for an output.
        """
        if self._cls is not None:
            if not isinstance(value, self._cls):
                self._refuse(node, verb, type_of(value), f"Pass {article(self._cls.__name__)}.")
            return
        if not isinstance(value, np.ndarray if self._dtype is np.dtype(object) else torch.Tensor):
            self._refuse(node, verb, type_of(value), f"Pass {self._example()}.")
        if value.dtype != self._dtype:
            call = "astype(object)" if self._dtype is np.dtype(object) else f"to({self._dtype})"
            self._refuse(node, verb, str(value.dtype).removeprefix("torch."), f"Convert it: .{call}.")
        shape = value.shape
        if len(shape) != len(self._axes):
            axes = f"{len(self._axes)} axes: {' '.join(self._axes)}"
            self._refuse(node, verb, f"the shape {tuple(shape)}", f"Expected {axes}.")
        for axis, size in zip(self._axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                fix = f", or declare a new axis: new_axes: ClassVar = ({axis!r},)" if verb == "declares" else ""
                raise PortError(
                    f"{node}.{self._name} has the shape {tuple(shape)}, so its {axis} axis has length {size}, but "
                    f"other columns of this call have {sizes[axis]}. Make them equal{fix}.",
                    code="call.type",
                    node=node,
                    port=str(self._name),
                    axis=axis,
                    expected=sizes[axis],
                    found=size,
                )

    def _refuse(self, node: str, verb: str, found: str, fix: str) -> None:
        got = "got" if verb == "expects" else "returned"
        raise PortError(
            f"{node}.{self._name} {verb} {self._declared}, but {got} {found}. {fix}",
            code="call.type",
            node=node,
            port=str(self._name),
            expected=self._declared,
            found=found,
        )

    def _example(self) -> str:
        if self._dtype is np.dtype(object):
            return "a numpy array of dtype object"
        return f"a torch.Tensor of dtype {str(self._dtype).removeprefix('torch.')}"


def _dtype(name: str) -> Any:
    return np.dtype(object) if name == "object" else getattr(torch, name)
