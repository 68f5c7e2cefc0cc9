"""Possible fixes of a refused edit: the operator that writes a column, and the ports that may read one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence

from flowrl.core.graphs.after import After
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.inference import Available, Binding, Bound, bind, candidates, fits, infer
from flowrl.core.operators import entry_points
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.edits.fixes import Verbs
from flowrl.errors import ParameterError, PortError
from flowrl.record_types import FieldType, accepts


def suggest_insert(end: str, expected: FieldType, binding: Binding, outputs: Available) -> list[Verbs]:
    """The edit that inserts the only installed operator that writes what `end` reads; none if it does not type-check.

    `end` is the port without a source, as ``node.field``; `binding` has the axes of the node's other ports.
    """
    makers = list(_makers(expected))
    if len(makers) != 1:
        return []
    operator, output = makers[0]
    before = dict(outputs)
    for anchor in reversed(list(dict.fromkeys(edge.node for edge in outputs))):
        near = {edge: typed for edge, typed in before.items() if edge.node == anchor}
        inputs = _reads(operator, [near, before])
        before = {edge: typed for edge, typed in before.items() if edge.node != anchor}
        if not any(edge in near for edge, _ in inputs.values()):
            continue
        with contextlib.suppress(PortError):
            if fits(expected, binding, infer(operator.name, operator, inputs, outputs)[output]):
                made = {operator.name: After(anchor, operator)}
                return [{"insert": made, "wire": {end: f"{operator.name}.{output}"}}]
    return []


def suggest_readers(name: str, operators: Mapping[str, Operator]) -> list[Verbs]:
    """The edits that wire a port of another node to an output of the node `name`."""
    return [
        {"wire": {f"{other}.{field}": f"{name}.{output}"}}
        for output, written in operators[name].signature.outputs.items()
        for other, operator in operators.items()
        for field, expected in operator.signature.fields.items()
        if other != name and accepts(expected, written)
    ]


def _makers(expected: FieldType) -> Iterator[tuple[Operator, str]]:
    """The installed operators without required parameters that write the type, with the output; others are not made."""
    for name in entry_points.names():
        found = entry_points.load(name)
        if not isinstance(found, type) or not issubclass(found, Operator) or issubclass(found, Gate):
            continue
        outputs = [
            o for o, t in found.usual_signature().outputs.items() if accepts(t, expected) and accepts(expected, t)
        ]
        if outputs and all(p.default is not p.empty for p in inspect.signature(found).parameters.values()):
            with contextlib.suppress(ParameterError):  # it needs one of several parameters
                operator = found()
                yield from ((operator, output) for output in outputs)


def _reads(operator: Operator, pools: Sequence[Available]) -> dict[PortField, tuple[Edge, EdgeType]]:
    """The edges of an operator: for each field the only output in the first pool that has any; else no edges at all."""
    binding: dict[str, Bound] = {}
    reads: dict[PortField, tuple[Edge, EdgeType]] = {}
    for port in operator.signature.ports.values():
        for field, expected in () if port.optional else port.fields.items():
            found = next((edges for pool in pools if (edges := candidates(expected, binding, pool))), [])
            if len(found) != 1:
                return {}
            reads[field] = found[0], pools[-1][found[0]]
            bind(binding, field, expected, *reads[field])
    return reads
