"""Gates: operators that pass some rows on, with all columns of these rows.

A gate has the ports of its `predicate`, and a port ``rows`` with every column that passes. Users do not list these: a
call or an edit routes each column that a downstream node reads through the gate, and `Graph.build` removes the others.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from flowrl.columns import ColumnType, Own, lookup
from flowrl.core.operators import session as sessions
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import Port, PortField, Signature
from flowrl.core.operators.session import Call
from flowrl.core.operators.symbols import Symbol, prefix, prefixed
from flowrl.core.operators.when import ALWAYS, skipped
from flowrl.data.metrics import Metrics
from flowrl.data.now import Collected, Now
from flowrl.errors import DataError, NodeError, ParameterError, PortError, type_of
from flowrl.record_types import FieldType, ValueType, accepts, column_fields

ROWS = "rows"
"""The port of the columns that pass."""


class _Called:
    """The `__call__` of gates: its ports are not in its annotations, unlike those of other operators."""

    def __call__(self, *records: Any, **columns: Any) -> Any:
        assert isinstance(self, Gate)
        if before := prefix():
            with prefixed(""):
                return self.named(f"{before}{self.name}")._of_records(records, columns)
        return self._of_records(records, columns)


def _computed(gate: Gate, **given: Any) -> Any:
    """The function of a gate, by its ports."""
    return gate.select(**given)


_Called.__call__.__wrapped__ = _computed  # type: ignore[attr-defined]

_MAX_SKIPS = 20


class Gate(_Called, Operator):
    """Base of operators that pass rows on: ``rollout, scores = Filter(...)(rollout, token_level_scores=scores)``.

    A call returns the same columns with the rows that pass. ``edit(insert={"filter": After("reward", Filter(...))})``
    inserts a gate after its anchor: every edge from a node before the gate to a node after it then goes through the
    gate.

    Args:
        predicate: an operator that writes one bool per row, from columns; it uses no engine and has no state.
        columns: the column of each output; calls and edits set it.
        max_skips: how many steps in a row a gate that skips steps may skip; one more ends the run.
    """

    _signature: ClassVar[Signature] = Signature({}, {}, {})
    new_axes: ClassVar[tuple[str, ...]] = ("batch",)
    predicate: Operator
    max_skips: int = Field(default=_MAX_SKIPS, ge=1, kw_only=True)
    columns: Mapping[str, str] = Field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.skips and self.max_skips != _MAX_SKIPS:
            raise ParameterError(
                f"{self.name} has max_skips={self.max_skips}, which has no effect: it skips no step. Pass "
                f"on_underfill='skip', or leave max_skips out.",
                code="gate.skips-nothing",
                found=self.max_skips,
                expected=_MAX_SKIPS,
            )

    @field_validator("predicate", mode="after")
    @classmethod
    def _refuse_no_predicate(cls, predicate: Operator) -> Operator:
        outputs = list(predicate.signature.outputs.values())
        one = outputs[0] if len(outputs) == 1 else None
        if not isinstance(one, ColumnType) or (one.dtype, one.axes) != ("bool", ("batch",)):
            written = ", ".join(f"{name}: {type}" for name, type in predicate.signature.outputs.items())
            raise ValueError(
                f"{predicate.name} writes {written}; expected one bool per row: `def __call__(self, ...) -> RowMask`"
            )
        if predicate.role_uses or predicate.states:
            raise ValueError(
                f"{predicate.name} {'uses an engine' if predicate.role_uses else 'has state'}; a predicate reads "
                f"columns only. Compute a column in another node, and read that column in the predicate"
            )
        if predicate._when != ALWAYS:
            raise ValueError(
                f"{predicate.name} has when(...), but the gate decides in which steps it runs. Call when(...) on the "
                f"gate instead"
            )
        if taken := {ROWS, "metrics", "now"} & predicate.signature.ports.keys():
            raise ValueError(f"{predicate.name} has a port {taken.pop()!r}, which every gate has. Rename that port")
        return predicate

    @cached_property
    def signature(self) -> Signature:
        """The ports of `predicate`, and the columns that pass, each with its own width."""
        own = self.predicate.signature
        types = {
            name: dataclasses.replace(_type(column), own=Own(name, rows=False)) for name, column in self.columns.items()
        }
        ports = dict(self.reads)
        if types:
            fields = {PortField(ROWS, name): type for name, type in types.items()}
            ports[ROWS] = Port(ROWS, fields, _passing(tuple(types)))
        outputs: dict[str, FieldType] = {**types, **self.values}
        injected = {**own.injected, "metrics": Metrics, "now": Now}
        return Signature(ports, injected, outputs, _passing(tuple(outputs)))

    def record(self, **written: Any) -> Any:
        """The return value: the columns that pass, and `values`, by output."""
        made: Any = self.signature.output_record
        return made(**written)

    @cached_property
    def reads(self) -> Mapping[str, Port]:
        """The ports of `predicate`."""
        return self.predicate.signature.ports

    @property
    def values(self) -> Mapping[str, ValueType]:
        """The values that it writes in addition to columns."""
        return {}

    @property
    def effects(self) -> frozenset[str]:
        """The effects of `predicate`."""
        return self.predicate.effects

    @property
    def target_groups(self) -> int | None:
        """The number of prompts whose rows pass in each step; None if it is not known in advance."""
        return None

    @property
    def rounds_at_most(self) -> int:
        """How often its upstream nodes may run in a step, each time on more prompts."""
        return 1

    @property
    def skips(self) -> bool:
        """Whether it skips the update of a step in which too few rows pass; it then writes `collected`."""
        return False

    def missing(self, sizes: Sequence[int]) -> int:
        """How many groups a gate that collects still needs, given the sizes (rows) of those that it has."""
        return 0

    def underfill_action(self, sizes: Sequence[int]) -> str:
        """What to do after the last round: ``"repeat"`` runs the gate once more, on the rows that it collected, and
        ``"skip"`` skips the update of the step.

        Raises:
            DataError: groups are missing, and the gate does not accept that.
        """
        return ""

    def optional_ports(self) -> Mapping[str, bool]:
        return self.predicate.optional_ports()

    def passing(self, columns: Mapping[str, str]) -> Self:
        """The same gate, with these columns by output."""
        return dataclasses.replace(self, columns=columns).in_place_of(self)

    def select(self, rows: Any, metrics: Metrics, now: Now, **given: Any) -> Any:
        """The rows that pass, and `values`.

        `given` has the column or record of each port of `reads`, and the values injected into `predicate`.
        """
        raise NotImplementedError(f"{type(self).__name__} is a gate that does not define select(...).")

    def on(self, inputs: Mapping[PortField, Any], injected: Mapping[str, Any] | None = None) -> Any:
        """See `Operator.on`; a step that the gate skips has skipped outputs."""
        passed = super().on(inputs, injected)
        sizes = getattr(passed, "collected", None)
        if not self.skips or not isinstance(sizes, Collected) or self.underfill_action(sizes.sizes) != "skip":
            return passed
        if (session := sessions.current()) is not None:
            session.skip_step()
        return skipped(self.signature)

    def row_mask(self, metrics: Metrics, given: Mapping[str, Any]) -> Tensor:
        """The output of `predicate`, bool ``[batch]``, on the CPU; `given` has its ports and injected values."""
        inputs: dict[PortField, Any] = {}
        for port in self.predicate.signature.ports.values():
            value = given[port.name]
            for place in port.fields if value is not None else ():
                inputs[place] = value if port.record is None else getattr(value, place.name)
        injected = {
            name: metrics if cls is Metrics else given[name] for name, cls in self.predicate.signature.injected.items()
        }

        def supply(cls: type) -> Any:
            return next(value for name, value in injected.items() if self.predicate.signature.injected[name] is cls)

        kept: Tensor = Call(self.predicate, self._no_engine).run(inputs, injected, {}, supply)[0]
        return kept.cpu()

    # ---- called on records

    def _of_records(self, records: tuple[Any, ...], columns: Mapping[str, Any]) -> Any:
        """The rows of records and columns that pass, in their order."""
        given: dict[str, tuple[ColumnType, Any]] = {}  # by name in this call
        made: list[tuple[Callable[..., Any] | None, list[str]]] = []
        for number, record in enumerate(records):
            if not isinstance(record, tuple) or not hasattr(record, "_fields"):
                raise PortError(
                    f"{self.name} got {type_of(record)} without a name; expected records, and single columns by name: "
                    f"{self.name}(rollout, token_level_scores=scores).",
                    code="gate.missing-column",
                    node=self.name,
                    found=type(record).__name__,
                )
            fields = {f: f for f in record._fields} if _is_symbolic(record) else column_fields(type(record))
            named = {
                f"{number}.{field}": (self._type_of(getattr(record, field), column), getattr(record, field))
                for field, column in fields.items()
            }
            given |= named
            made.append((getattr(type(record), "_make", type(record)), list(named)))
        for name, column in columns.items():
            given[name] = self._type_of(column, name), column
            made.append((None, [name]))

        symbols = {name: column for name, (_, column) in given.items() if isinstance(column, Symbol)}
        names = {name: str(symbols[name]._edge) if name in symbols else name for name in given}
        gate = self.passing({names[name]: type.name for name, (type, _) in given.items()})
        inputs = {PortField(ROWS, names[name]): column for name, (_, column) in given.items()}
        inputs |= {place: given[name][1] for place, name in self._reads(given).items()}
        passed = gate.on(inputs)
        return _made(made, {name: getattr(passed, names[name]) for name in given})

    def _type_of(self, value: Any, column: str) -> ColumnType:
        """The type of the column with this name, or of its symbol."""
        if not isinstance(value, Symbol):
            return _type(column)
        if not isinstance(value._typed.type, ColumnType):
            raise PortError(
                f"{self.name} got {value!r}, which is a value without rows. Leave it out of the call.",
                code="gate.no-rows",
                node=self.name,
                found=str(value._edge),
            )
        return value._typed.type

    def _reads(self, given: Mapping[str, tuple[ColumnType, Any]]) -> dict[PortField, str]:
        """The given column that each field of the ports of `predicate` reads."""
        found: dict[PortField, str] = {}
        required = self.predicate.in_step(0).optional_ports()
        for port in self.reads.values():
            if required.get(port.name) is False or (port.optional and not required.get(port.name)):
                continue
            for place, expected in port.fields.items():
                fitting = [name for name, (type, _) in given.items() if accepts(expected, type)]
                exact = [name for name in fitting if given[name][0].kind == getattr(expected, "kind", None)]
                if not fitting:
                    raise PortError(
                        f"{self.name}.{place} expects {expected}, which the call does not pass. Pass that column to "
                        f"{self.name}(...), too.",
                        code="gate.missing-column",
                        node=self.name,
                        port=str(place),
                        expected=expected,
                    )
                found[place] = (exact or fitting)[0]
        return found


def _made(parts: Sequence[tuple[Callable[..., Any] | None, list[str]]], columns: Mapping[str, Any]) -> Any:
    """The records and single columns that a gate returns, each from its constructor and the names of its columns."""
    values = [(make, [columns[name] for name in names]) for make, names in parts]
    made = [given[0] if make is None else make(given) for make, given in values]
    return made[0] if len(made) == 1 else tuple(made)


def _is_symbolic(record: Any) -> bool:
    return any(isinstance(value, Symbol) for value in record)


def pick(column: Any, rows: Tensor) -> Any:
    """Some rows of a column; `rows` are indices, or a bool for each row."""
    return column[rows.to(column.device)] if isinstance(column, torch.Tensor) else column[rows.numpy()]


def refuse_empty(gate: Gate, offered: int, unit: str) -> None:
    """Refuse to continue without rows."""
    raise DataError(
        f"{gate.name} kept none of {offered} {unit}, so nothing is left to train on. Relax {gate.predicate!r}, draw "
        f"more prompts per step, or skip such steps: on_underfill='skip'.",
        code="gate.dropped-all",
        node=gate.name,
        offered=offered,
    )


def refuse_more_skips(gate: Gate, skips: int, step: int) -> None:
    """Refuse so many skipped steps in a row, the last of them `step`, if the gate does not allow them."""
    if skips > gate.max_skips:
        raise NodeError(
            f"{gate.name} skipped the update in step {step + 1} and in the {gate.max_skips} steps before: too few rows "
            f"pass {gate.predicate!r}. Use prompts that the policy solves sometimes, sample more responses, or allow "
            f"more: edit(set={{'{gate.name}.max_skips': {5 * gate.max_skips}}}).",
            code="gate.too-many-skips",
            node=gate.name,
            step=step + 1,
            expected=gate.max_skips,
        )


def _type(column: str) -> ColumnType:
    if (known := lookup(column)) is None:
        raise DataError(
            f"No column is named {column!r}, so its type is unknown. Pass each column by its name in flowrl.columns, "
            f"or in its Column(...).",
            code="gate.missing-column",
            column=column,
        )
    return known


@functools.cache
def _passing(names: tuple[str, ...]) -> type:
    """The record of the columns that pass: a tuple whose field names may have dots, unlike those of a NamedTuple."""

    def new(cls: type, *values: Any, **named: Any) -> Any:
        return tuple.__new__(cls, values or [named[name] for name in names])

    fields = {name: property(operator.itemgetter(i)) for i, name in enumerate(names)}
    return type("Passed", (tuple,), {"__slots__": (), "_fields": names, "__new__": new, **fields})
