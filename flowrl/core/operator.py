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
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.core import session as sessions
from flowrl.core.ports import Port, PortField, Signature, signature_of, snake_case
from flowrl.core.roles import RoleUse, role_use
from flowrl.core.session import Call, Cell, State, refuse_misfits
from flowrl.core.symbols import Symbol
from flowrl.data.balance import Share
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import BindError, DefinitionError, ParameterError, PortError
from flowrl.spec import Spec, defining_frame, where_defined

Granularity = Literal["row", "group", "batch"]
T = TypeVar("T")


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

    whole: ClassVar[frozenset[str]] = frozenset()
    """Columns of which every rank is given all rows, even where `shares` deals the rows out."""

    def shares(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor] | None:
        """Which rows each rank is given by an operator over the whole batch; None gives all rows to every rank.

        Args:
            tokens: int64 ``[rows]``, attended tokens of each row.
            ranks: of the role that runs it.
            key: of the node in this step.

        Returns:
            int64 row numbers, ascending, for each rank; the operator takes a `Share` to know which it has.
        """
        return None

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
        """Compute on tensors that were passed by hand.

        Roles, keys, state and metrics come from the active session; without one, live engines must stand in the role
        fields, and a key is passed by hand.

        Raises:
            PortError: an array has a wrong dtype or shape.
            BindError: a role is not bound, or a key is wanted and there is no session.
        """
        refuse_misfits(self, inputs)
        session = sessions.current()
        if session is not None:
            return Call(self, session.engine).run_in(session, inputs, injected)[0]
        given = dict(injected or {})
        for name, cls in self.signature.injected.items():
            if given.get(name) is None:
                given[name] = self._by_hand(name, cls)
        cells = {field: Cell(getattr(self, field).value) for field in self.states}
        result, _ = Call(self, self._no_engine).run(inputs, given, cells)
        for field, cell in cells.items():
            getattr(self, field).value = cell.value
        return result

    def _no_engine(self, role: str, asked_by: str) -> Any:
        raise BindError(
            f"{asked_by} is the role {role!r}, and no job is active; call it inside `with job.eager():`, or put a live "
            f"engine in the field: {type(self).__name__}({asked_by.removeprefix(f'{self.name}.')}=engine)."
        )

    def _by_hand(self, name: str, cls: type) -> Any:
        if cls is Metrics:
            return Metrics()
        if cls is Share:
            return None  # whoever calls by hand passes all rows
        raise BindError(
            f"{self.name} draws random numbers, and no job is active to derive its key; call it inside "
            f"`with job.eager():`, or pass {name}=Key.of(seed)."
        )


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
