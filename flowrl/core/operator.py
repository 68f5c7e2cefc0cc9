"""Operators: the nodes of a graph, as plain Python callables.

An operator is a frozen record of hyper-parameters plus one `__call__` whose annotations are its ports::

    class LengthPenalty(Operator):
        coef: float = 0.01

        def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
            length = response_mask.sum(-1, keepdim=True)
            return torch.where(response_mask, token_level_scores - self.coef / length, token_level_scores)

Called with tensors it computes; called with the symbols of an `algorithm` it records a node. Inside `__call__` columns
are plain tensors, records are NamedTuples of just the columns that the port names, and role fields are live engines.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload

import numpy as np
import torch

from flowrl.columns import ColumnType
from flowrl.core import session as sessions
from flowrl.core.ports import Port, PortField, Signature, signature_of, snake_case
from flowrl.core.roles import RoleRef, RoleUse, role_use
from flowrl.core.symbols import Symbol
from flowrl.data.metrics import Metrics
from flowrl.data.record_types import FieldType, ValueType
from flowrl.errors import BindError, DefinitionError, ParameterError, PortError
from flowrl.spec import Spec, defining_frame, where_defined

Granularity = Literal["row", "group", "batch"]
T = TypeVar("T")
K = TypeVar("K", PortField, str)


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
        DefinitionError: `initial` is not a function.
    """

    def __init__(self, initial: Callable[[Any], T]) -> None:
        if not callable(initial):
            raise DefinitionError(
                f"{where_defined(sys._getframe(1))}: State({initial!r}) wants a function of the operator that gives "
                f"the first value; write State(lambda self: {initial!r})."
            )
        self.initial = initial

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> State[T]: ...
    @overload
    def __get__(self, instance: Operator, owner: type) -> Cell[T]: ...
    def __get__(self, instance: Operator | None, owner: type) -> State[T] | Cell[T]:
        if instance is None:
            return self
        # Outside a session the operator's own instance keeps the cell (this descriptor does not shadow __dict__).
        return typing.cast(Cell[T], instance.__dict__.setdefault(self.name, Cell(self.initial(instance))))


