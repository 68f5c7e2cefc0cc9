"""Which rows of one row axis come from which rows of another, in a step.

Rows are created by an input, repeated (`Repeat`: the copies of a row are adjacent), or passed on by a gate. A gate's
rows are found by running it on row numbers instead of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flowrl.columns import ColumnType
from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Call
from flowrl.core.operators.symbols import Edge
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now

Rows = np.ndarray[Any, np.dtype[np.int64]]
Columns = Mapping[Edge, Any]

_NUMBER = "policy_version"
"""A registered column with an int64 per row, whose type row numbers have while a gate runs on them."""


def row_axis(graph: Graph, edge: Edge) -> str | None:
    """The row axis of a column, such as ``batch@repeat``; None for a value without rows."""
    axes = graph.types[edge].axes
    return axes[0] if axes else None


def maker_of(axis: str) -> str:
    """The node that created an axis."""
    return axis.partition("@")[2]


def axis_before(graph: Graph, axis: str) -> str | None:
    """The row axis that the maker of this one reads; None for an input."""
    node = graph[maker_of(axis)]
    read = [row_axis(graph, edge) for edge in node.inputs.values() if _on_batch(node, edge)]
    return next((found for found in read if found is not None), None)


def rows_before(graph: Graph, axis: str, step: int, columns: Columns) -> Rows | None:
    """For each row of `axis`, the row of `axis_before` that it comes from; None if that cannot be found.

    Args:
        step: counted from 0, for scheduled parameters.
        columns: recorded columns of the step, at least those that a gate reads.
    """
    node = graph[maker_of(axis)].in_step(step)
    before, rows = _count(graph, axis_before(graph, axis), columns), _count(graph, axis, columns)
    if isinstance(node.operator, Gate):
        return _passed(node, node.operator, step, columns)
    if before is not None and rows in (None, before * node.rows_factor):
        return np.arange(before * node.rows_factor, dtype=np.int64) // node.rows_factor
    return None


def _passed(node: Node, gate: Gate, step: int, columns: Columns) -> Rows | None:
    """The rows that a gate passes on."""
    read = {place: edge for place, edge in node.inputs.items() if place.port != ROWS}
    if not read or any(edge not in columns for edge in read.values()):
        return None
    inputs = {place: columns[edge] for place, edge in read.items()}
    inputs[PortField(ROWS, _NUMBER)] = torch.arange(len(next(iter(inputs.values()))))
    numbered = gate.passing({_NUMBER: _NUMBER})
    injected: dict[type, Any] = {Metrics: Metrics(), Now: Now(step), Key: Key.of(0)}
    given = {name: injected[cls] for name, cls in numbered.signature.injected.items()}
    _, written = Call(numbered, _no_engine).run(inputs, given, {}, injected.__getitem__)
    passed: Rows = written[_NUMBER].numpy()
    return passed


def _no_engine(role: str, field: str) -> Any:
    raise LookupError(f"{field} needs the engine {role!r}")


def _count(graph: Graph, axis: str | None, columns: Columns) -> int | None:
    """The number of rows of an axis; None if no column of it is there."""
    return next((len(column) for edge, column in columns.items() if row_axis(graph, edge) == axis), None)


def _on_batch(node: Node, edge: Edge) -> bool:
    fields = node.signature.fields
    types = [fields[place] for place, other in node.inputs.items() if other == edge]
    return any(isinstance(found, ColumnType) and found.on_batch for found in types)
