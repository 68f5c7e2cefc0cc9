"""Gates: operators that let some rows through, and all columns of these rows with them.

A gate has the ports of its `predicate`, and one called ``rows`` with every column that passes. Users do not list these:
a call or an edit leads each column through that a node downstream reads, and a graph has no others.
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
from flowrl.core.operators.when import ALWAYS, SKIPPED
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.errors import DataError, PortError
from flowrl.record_types import FieldType, ValueType, accepts, column_fields

ROWS = "rows"
"""The port of what passes."""


class _Called:
    """Gives a gate its `__call__`, whose ports are not in its annotations, as they are in those of other operators."""

    def __call__(self, *records: Any, **columns: Any) -> Any:
        assert isinstance(self, Gate)
        if before := prefix():
            with prefixed(""):
                return self.named(f"{before}{self.name}")._of_records(records, columns)
        return self._of_records(records, columns)


def _computed(gate: Gate, **given: Any) -> Any:
    """What a gate computes, by its ports."""
    return gate.passed(**given)


_Called.__call__.__wrapped__ = _computed  # type: ignore[attr-defined]


class Gate(_Called, Operator):
    """Base of what lets rows through: ``rollout, scores = Filter(...)(rollout, token_level_scores=scores)``.

    Called, it takes records, and single columns under their names; it returns the same, on rows of its own. Put in by
    ``edit(insert={"filter": After("reward", Filter(...))})``, it stands behind its anchor, and all that is read from
    before it by what does not come before it is led through.

    Args:
        predicate: an operator that writes one bool a row, from columns; it asks no engine and keeps no state.
        columns: by output, which column passes; the call and the edit fill it in.
    """

    _signature: ClassVar[Signature] = Signature({}, {}, {})
    new_axes: ClassVar[tuple[str, ...]] = ("batch",)
    predicate: Operator
    columns: Mapping[str, str] = Field(default_factory=dict, repr=False, kw_only=True)

    @field_validator("predicate", mode="after")
    @classmethod
    def _refuse_no_predicate(cls, predicate: Operator) -> Operator:
        outputs = list(predicate.signature.outputs.values())
        one = outputs[0] if len(outputs) == 1 else None
        if not isinstance(one, ColumnType) or (one.dtype, one.axes) != ("bool", ("batch",)):
            written = ", ".join(f"{name}: {type}" for name, type in predicate.signature.outputs.items())
            raise ValueError(
                f"{predicate.name} writes {written}; expected one bool a row, as by `def __call__(self, ...) -> Kept`"
            )
        if predicate.role_uses or predicate.states:
            raise ValueError(
                f"{predicate.name} {'asks an engine' if predicate.role_uses else 'keeps state'}, which belongs into a "
                f"node of its own: let that node write a column, and keep by the column"
            )
        if predicate._when != ALWAYS:
            raise ValueError(
                f"{predicate.name} is to run in some steps only, and it is the gate that runs; say it of the gate"
            )
        if taken := {ROWS, "metrics", "now"} & predicate.signature.ports.keys():
            raise ValueError(f"{predicate.name} has a port {taken.pop()!r}, as every gate has; give it another name")
        return predicate

    @cached_property
    def signature(self) -> Signature:
        """The ports of `predicate`, and what passes; each column that passes is as wide as it is."""
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
        """What it returns: the columns that pass, and `values`, by output."""
        made: Any = self.signature.output_record
        return made(**written)

    @cached_property
    def reads(self) -> Mapping[str, Port]:
        """The ports by which it decides: those of `predicate`."""
        return self.predicate.signature.ports

    @property
    def values(self) -> Mapping[str, ValueType]:
        """What it writes besides what passes."""
        return {}

    @property
    def effects(self) -> frozenset[str]:
        """Those of `predicate`."""
        return self.predicate.effects

    @property
    def target_groups(self) -> int | None:
        """The rows that come out are those of a multiple of so many prompts; None where nobody knows beforehand."""
        return None

    @property
    def rounds_at_most(self) -> int:
        """How often all that it depends on may run in a step, each time on further prompts."""
        return 1

    def missing(self, sizes: Sequence[int]) -> int:
        """How many groups are missing still, where it collects.

        Args:
            sizes: of the groups that it has, in rows.
        """
        return 0

    def underfill_action(self, sizes: Sequence[int]) -> str:
        """What to do where all rounds are over: ``"repeat"`` runs it once more, on what was collected.

        Raises:
            DataError: groups are missing, and that is an error.
        """
        return ""

    def wants(self) -> Mapping[str, bool]:
        return self.predicate.wants()

    def passing(self, columns: Mapping[str, str]) -> Self:
        """The same gate, with these columns by output."""
        return dataclasses.replace(self, columns=columns).in_place_of(self)

    def passed(self, rows: Any, metrics: Metrics, now: Now, **given: Any) -> Any:
        """What is let through of `rows`, and `values`.

        Args:
            rows: a record of the columns.
            metrics, now: injected.
            given: by port of `reads`, its column or record; and what is injected into `predicate`.
        """
        raise NotImplementedError(f"{type(self).__name__} is a gate that does not say what passes.")

    def kept(self, metrics: Metrics, given: Mapping[str, Any]) -> Tensor:
        """What `predicate` says: bool ``[batch]``, on the CPU.

        Args:
            metrics: of the gate.
            given: by port of `predicate`, its column or record; and what is injected into it.
        """
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
        """What passes of records and columns, in their order."""
        given: dict[str, tuple[ColumnType, Any]] = {}  # by the name that it has in this call
        made: list[tuple[Callable[..., Any] | None, list[str]]] = []
        for number, record in enumerate(records):
            if not isinstance(record, tuple) or not hasattr(record, "_fields"):
                raise PortError(
                    f"{self.name} was given {type(record).__name__} without a name; expected records, and single "
                    f"columns under their names: {self.name}(rollout, token_level_scores=scores)."
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
        session = sessions.current()
        idle = not symbols and session is not None and not self._when.runs(session.now.step)
        if idle or any(column is SKIPPED for _, column in given.values()):
            return _made(made, dict.fromkeys(given, SKIPPED))
        names = {name: str(symbols[name]._edge) if name in symbols else name for name in given}
        gate = self.passing({names[name]: type.name for name, (type, _) in given.items()})
        inputs = {PortField(ROWS, names[name]): column for name, (_, column) in given.items()}
        inputs |= {place: given[name][1] for place, name in self._reads(given).items()}
        tracer = next((column._tracer for column in symbols.values()), None)
        passed = gate.run(inputs) if tracer is None else tracer.record(gate, inputs)
        return _made(made, {name: getattr(passed, names[name]) for name in given})

    def _type_of(self, value: Any, column: str) -> ColumnType:
        """The type of a column that is called so, or of its symbol."""
        if not isinstance(value, Symbol):
            return _type(column)
        if not isinstance(value._typed.type, ColumnType):
            raise PortError(f"{self.name} was given {value!r}, which has no rows; leave it out.")
        return value._typed.type

    def _reads(self, given: Mapping[str, tuple[ColumnType, Any]]) -> dict[PortField, str]:
        """For each field of the ports of `predicate`, what it reads of what is given."""
        found: dict[PortField, str] = {}
        wants = self.predicate.in_step(0).wants()
        for port in self.reads.values():
            if wants.get(port.name) is False or (port.optional and not wants.get(port.name)):
                continue
            for place, wanted in port.fields.items():
                fitting = [name for name, (type, _) in given.items() if accepts(wanted, type)]
                exact = [name for name in fitting if given[name][0].kind == getattr(wanted, "kind", None)]
                if not fitting:
                    raise PortError(
                        f"{self.name}.{place} wants {wanted}, and nothing that it was given is that; pass it, too."
                    )
                found[place] = (exact or fitting)[0]
        return found


def _made(parts: Sequence[tuple[Callable[..., Any] | None, list[str]]], columns: Mapping[str, Any]) -> Any:
    """The records and single columns that a gate gives back, each by what makes it and the names of its columns."""
    values = [(make, [columns[name] for name in names]) for make, names in parts]
    whole = [given[0] if make is None else make(given) for make, given in values]
    return whole[0] if len(whole) == 1 else tuple(whole)


def _is_symbolic(record: Any) -> bool:
    return any(isinstance(value, Symbol) for value in record)


def pick(column: Any, rows: Tensor) -> Any:
    """Some rows of a column; `rows` are numbers, or a bool for each."""
    return column[rows.to(column.device)] if isinstance(column, torch.Tensor) else column[rows.numpy()]


def refuse_none(gate: Gate, offered: int, unit: str) -> None:
    """Refuse to go on with no rows.

    Raises:
        DataError: naming what decided.
    """
    raise DataError(
        f"{gate.name} lets none of {offered} {unit} through, so nothing is left to train on; expected "
        f"{gate.predicate!r} to keep some: ask for less, or draw more prompts a step."
    )


def _type(column: str) -> ColumnType:
    if (known := lookup(column)) is None:
        raise DataError(
            f"no column is called {column!r}, so nothing is known of it; pass columns under the names that they have "
            f"in flowrl.columns, or where you define them."
        )
    return known


@functools.cache
def _passing(names: tuple[str, ...]) -> type:
    """The record of what passes: a tuple with these fields, whose names may have dots, as a NamedTuple's may not."""

    def new(cls: type, *values: Any, **named: Any) -> Any:
        return tuple.__new__(cls, values or [named[name] for name in names])

    fields = {name: property(operator.itemgetter(i)) for i, name in enumerate(names)}
    return type("Passed", (tuple,), {"__slots__": (), "_fields": names, "__new__": new, **fields})
