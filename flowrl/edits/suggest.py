"""What an edit lacks, written out for its error: the operator that writes a column, and the port that reads one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.inference import Available, candidates
from flowrl.core.operators import entry_points
from flowrl.core.operators.operator import Operator
from flowrl.errors import ParameterError
from flowrl.record_types import FieldType, accepts


def suggest_insert(end: str, wanted: FieldType, pools: Sequence[Available]) -> str | None:
    """The edit by which an operator that is installed writes what `end` wants; None where none does, or several do."""
    makers = [
        (operator, output)
        for operator in _ready()
        for output, type in operator.signature.outputs.items()
        if accepts(type, wanted) and accepts(wanted, type)
    ]
    if len(makers) != 1:
        return None
    operator, output = makers[0]
    fields = [type for port in operator.signature.ports.values() if not port.optional for type in port.fields.values()]
    sources = [[edge for pool in pools for edge in candidates(type, {}, pool)] for type in fields]
    if not sources or not all(sources):
        return None
    made = f"{operator.name!r}: After({sources[0][0].node!r}, {type(operator).__name__}())"
    return f"insert={{{made}}}, wire={{{end!r}: '{operator.name}.{output}'}}"


def suggest_reader(written: FieldType, operators: Mapping[str, Operator], but: str) -> str:
    """The first port, ``node.field``, that takes what is written, in a node that is not called `but`."""
    ends = (
        f"{name}.{field}"
        for name, operator in operators.items()
        for field, wanted in operator.signature.fields.items()
        if name != but and accepts(wanted, written)
    )
    return next(ends, "node.port")


def _ready() -> Iterator[Operator]:
    """Every operator that an installed package brings and that needs no parameter."""
    for name in entry_points.names():
        found = entry_points.load(name)
        is_operator = isinstance(found, type) and not issubclass(found, Gate)
        if is_operator and all(p.default is not p.empty for p in inspect.signature(found).parameters.values()):
            with contextlib.suppress(ParameterError):  # it wants one of several, and its signature cannot say so
                yield found()
