"""Operators: the nodes of a graph, as plain Python callables.

An operator is a frozen record of hyper-parameters plus one `__call__` whose annotations are its ports::

    class LengthPenalty(Operator):
        coef: float = 0.01

        def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
            length = response_mask.sum(-1, keepdim=True)
            return torch.where(response_mask, token_level_scores - self.coef / length, token_level_scores)

Called with tensors it computes; called with the symbols of an `algorithm` it records a node. Inside `__call__` columns
are plain tensors, records are NamedTuples of just the columns that the port names, and role fields are live engines. A
subclass may call ``super().__call__(...)`` there: that computes at once, with the same engines, state, key and metrics.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.core.operators import session as sessions
from flowrl.core.operators.effects import HasEffects
from flowrl.core.operators.ports import (
    Port,
    PortField,
    Signature,
    refuse_no_function,
    signature_of,
    snake_case,
    with_more,
)
from flowrl.core.operators.roles import RoleUse, role_use
from flowrl.core.operators.session import Call, Cell, State, computes, refuse_misfits, supplied_to
from flowrl.core.operators.symbols import Symbol, prefix, prefixed
from flowrl.core.operators.when import ALWAYS, SKIPPED, Skipped, When, skipped
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import NowByHand
from flowrl.errors import BindError, DefinitionError, ParameterError, PortError, type_of
from flowrl.record_types import located
from flowrl.spec import defining_frame, in_step, schedules, where_defined

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

Granularity = Literal["row", "group", "batch"]
T = TypeVar("T")


class Operator(HasEffects):
    """Base class of all operators; see the module's docstring, and DESIGN in the docs.

    Class attributes:
        granularity: ``"row"`` (each row alone), ``"group"`` (all rows of one `uid`) or ``"batch"`` (all rows): what an
            executor may split.
        new_axes: axes that have another length or other entries in its outputs than in its inputs. ``("batch",)``: the
            output rows are not the input rows (`Repeat`, `Filter`); ``("response",)``: responses are cut or joined to
            other widths. A sequence is a prompt and its response, so it changes with either.

    Raises:
        DefinitionError: where a subclass is defined, with file and line: a port without annotation, an unknown column,
            a default that nothing would use, two things of one name, no `__call__`.
    """

    granularity: ClassVar[Granularity] = "batch"
    new_axes: ClassVar[tuple[str, ...]] = ()
    role_uses: ClassVar[dict[str, RoleUse]] = {}
    states: ClassVar[Mapping[str, State[Any]]] = {}
    _signature: ClassVar[Signature]
    _when: ClassVar[When] = ALWAYS
    """`when` shadows it in an instance."""

    def __init_subclass__(cls, definer: FrameType | None = None, **kwargs: Any) -> None:
        called = f"{cls.__name__}.__call__" if definer is None else cls.__name__  # of a function, see `.function`
        definer = definer or defining_frame()
        super().__init_subclass__(definer=definer, **kwargs)
        where = f"{where_defined(definer)}: {cls.__name__}"
        hints = typing.get_type_hints(cls, localns=dict(definer.f_locals), include_extras=True)
        fields = {f.name: f.default for f in dataclasses.fields(typing.cast(Any, cls))}  # in their order
        cls.role_uses = {}
        for name, default in fields.items():
            with located(f"{where}.{name}"):
                if (use := role_use(hints[name], getattr(default, "default", default))) is not None:
                    cls.role_uses[name] = use
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
            refuse_no_function(call, f"{where}.__call__", "def __call__(self, values: Values) -> Returns")
            code = inspect.unwrap(call).__code__
            line = f"{code.co_filename}:{code.co_firstlineno}"
            cls._signature = signature_of(call, f"{line}: {called}", definer.f_locals)
            cls.__call__ = _dispatching(call, cls._signature)  # type: ignore[method-assign]
        _refuse_misdeclared(cls, fields, where)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is Operator:
            raise ParameterError("Operator is the base of operators and computes nothing; make one of a subclass.")
        if any(is_column(value) for value in (*args, *kwargs.values())):
            raise ParameterError(
                f"{cls.__name__} takes parameters, and was given columns; call it on columns: {cls.__name__}()(...)."
            )
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PortError(f"{self.name} has no __call__, so it computes nothing; define one in {type(self).__name__}.")

    @property
    def signature(self) -> Signature:
        """The ports, `more_ports` among them."""
        own = self.own_ports
        return with_more(own, self.more_ports) if own.takes_more else own

    @property
    def own_ports(self) -> Signature:
        """The ports of `__call__`; like `more_ports`, one object for as long as the operator is."""
        return self._signature

    @property
    def more_ports(self) -> Signature:
        """The ports that come by the parameters, where `__call__` takes `FromParameters`: those of the field `loss`.

        It is one object for as long as the operator is.
        """
        loss: Signature = typing.cast(Any, self).loss.signature
        return loss

    @classmethod
    def usual_signature(cls) -> Signature:
        """The ports of an operator with its default loss; of all others, `signature`."""
        own: Signature = cls._signature
        return with_more(own, typing.cast(Any, cls).loss.signature) if hasattr(cls, "loss") else own

    @property
    def rows_factor(self) -> int:
        """How many rows go out for every row that comes in."""
        return 1

    def creates_axis(self, axis: str) -> bool:
        """Whether it makes an axis anew that it also reads."""
        return axis in self.new_axes or (axis == "sequence" and not {"prompt", "response"}.isdisjoint(self.new_axes))

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """Parameters that must divide the number of rows, by name."""
        return {}

    @property
    def prior_updates(self) -> int:
        """How many updates the weights that it writes may be ahead of those that sampled its rows: 1 for a second
        update in a step. It runs after writers of the role that allow less."""
        return 0

    replicated: ClassVar[frozenset[str]] = frozenset()
    """Columns of which every rank is given all rows, even where `shares` deals the rows out."""

    @property
    def replicated_columns(self) -> frozenset[str]:
        """`replicated`, and what the parameters add to it."""
        return self.replicated

    def shares(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor] | None:
        """Which rows each rank is given by an operator over the whole batch; None gives all rows to every rank.

        Args:
            tokens: int64 ``[rows]``, attended tokens of each row.
            ranks: of the role that runs it.
            key: of the node in this step.

        Returns:
            int64 row numbers, ascending, for each rank; the operator takes a `Now` to know which it has.
        """
        return None

    def wants(self) -> Mapping[str, bool]:
        """The optional ports that the hyper-parameters need (True) or cannot use (False); others may be left open."""
        return {}

    def rehearse(self, tokenizer_of: Callable[[str], ChatTokenizer | None]) -> None:
        """Try what can be tried before anything is loaded, and refuse what would fail then.

        Args:
            tokenizer_of: by which a role reads and writes; None where its model is not on this machine.
        """

    @property
    def name(self) -> str:
        """The node's name: snake_case of the class, or what `named` gave."""
        return self.__dict__.get("_name") or snake_case(type(self).__name__)

    def named(self, name: str) -> Self:
        """The same operator under another node name.

        Raises:
            ParameterError: `name` is no identifier.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ParameterError(f"{name!r} is not a node name; expected an identifier such as 'gae_long'.")
        renamed = copy.copy(self)
        object.__setattr__(renamed, "_name", name)
        for field in self.states:  # cells belong to one node
            renamed.__dict__.pop(field, None)
        return renamed

    def in_step(self, step: int) -> Self:
        """The same operator with the numbers that its schedules give for a step; itself where it has none.

        Args:
            step: how many were done before.

        Raises:
            ParameterError: a number that is not allowed.
        """
        now = in_step(self, step)
        return now if now is self else now.in_place_of(self)

    def when(self, every: int = 1, start: int = 0) -> Self:
        """The same operator in some steps only: ``UpdateActor().when(start=20)``; see `flowrl.When`.

        What reads the outputs of a node that does not run, does not run in that step either.

        Raises:
            ParameterError: `every` is below 1, or `start` below 0.
        """
        made = copy.copy(self)
        made.__dict__["_when"] = When(every, start)
        return made

    def in_place_of(self, other: Operator) -> Self:
        """The same operator under the name of another, and in the steps in which that runs."""
        made = self.named(other.name)
        if other._when is not ALWAYS:
            made.__dict__["_when"] = other._when
        return made

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
            return Call(self.in_step(session.now.step), session.engine).run_in(session, inputs, injected)[0]
        for name, schedule in schedules(self).items():
            raise BindError(
                f"{self.name}.{name} is {schedule!r}, and no job is active to say which step it is; call it inside "
                f"`with job.eager():`, or say it: .in_step(0)(...)."
            )
        given = dict(injected or {})
        for name, cls in self.signature.injected.items():
            if given.get(name) is None:
                given[name] = self._by_hand(name, cls)
        supplied = {cls: given[name] for name, cls in self.signature.injected.items()}
        cells = {field: Cell(getattr(self, field).value) for field in self.states}

        def supply(cls: type) -> Any:
            return supplied[cls] if cls in supplied else self._by_hand(cls.__name__.lower(), cls)

        result, _ = Call(self, self._no_engine).run(inputs, given, cells, supply)
        for field, cell in cells.items():
            getattr(self, field).value = cell.value
        return result

    def _no_engine(self, role: str, asked_by: str) -> Any:
        raise BindError(
            f"{asked_by} is the role {role!r}, and no job is active; call it inside `with job.eager():`, or put a live "
            f"engine in the field: {type(self).__name__}({asked_by.removeprefix(f'{self.name}.')}=engine)."
        )

    def _by_hand(self, name: str, cls: type) -> Any:
        if cls is not Key:
            return Metrics() if cls is Metrics else NowByHand(self.name, name)
        raise BindError(
            f"{self.name} draws random numbers, and no job is active to derive its key; call it inside "
            f"`with job.eager():`, or pass {name}=Key.of(seed)."
        )


def _dispatching(call: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """The `__call__` that records on symbols and computes on tensors; by ``super()``, it is just `call`."""
    written = inspect.signature(call)

    @functools.wraps(call)
    def __call__(self: Operator, *args: Any, **kwargs: Any) -> Any:
        by_super = computes(type(self)) is not call  # in the `__call__` of a subclass
        parameters = written if by_super or not signature.takes_more else _parameters(self.signature)
        bind = parameters.bind if by_super else parameters.bind_partial
        try:
            bound = bind(self, *args, **kwargs)
        except TypeError as error:
            ports = ", ".join(self.signature.ports)
            raise PortError(f"{self.name}(...) cannot be called like this: {error}. Its ports are ({ports}).") from None
        arguments = bound.arguments
        if by_super:
            for name, cls in signature.injected.items():
                if arguments.get(name) is None:
                    arguments[name] = supplied_to(self, cls)
            return call(*bound.args, **bound.kwargs)
        if before := prefix():
            with prefixed(""):
                return __call__(self.named(f"{before}{self.name}"), *args, **kwargs)
        inputs: dict[PortField, Any] = {}
        for port in self.signature.ports.values():
            inputs.update(_field_values(self.name, port, arguments.get(port.name)))
        symbols = [v for v in inputs.values() if isinstance(v, Symbol)]
        if symbols:
            return symbols[0]._tracer.record(self, inputs)
        session = sessions.current()
        idle = session is not None and not self._when.runs(session.now.step)
        if idle or any(v is SKIPPED for v in inputs.values()):
            return skipped(self.signature)
        _check_complete(self, inputs)
        return self.run(inputs, {name: arguments.get(name) for name in self.signature.injected})

    return __call__


def _parameters(signature: Signature) -> inspect.Signature:
    """The parameters of a `__call__` whose ports come partly by the operator's parameters."""
    names = ("self", *signature.ports, *signature.injected)
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def _refuse_misdeclared(cls: type[Operator], fields: Mapping[str, Any], where: str) -> None:
    """Refuse what a class says of itself, where it is not what can be said, or has a name that is taken."""
    names = {*fields, *cls.states} - {"prior_updates"}  # which a subclass may make a parameter
    if taken := next((name for name in sorted(names) if hasattr(Operator, name)), None):
        raise DefinitionError(
            f"{where}.{taken} is a parameter or state, and every operator has something of that name; give it another, "
            f"or write `{taken}: ClassVar[...] = ...` to declare that."
        )
    if cls.__call__ is not Operator.__call__ and not hasattr(cls.__call__, "__wrapped__"):
        raise DefinitionError(
            f"{where}.__call__ is that of a base which is no Operator, so it has no ports; define it in the class "
            f"itself, or derive that base from Operator."
        )
    if cls.granularity not in typing.get_args(Granularity):
        raise DefinitionError(
            f"{where}.granularity is {cls.granularity!r}; expected one of "
            f"{', '.join(map(repr, typing.get_args(Granularity)))}: what an executor may split the rows by."
        )
    if not isinstance(cls.new_axes, tuple) or not all(isinstance(axis, str) for axis in cls.new_axes):
        raise DefinitionError(
            f"{where}.new_axes is {cls.new_axes!r}; expected axes that it makes anew, such as ('batch',)."
        )
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    if both := next((name for name in ports if name in fields or name in cls.states), None):
        raise DefinitionError(
            f"{where} has the port {both!r} and a parameter or state of that name; give one of them another name, so "
            f"that '{snake_case(cls.__name__)}.{both}' means one thing."
        )
    says = cls.more_ports is not Operator.more_ports or hasattr(cls, "loss") or "loss" in fields
    if ports and cls._signature.takes_more and not says:
        raise DefinitionError(
            f"{where}.__call__ takes the columns of its loss, and there is no field of that name; declare one: "
            f"`loss: Loss = PPOClip()`."
        )
    outputs = cls._signature.outputs.values() if ports else ()
    axes = {axis for written in outputs if isinstance(written, ColumnType) for axis in written.axes}
    if ports and (unwritten := [axis for axis in cls.new_axes if axis not in axes]):
        raise DefinitionError(
            f"{where}.new_axes names {unwritten[0]!r}, which is no axis of what it writes; expected some of "
            f"{', '.join(sorted(axes)) or 'none'}."
        )
    columns = {place.name for port in ports.values() for place in port.fields}
    if not isinstance(cls.replicated, frozenset) or (ports and not cls.replicated <= columns):
        raise DefinitionError(
            f"{where}.replicated is {cls.replicated!r}; expected a frozenset of columns that it reads, some of "
            f"{', '.join(sorted(columns))}."
        )


def is_column(value: Any) -> bool:
    """Whether it is a column, the symbol of one, or a record of these; none of them is a parameter."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return any(map(is_column, value))
    return isinstance(value, Symbol | Skipped | torch.Tensor | np.ndarray)


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
        found = repr(argument) if isinstance(argument, Symbol) else type_of(argument)
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