class Operator(Spec):
    """Base class of all operators; see the module's docstring, and DESIGN in the docs.

    Class attributes:
        granularity: ``"row"`` (each row alone), ``"group"`` (all rows of one `uid`) or ``"batch"`` (all rows): what an
            executor may split.
        changes_rows: the rows that go out are not those that come in (`Repeat`, filters).

    Raises:
        DefinitionError: where a subclass is defined, with file and line: a port without annotation, an unknown column,
            a mutable default, no `__call__`.
    """

    granularity: ClassVar[Granularity] = "batch"
    changes_rows: ClassVar[bool] = False
    role_uses: ClassVar[Mapping[str, RoleUse]] = {}
    states: ClassVar[Mapping[str, State[Any]]] = {}
    _signature: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        definer = defining_frame()
        where = f"{where_defined(definer)}: {cls.__name__}"
        hints = typing.get_type_hints(cls, localns=dict(definer.f_locals), include_extras=True)
        fields = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]  # in their order
        cls.role_uses = {name: use for name in fields if (use := role_use(hints[name])) is not None}
        cls.states = {n: v for base in reversed(cls.__mro__) for n, v in vars(base).items() if isinstance(v, State)}
        if parameter := next((name for name in cls.states if name in fields), None):
            raise DefinitionError(
                f"{where}.{parameter} is a State with an annotation, which would make it a parameter; write "
                f"`{parameter} = State(...)`."
            )
        call = cls.__dict__.get("__call__")
        if call is None and not hasattr(cls, "_signature") and "signature" not in cls.__dict__:
            raise DefinitionError(
                f"{where} has no __call__; define one whose annotations are its ports: "
                f"`def __call__(self, values: Values) -> Returns`."
            )
        if call is not None:
            line = f"{call.__code__.co_filename}:{call.__code__.co_firstlineno}"
            cls._signature = signature_of(call, f"{line}: {cls.__name__}", definer.f_locals)
            cls.__call__ = _dispatching(call)  # type: ignore[method-assign]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if any(_is_column(value) for value in (*args, *kwargs.values())):
            raise ParameterError(
                f"{cls.__name__} takes parameters, and was given columns; call it on columns: {cls.__name__}()(...)."
            )
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def signature(self) -> Signature:
        """The ports."""
        return self._signature

    @property
    def effects(self) -> frozenset[str]:
        """What this operator does that rules look for along the dataflow, such as ``{"kl"}``."""
        return frozenset()

    @property
    def rows_factor(self) -> int:
        """How many rows go out for every row that comes in."""
        return 1

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """Parameters that must divide the number of rows, by name."""
        return {}

    def wants(self) -> Mapping[str, bool]:
        """The optional ports that the hyper-parameters need (True) or cannot use (False); others may be left open."""
        return {}

    @property
    def name(self) -> str:
        """The node's name: snake_case of the class, or what `named` gave."""
        return self.__dict__.get("_name") or snake_case(type(self).__name__)

    def named(self, name: str) -> Self:
        """The same operator under another node name."""
        if not name.isidentifier():
            raise ParameterError(f"{name!r} is not a node name; expected an identifier such as 'gae_long'.")
        renamed = copy.copy(self)
        object.__setattr__(renamed, "_name", name)
        for field in self.states:  # cells belong to one node
            renamed.__dict__.pop(field, None)
        return renamed

    def run(self, inputs: Mapping[PortField, Any], injected: Mapping[str, Any] | None = None) -> Any:
        """Compute on tensors, given the values of the ports' fields.

        Roles, keys, state and metrics come from the active session; without one, live engines must stand in the role
        fields, and a key is passed by hand.

        Raises:
            PortError: an array has a wrong dtype or shape.
            BindError: a role is not bound, or a key is wanted and there is no session.
        """
        session = sessions.current()
        sizes = _check_arrays(self.name, self.signature.fields, inputs, {})
        bound = copy.copy(self)
        for field in self.role_uses:
            if isinstance(ref := getattr(self, field), RoleRef):
                if session is None:
                    raise BindError(
                        f"{self.name}.{field} is the role {ref.name!r}, and no job is active; call it inside "
                        f"`with job.eager():`, or put a live engine in the field: "
                        f"{type(self).__name__}({field}=engine)."
                    )
                bound.__dict__[field] = session.engine(ref.name, f"{self.name}.{field}")
        for field, state in self.states.items():
            if session is None:
                value = getattr(self, field).value
            else:
                name = f"{self.name}.{field}"
                value = session.state[name] if name in session.state else state.initial(self)
            bound.__dict__[field] = Cell(value)
        given = dict(injected or {})
        for name, cls in self.signature.injected.items():
            if given.get(name) is None:
                given[name] = self._inject(name, cls, session)
        compute = type(self).__call__.__wrapped__  # type: ignore[attr-defined]
        result = compute(bound, **{p.name: p.pack(inputs) for p in self.signature.ports.values()}, **given)
        record = self.signature.output_record
        if record is not None and not isinstance(result, record):
            raise PortError(
                f"{self.name} returned {_article(type(result).__name__)}; expected the record that its __call__ "
                f"declares: return {record.__name__}({', '.join(f'{name}=...' for name in self.signature.outputs)})."
            )
        if self.changes_rows:
            sizes.pop("batch", None)
        _check_arrays(self.name, self.signature.outputs, self.signature.unpack(result), sizes, "declares")
        for field in self.states:
            value = bound.__dict__[field].value
            if session is None:
                getattr(self, field).value = value
            else:
                session.state[f"{self.name}.{field}"] = value
        if session is not None:
            for name, cls in self.signature.injected.items():
                if cls is Metrics:
                    session.report(self.name, given[name])
        return result

    def _inject(self, name: str, cls: type, session: sessions.Session | None) -> Any:
        if cls is Metrics:
            return Metrics()
        if session is None:
            raise BindError(
                f"{self.name} draws random numbers, and no job is active to derive its key; call it inside "
                f"`with job.eager():`, or pass {name}=Key.of(seed)."
            )
        return session.key(self.name)


