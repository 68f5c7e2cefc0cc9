"""`why`: where a number of a recorded step comes from, node by node, back to the data and the engines.

It follows the edges of the graph back. On a row axis it shows this row, mapped across nodes that repeat or drop rows;
where a node reads groups, it shows the group.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Node
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Cell
from flowrl.core.operators.symbols import Edge
from flowrl.edits.diff import describe
from flowrl.errors import ParameterError, offer
from flowrl.look.address import Address
from flowrl.look.steps.facts import Fact, GroupRow, fact_of, group_of
from flowrl.look.steps.replay import step_of
from flowrl.look.steps.sources import data_line
from flowrl.look.steps.step_reader import Recorded, StepReader
from flowrl.operators.explains import Explains, exact
from flowrl.run.recording.row_maps import axis_before, row_axis

SHOWN = 6
"""How many dropped rows are listed as text."""


@dataclass(frozen=True)
class Link:
    """A node on the way from a number to its sources.

    Args:
        row_id: the row here; None if it cannot be followed to this node.
        wrote, read: its columns on this row, as far as they are followed.
        group: where it reads groups, the rows of this row's group with their scores.
        notes: what else there is to say: its data, engine, formula, dropped rows.
    """

    node: str
    operator: str
    row_id: str | None
    wrote: tuple[Fact, ...]
    read: tuple[Fact, ...]
    group: tuple[GroupRow, ...]
    notes: tuple[str, ...]

    def text(self, shown: set[Edge]) -> str:
        """It as text, without the columns that are `shown` already, which grow."""
        lines = [f"{self.node}  {self.operator}", *(f"  {note}" for note in self.notes)]
        copied = {fact.edge: fact for fact in self.read for other in self.wrote if fact.copies(other)}
        if copied:
            shown |= set(copied)
            lines.append(f"  passes on {', '.join(map(str, copied))}")
        for what, facts in (("wrote", self.wrote), ("read", [fact for fact in self.read if fact.edge not in copied])):
            new = [fact for fact in facts if fact.edge not in shown and fact.has_numbers]
            shown |= {fact.edge for fact in new}
            lines += [f"  {what} {fact}" for fact in new]
        if self.group:
            lines.append(f"  group of {len(self.group)}: " + ", ".join(map(str, self.group)))
        return "\n".join(lines)


@dataclass(frozen=True)
class Derivation:
    """Where a number comes from.

    Args:
        summary: of the row: score, fate, optimizer step, weight in the loss.
        links: the node of the address first, then every node that it depends on, back to the inputs.
    """

    address: Address
    summary: Mapping[str, Any]
    links: tuple[Link, ...]

    def to_dict(self) -> dict[str, Any]:
        """It as JSON-able data."""
        links = [
            vars(link)
            | {key: [one.to_dict() for one in getattr(link, key)] for key in ("wrote", "read", "group")}
            | {"notes": list(link.notes)}
            for link in self.links
        ]
        return {"address": str(self.address), "row": dict(self.summary), "links": links}

    def __str__(self) -> str:
        about = ", ".join(f"{name} {_shown(value)}" for name, value in self.summary.items())
        shown: set[Edge] = set()
        return "\n".join([str(self.address), *([f"  {about}"] if about else []), *(o.text(shown) for o in self.links)])


def why(run: Recorded, place: Address) -> Derivation:
    """The derivation of a column at a row.

    Raises:
        ParameterError: the address names no step, node and row, or no column that has rows.
        DataError: the step is not recorded, or has no such row.
    """
    step = StepReader(run, step_of(place, "17/gae.advantages[0/516/0#1]"))
    node = step.graph[place.node or list(step.graph.nodes)[-1]]
    asked = _asked(step, node, place.column)
    axis = next(found for edge in asked if (found := row_axis(step.graph, edge)) is not None)
    if place.node is None or place.row is None:
        ids = step.row_ids(axis) or ["0/0/0"]
        raise ParameterError(
            f"{str(place)!r} names no {'node' if place.node is None else 'row'}. Write STEP/NODE.COLUMN[ROW], such as "
            f"{Address(None, step.number, node.name, place.column, ids[0])}; run.rows({step.number}) lists the rows.",
            code="look.invalid-address",
            found=str(place),
        )
    rows = _Rows(step, axis, step.row_of(axis, place.row))
    links = tuple(_links(step, node, asked, rows))
    return Derivation(place, _summary(run, step.number, place.row), links)


def _asked(step: StepReader, node: Node, column: str | None) -> list[Edge]:
    """The edges that an address names: an output, or a column that the node reads; without a column all with rows."""
    written = [Edge(node.name, output) for output in node.signature.outputs]
    read = {str(place): edge for place, edge in node.inputs.items()}
    named = {place.name: edge for place, edge in node.inputs.items()}
    if column is None:
        found = [edge for edge in written if step.graph.types[edge].axes] or [*read.values()]
    else:
        known = named | read | {edge.output: edge for edge in written}
        found = [known[column]] if column in known else []
    found = [edge for edge in found if row_axis(step.graph, edge) is not None]
    if not found:
        names = [*(edge.output for edge in written), *named]
        raise ParameterError(
            f"{node.name} has no column {column!r} with rows; {offer(column, dict.fromkeys(names))}",
            code="look.unknown-column",
            node=node.name,
            column=column,
            known=list(dict.fromkeys(names)),
        )
    return found


def _links(step: StepReader, first: Node, asked: Sequence[Edge], rows: _Rows) -> Iterator[Link]:
    """The links from the asked edges back."""
    wanted: dict[str, dict[str, None]] = {}
    for edge in asked:
        wanted.setdefault(edge.node, {})[edge.output] = None
    reads_them = all(edge.node != first.name for edge in asked)
    if reads_them:
        yield _link(step, first, (), asked, rows)
    for node in reversed(list(step.graph.nodes.values())):
        if node.name in wanted:
            outputs = tuple(wanted[node.name])
            read = [edge for place, edge in node.inputs.items() if _matters(node, place, outputs)]
            for edge in read:
                wanted.setdefault(edge.node, {})[edge.output] = None
            yield _link(step, node, outputs, list(dict.fromkeys(read)), rows)


def _matters(node: Node, place: PortField, outputs: tuple[str, ...]) -> bool:
    """Whether outputs depend on an input: a gate passes each column on by itself."""
    return not isinstance(node.operator, Gate) or place.port != ROWS or place.field in outputs


def _link(step: StepReader, node: Node, outputs: tuple[str, ...], read: Sequence[Edge], rows: _Rows) -> Link:
    written = [edge for output in outputs if step.graph.types[edge := Edge(node.name, output)].axes]
    axis = next((row_axis(step.graph, edge) for edge in (*written, *read) if row_axis(step.graph, edge)), None)
    row_id = None if axis is None else rows.row_id(axis)
    wrote = tuple(fact_of(step, edge, rows.on(row_axis(step.graph, edge))) for edge in written)
    facts = tuple(fact_of(step, edge, rows.on(row_axis(step.graph, edge))) for edge in read)
    notes = [*_of_source(step, node, row_id), *_of_engine(step, node, rows), *_of_rows(step, node, rows)]
    notes += _of_formula(step, node, axis, rows)
    return Link(
        node.name,
        describe(node.in_step(step.index)),
        row_id,
        wrote,
        facts,
        group_of(step, node, read, rows.on),
        tuple(notes),
    )


class _Rows:
    """The row that a derivation follows, on each axis that it comes from."""

    def __init__(self, step: StepReader, axis: str, row: int) -> None:
        self._step, self.rows = step, {axis: row}
        while (before := axis_before(step.graph, axis)) is not None and before not in self.rows:
            mapped, child = step.rows_before(axis), self.rows[axis]
            if mapped is not None:
                self.rows[before] = int(mapped[child])
            elif (found := _by_id(step, axis, child, before)) is not None:
                self.rows[before] = found
            else:
                break
            axis = before

    def on(self, axis: str | None) -> int | None:
        """The row on an axis; None if it cannot be followed there."""
        return None if axis is None else self.rows.get(axis)

    def row_id(self, axis: str) -> str | None:
        """Its `row_id` there."""
        ids, row = self._step.row_ids(axis), self.on(axis)
        return None if ids is None or row is None else ids[row]


def _by_id(step: StepReader, axis: str, row: int, before: str) -> int | None:
    """The row that a row comes from by its id: the same id, or that of the row that was copied."""
    ids, known = step.row_ids(axis), step.row_ids(before)
    if ids is None or known is None:
        return None
    found = [at for at, id in enumerate(known) if ids[row] == id or ids[row].startswith((f"{id}#", f"{id}+"))]
    return found[0] if len(found) == 1 else None


# ---- notes


def _of_source(step: StepReader, node: Node, row_id: str | None) -> Iterator[str]:
    """The data of an input."""
    if node.is_input:
        line = None if row_id is None else data_line(step.run.description, node.name, row_id)
        yield "an input of the graph" if line is None else f"data: {line}"


def _of_engine(step: StepReader, node: Node, rows: _Rows) -> Iterator[str]:
    """The engines of a node with weights, which version sampled the row, and how long it took."""
    for role in node.roles:
        backend = step.graph.bindings.get(role)
        model = f", which started from {backend.starts_from}" if backend is not None and backend.starts_from else ""
        yield f"engine: role {role!r}, {type(backend).__name__}{model}"
    for output, typed in node.signature.outputs.items():
        edge = Edge(node.name, output)
        row = rows.on(row_axis(step.graph, edge))
        if node.roles and getattr(typed, "kind", "") == "version" and row is not None and edge in step.described:
            yield f"sampled by version {step.column(edge)[row]} of the weights"
    if node.roles and (seconds := step.seconds.get(node.name)) is not None:
        yield f"took {seconds:.3g} s"


def _of_rows(step: StepReader, node: Node, rows: _Rows) -> Iterator[str]:
    """What a node that makes rows did with them."""
    axis = next((axis for axis in rows.rows if axis.endswith(f"@{node.name}")), None)
    before = None if axis is None or node.is_input else axis_before(step.graph, axis)
    mapped = None if axis is None or before is None else step.rows_before(axis)
    if axis is None or before is None:
        return
    if mapped is None:
        yield f"made rows of its own; its row {rows.row_id(axis)} was matched by row_id"
        return
    row = rows.rows[axis]
    if not isinstance(node.initial_operator, Gate):
        copies = np.flatnonzero(mapped == mapped[row])
        yield f"row {rows.row_id(axis)} is copy {int((copies < row).sum()) + 1} of {len(copies)} of its prompt"
        return
    ids, total = step.row_ids(before), step.count(before) or 0
    gone = np.setdiff1d(np.arange(total), mapped).tolist()
    listed = ", ".join(str(one) if ids is None else ids[one] for one in gone[:SHOWN])
    more = "" if len(gone) <= SHOWN else f" and {len(gone) - SHOWN} more"
    yield f"passed {len(mapped)} of {total} rows" + (f"; dropped {listed}{more}" if gone else "")


def _of_formula(step: StepReader, node: Node, axis: str | None, rows: _Rows) -> Iterator[str]:
    """What the operator says of the row."""
    operator = node.in_step(step.index).operator
    row = rows.on(axis)
    if not isinstance(operator, Explains) or row is None:
        return
    edges = {place.name: edge for place, edge in node.inputs.items()}
    outputs = {output: Edge(node.name, output) for output in node.signature.outputs}
    stored = step.read([*edges.values(), *outputs.values()])
    if any(edge not in stored for edge in edges.values()):
        return
    bound = copy.copy(operator)
    for cell in operator.states:
        bound.__dict__[cell] = Cell(step.session().cell(node.name, cell, operator))
    inputs = {name: stored[edge] for name, edge in edges.items()}
    said = bound.explain(row, inputs, {name: stored[edge] for name, edge in outputs.items() if edge in stored})
    yield from said.splitlines()


def _summary(run: Recorded, step: int, row_id: str) -> dict[str, Any]:
    """What the row's summary says of it."""
    names = ("score", "fate", "optimizer_step", "loss_weight", "entropy", "clipped", "version_min", "version_max")
    found: Mapping[str, Any] = next((row for row in run.rows(step).to_pylist() if row["row_id"] == row_id), {})
    return {name: found[name] for name in names if found.get(name) not in (None, "")}


def _shown(value: Any) -> str:
    return exact(value) if isinstance(value, float) else str(value)
