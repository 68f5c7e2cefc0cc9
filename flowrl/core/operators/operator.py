"""Operators: the nodes of a graph, as plain Python callables.

An operator is a frozen record of hyper-parameters plus one `__call__` whose annotations are its ports::

    class LengthPenalty(Operator):
        coef: float = 0.01

        def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
            length = response_mask.sum(-1, keepdim=True)
            return torch.where(response_mask, token_level_scores - self.coef / length, token_level_scores)

Called with tensors it computes; called with the symbols of an `algorithm` it records a node. Inside `__call__`, columns
are plain tensors, records are NamedTuples of the columns that the port names, and role fields are live engines. There,
``super().__call__(...)`` of a subclass computes with the same engines, state, key and metrics.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.core.operators import session as sessions
from flowrl.core.operators.class_validation import Granularity as Granularity
from flowrl.core.operators.class_validation import refuse_misdeclared_class
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
from flowrl.core.operators.session import Call, Cell, State, computes, refuse_wrong_inputs, supplied_to
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

T = TypeVar("T")


class Operator(HasEffects):
    """Base class of all operators; see the module's docstring, and DESIGN in the docs.

    Class attributes:
        granularity: the smallest part of a batch that it can process alone: ``"row"``, ``"group"`` (all rows of one
            `uid`) or ``"batch"`` (all rows).
        new_axes: axes whose length or entries differ between its inputs and outputs. ``("batch",)``: the output rows
            are not the input rows (`Repeat`, `Filter`); ``("response",)``: responses are cut or joined to other
            widths. A sequence is a prompt and its response, so it changes with either.

    Raises:
        DefinitionError: where a subclass is defined, with file and line: a port without annotation, an unknown column,
            a default without effect, one name for two members, no `__call__`.
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
                f"{where}.{parameter} is a State with an annotation, which would make it a parameter. Write "
                f"`{parameter} = State(...)`.",
                code="operator.state",
                where=where,
                state=parameter,
            )
        call = cls.__dict__.get("__call__")
        if call is None and not hasattr(cls, "_signature") and "signature" not in cls.__dict__:
            raise DefinitionError(
                f"{where} has no __call__. Define one whose annotations are its ports: "
                f"`def __call__(self, values: Values) -> Returns`.",
                code="operator.no-call",
                where=where,
            )
        if call is not None:
            refuse_no_function(call, f"{where}.__call__", "def __call__(self, values: Values) -> Returns")
            code = inspect.unwrap(call).__code__
            line = f"{code.co_filename}:{code.co_firstlineno}"
            cls._signature = signature_of(call, f"{line}: {called}", definer.f_locals)
            cls.__call__ = _dispatching(call, cls._signature)  # type: ignore[method-assign]
        refuse_misdeclared_class(cls, Operator, fields, where)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is Operator:
            raise ParameterError(
                "Operator is the base class of operators and has no __call__. Use a subclass.", code="operator.no-call"
            )
        if any(is_column(value) for value in (*args, *kwargs.values())):
            name = cls.__name__
            raise ParameterError(
                f"{name}(...) takes parameters but got columns. Construct the operator, then call it: {name}()(...).",
                code="operator.mixed-call",
                operator=name,
            )
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = type(self).__name__
        raise PortError(
            f"{self.name} has no __call__. Define one in {name}.", code="operator.no-call", where=name, node=self.name
        )

    @property
    def signature(self) -> Signature:
        """The ports, `more_ports` among them."""
        own = self.own_ports
        return with_more(own, self.more_ports) if own.variadic else own

    @property
    def own_ports(self) -> Signature:
        """The ports of `__call__`; like `more_ports`, one object for the lifetime of the operator."""
        return self._signature

    @property
    def more_ports(self) -> Signature:
        """The ports of the parameters, if `__call__` takes ``FromParameters``: those of the field ``loss``."""
        loss: Signature = typing.cast(Any, self).loss.signature
        return loss

    @classmethod
    def usual_signature(cls) -> Signature:
        """The ports with the default loss; of an operator without a loss, all ports."""
        own: Signature = cls._signature
        return with_more(own, typing.cast(Any, cls).loss.signature) if hasattr(cls, "loss") else own

    @property
    def rows_factor(self) -> int:
        """Output rows per input row."""
        return 1

    def creates_axis(self, axis: str) -> bool:
        """Whether an axis of its outputs is a new one, although its inputs have an axis of that name."""
        return axis in self.new_axes or (axis == "sequence" and not {"prompt", "response"}.isdisjoint(self.new_axes))

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """Parameters that must divide the number of rows, by name."""
        return {}

    @property
    def prior_updates(self) -> int:
        """The updates by which the weights that it writes may be newer than those that sampled its rows: 1 for a
        second update in a step. It runs after writers of the role that allow less."""
        return 0

    replicated: ClassVar[frozenset[str]] = frozenset()
    """Columns of which every rank gets all rows, even if `shards` splits the rows."""

    @property
    def replicated_columns(self) -> frozenset[str]:
        """`replicated`, plus the columns that the parameters add."""
        return self.replicated

    def shards(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor] | None:
        """The rows of each rank for an operator over the batch; None gives all rows to every rank.

        Args:
            tokens: int64 ``[rows]``, attended tokens of each row.

        Returns:
            int64 row numbers, ascending, for each rank; the operator reads its own shard from a `Now`.
        """
        return None

    def optional_ports(self) -> Mapping[str, bool]:
        """The optional ports that the parameters require (True) or cannot use (False); others may stay open."""
        return {}

    def rehearse(self, tokenizer_of: Callable[[str], ChatTokenizer | None]) -> None:
        """Check what can be checked before anything is loaded, and raise what would fail later.

        The tokenizer of a role is None if its model is not on this machine.
        """

    @property
    def name(self) -> str:
        """The node's name: snake_case of the class, or the one set by `named`."""
        return self.__dict__.get("_name") or snake_case(type(self).__name__)

    def named(self, name: str) -> Self:
        """The same operator under another node name.

        Raises:
            ParameterError: `name` is not an identifier.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ParameterError(
                f"Invalid node name {name!r}. Use an identifier such as 'gae_long'.",
                code="operator.node-name",
                given=name,
            )
        renamed = copy.copy(self)
        object.__setattr__(renamed, "_name", name)
        for field in self.states:  # cells belong to one node
            renamed.__dict__.pop(field, None)
        return renamed

    def in_step(self, step: int) -> Self:
        """The same operator with the numbers of its schedules in a step, counted from 0; itself without schedules.

        Raises:
            ParameterError: a number is not allowed.
        """
        now = in_step(self, step)
        return now if now is self else now.in_place_of(self)

    def when(self, every: int = 1, start: int = 0) -> Self:
        """The same operator in some steps only: ``UpdateActor().when(start=20)``; see `flowrl.When`.

        Nodes that read the outputs of a skipped node are skipped as well.

        Raises:
            ParameterError: `every` is below 1, or `start` below 0.
        """
        made = copy.copy(self)
        made.__dict__["_when"] = When(every, start)
        return made

    def in_place_of(self, other: Operator) -> Self:
        """The same operator with the name of another, and in the steps in which that one runs."""
        made = self.named(other.name)
        if other._when is not ALWAYS:
            made.__dict__["_when"] = other._when
        return made

    def on(self, inputs: Mapping[PortField, Any], injected: Mapping[str, Any] | None = None) -> Any:
        """Record a node on symbols, or compute on tensors: what a call does, with the value of each port field."""
        symbols = [value for value in inputs.values() if isinstance(value, Symbol)]
        if symbols:
            return symbols[0]._tracer.record(self, inputs)
        session = sessions.current()
        if (session is not None and self._idle_in(session)) or any(value is SKIPPED for value in inputs.values()):
            return skipped(self.signature)
        _check_complete(self, inputs)
        return self.run(inputs, injected)

    def run(self, inputs: Mapping[PortField, Any], injected: Mapping[str, Any] | None = None) -> Any:
        """Compute on tensors.

        Roles, keys, state and metrics come from the active session; without one, the role fields must contain live
        engines, and a key must be passed.

        Raises:
            PortError: an array has a wrong dtype or shape.
            BindError: a role is not bound, or a key is missing and there is no session.
        """
        refuse_wrong_inputs(self, inputs)
        session = sessions.current()
        if session is not None:
            return Call(self.in_step(session.now.step), session.engine).run_in(session, inputs, injected)[0]
        for name, schedule in schedules(self).items():
            raise BindError(
                f"{self.name}.{name} is {schedule!r}, and no job is active that defines the step. Call the operator "
                f"inside `with job.eager():`, or pass the step: .in_step(0)(...).",
                code="session.no-job",
                node=self.name,
                missing="step",
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

    def _idle_in(self, session: sessions.Session) -> bool:
        """Whether it does not run in the current step of a session."""
        writes = any(use.mode == "writes" for use in self.role_uses.values())
        return not self._when.runs(session.now.step) or (writes and session.skipped)

    def _no_engine(self, role: str, field: str) -> Any:
        raise BindError(
            f"{field} is the role {role!r}, and no job is active that binds it. Call the operator inside "
            f"`with job.eager():`, or pass an engine: {type(self).__name__}"
            f"({field.removeprefix(f'{self.name}.')}=engine).",
            code="session.no-job",
            node=self.name,
            missing="role",
            role=role,
        )

    def _by_hand(self, name: str, cls: type) -> Any:
        if cls is not Key:
            return Metrics() if cls is Metrics else NowByHand(self.name, name)
        raise BindError(
            f"{self.name} samples random numbers, and no job is active that derives its key. Call the operator inside "
            f"`with job.eager():`, or pass {name}=Key.of(seed).",
            code="session.no-job",
            node=self.name,
            missing="key",
        )


def _dispatching(call: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """The `__call__` that records on symbols and computes on tensors; called by ``super()``, it is `call`."""
    written = inspect.signature(call)

    @functools.wraps(call)
    def __call__(self: Operator, *args: Any, **kwargs: Any) -> Any:
        by_super = computes(type(self)) is not call  # in the `__call__` of a subclass
        parameters = written if by_super or not signature.variadic else _parameters(self.signature)
        bind = parameters.bind if by_super else parameters.bind_partial
        try:
            bound = bind(self, *args, **kwargs)
        except TypeError as error:
            ports = list(self.signature.ports)
            raise PortError(
                f"{self.name}(...) got wrong arguments: {error}. Its ports are ({', '.join(ports)}).",
                code="call.arguments",
                node=self.name,
                reason=str(error),
                known=ports,
            ) from None
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
        return self.on(inputs, {name: arguments.get(name) for name in self.signature.injected})

    return __call__


def _parameters(signature: Signature) -> inspect.Signature:
    """The parameters of a `__call__` with ports of the operator's parameters."""
    names = ("self", *signature.ports, *signature.injected)
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def is_column(value: Any) -> bool:
    """Whether it is a column, the symbol of one, or a record of these."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return any(map(is_column, value))
    return isinstance(value, Symbol | Skipped | torch.Tensor | np.ndarray)


def _field_values(node: str, port: Port, argument: Any) -> dict[PortField, Any]:
    """The columns that were passed for a port, by field."""
    if argument is None:
        return {}
    if port.record is None:
        if isinstance(argument, tuple) and any(isinstance(field, Symbol) for field in argument):
            record, expected = type(argument).__name__, port.fields[PortField(port.name)]
            raise PortError(
                f"{node}.{port.name} expects {expected}, but got a record ({record}). Pass one column of it, such as "
                f"record.{next(iter(getattr(argument, '_fields', ['column'])))}.",
                code="call.type",
                node=node,
                port=port.name,
                expected=expected,
                found=record,
            )
        return {PortField(port.name): argument}
    missing = [field.name for field in port.fields if isinstance(argument, Symbol) or not hasattr(argument, field.name)]
    if missing:
        found = repr(argument) if isinstance(argument, Symbol) else type_of(argument)
        names = [field.name for field in port.fields]
        raise PortError(
            f"{node}.{port.name} expects a record with the columns {', '.join(names)}, but got {found} without "
            f"{', '.join(missing)}. Pass a record that has these columns.",
            code="call.type",
            node=node,
            port=port.name,
            expected=names,
            found=found,
            missing=missing,
        )
    return {field: getattr(argument, field.name) for field in port.fields}


def _check_complete(operator: Operator, inputs: Mapping[PortField, Any]) -> None:
    """Check that a call on tensors has all required columns and no unused ones, as a graph does when it is built."""
    required = operator.optional_ports()
    for port in operator.signature.ports.values():
        passed = any(inputs.get(field) is not None for field in port.fields)
        if not passed and (required.get(port.name) or not port.optional):
            expected = ", ".join(map(str, port.fields.values()))
            raise PortError(
                f"{operator.name}.{port.name} is missing. Pass {expected} as {port.name}=...",
                code="call.arguments",
                node=operator.name,
                port=port.name,
                expected=expected,
            )
        if passed and required.get(port.name) is False:
            raise PortError(
                f"{operator.name}.{port.name} is not used by {operator!r}. Do not pass it, or change the parameters.",
                code="call.arguments",
                node=operator.name,
                port=port.name,
            )