def _dispatching(call: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` that records on symbols and computes on tensors."""
    parameters = inspect.signature(call)

    @functools.wraps(call)
    def __call__(self: Operator, *args: Any, **kwargs: Any) -> Any:
        try:
            arguments = parameters.bind_partial(self, *args, **kwargs).arguments
        except TypeError as error:
            ports = ", ".join(self.signature.ports)
            raise PortError(f"{self.name}(...) cannot be called like this: {error}. Its ports are ({ports}).") from None
        inputs: dict[PortField, Any] = {}
        for port in self.signature.ports.values():
            inputs.update(_field_values(self.name, port, arguments.get(port.name)))
        symbols = [v for v in inputs.values() if isinstance(v, Symbol)]
        if symbols:
            return symbols[0]._tracer.record(self, inputs)
        _check_complete(self, inputs)
        return self.run(inputs, {name: arguments.get(name) for name in self.signature.injected})

    return __call__


def _is_column(value: Any) -> bool:
    """Whether it is a column, the symbol of one, or a record of these; none of them is a parameter."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return any(map(_is_column, value))
    return isinstance(value, Symbol | torch.Tensor | np.ndarray)


def _field_values(node: str, port: Port, argument: Any) -> dict[PortField, Any]:
    """What was passed for a port, by field."""
    if argument is None:
        return {}
    if port.record is None:
        if isinstance(argument, tuple) and any(isinstance(field, Symbol) for field in argument):
            record, wanted = type(argument).__name__, port.fields[PortField(port.name)]
            raise PortError(
                f"{node}.{port.name} wants {wanted}, but was given a whole record ({record}); pass the "
                f"one column it wants, such as record.{next(iter(getattr(argument, '_fields', ['column'])))}."
            )
        return {PortField(port.name): argument}
    missing = [field.name for field in port.fields if isinstance(argument, Symbol) or not hasattr(argument, field.name)]
    if missing:
        found = repr(argument) if isinstance(argument, Symbol) else f"a {type(argument).__name__}"
        names = ", ".join(field.name for field in port.fields)
        raise PortError(
            f"{node}.{port.name} wants a record with the columns {names}, but was given {found}, which lacks "
            f"{', '.join(missing)}; pass a record that has them."
        )
    return {field: getattr(argument, field.name) for field in port.fields}


def _check_complete(operator: Operator, inputs: Mapping[PortField, Any]) -> None:
    """Refuse a call on tensors that lacks what is wanted, or has what is not: what a graph refuses when it is built."""
    wants = operator.wants()
    for port in operator.signature.ports.values():
        given = any(inputs.get(field) is not None for field in port.fields)
        if not given and (wants.get(port.name) or not port.optional):
            raise PortError(
                f"{operator.name}.{port.name} wants {', '.join(map(str, port.fields.values()))}, but was not given; "
                f"pass {port.name}=..."
            )
        if given and wants.get(port.name) is False:
            raise PortError(f"{operator.name}.{port.name} was given, but {operator!r} does not use it; leave it out.")


def _check_arrays(
    node: str,
    types: Mapping[K, FieldType],
    values: Mapping[K, Any],
    sizes: dict[str, int],
    verb: str = "wants",
) -> dict[str, int]:
    """Check dtype and shape of real arrays, binding axis sizes across all; `verb` is what `node` does with a type.

    Raises:
        PortError: naming the port, what it wants and what it was given.
    """
    sizes = dict(sizes)
    for key, value in values.items():
        wanted = types[key]
        says = f"{node}.{key} {verb} {wanted}, but is"
        if isinstance(wanted, ValueType):
            if not isinstance(value, wanted.cls):
                raise PortError(f"{says} {_article(type(value).__name__)}; pass {_article(wanted.cls.__name__)}.")
            continue
        if not isinstance(value, np.ndarray if wanted.dtype == "object" else torch.Tensor):
            raise PortError(f"{says} {_article(type(value).__name__)}; pass {_make(wanted)}.")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != wanted.dtype:
            call = "astype(object)" if wanted.dtype == "object" else f"to(torch.{wanted.dtype})"
            raise PortError(f"{says} {dtype}; convert it: .{call}.")
        if value.ndim != len(wanted.axes):
            raise PortError(
                f"{says} of the shape {tuple(value.shape)}; expected {len(wanted.axes)} axes: {' '.join(wanted.axes)}."
            )
        for axis, size in zip(wanted.axes, value.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise PortError(
                    f"{node}.{key} has the shape {tuple(value.shape)}, so its {axis} axis is {size} long, but other "
                    f"columns of this call have {sizes[axis]}; expected one length for all."
                )
    return sizes


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _make(wanted: ColumnType) -> str:
    return "a numpy array of dtype object" if wanted.dtype == "object" else f"a torch.Tensor of dtype {wanted.dtype}"
