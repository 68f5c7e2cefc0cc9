"""`StepReader`: the columns, state and rows of one step of a run, read as they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.session import Session
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.data.now import ONLY, Now, Round
from flowrl.errors import DataError
from flowrl.look.address import Address
from flowrl.look.files import Record
from flowrl.run.recording.files import COLUMNS, reading_parquet
from flowrl.run.recording.row_maps import Rows, axis_before, maker_of, row_axis, rows_before
from flowrl.run.recording.summaries import RowSummaries
from flowrl.run.recording.tables import Column, described_in, read_columns
from flowrl.run.training.run_folder import SPANS


class Recorded(Protocol):
    """What is read of a run; see `flowrl.look.recorded_run.RecordedRun`."""

    @property
    def path(self) -> Path: ...
    @property
    def description(self) -> Mapping[str, Any]: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def metrics(self) -> pa.Table: ...
    def records(self, file: str) -> list[Record]: ...
    def state(self, step: int) -> Mapping[str, Any]: ...
    def rows(self, step: int | None = None) -> pa.Table: ...
    def texts(self, step: int) -> Mapping[str, Mapping[str, Any]]: ...
    def columns(self, step: int, edges: Sequence[Edge] | None = None) -> Mapping[Edge, Column]: ...
    def column(self, address: str | Address) -> Column: ...


class StepReader:
    """A recorded step of a run.

    Args:
        number: counted from 1.

    Attributes:
        engines: those of each node whose weights are loaded; see `flowrl.look.steps.weights`.
        no_weights: what of a node's weights cannot be loaded, as a phrase.

    Raises:
        DataError: its columns are not recorded, or damaged.
    """

    def __init__(self, run: Recorded, number: int) -> None:
        self.run, self.number = run, number
        folder = run.path / COLUMNS
        paths = (axis / f"step-{number:06d}.parquet" for axis in (folder.iterdir() if folder.is_dir() else ()))
        self._files = [path for path in paths if path.is_file()]
        if not self._files:
            run.columns(number)  # raises
        self.engines: Mapping[str, Mapping[str, Any]] = {}
        self.no_weights: Mapping[str, str] = {}
        self._read: dict[Edge, Column] = {}
        self._rows_before: dict[str, Rows | None] = {}

    @cached_property
    def graph(self) -> Graph:
        """The graph of the run."""
        return self.run.graph

    @property
    def index(self) -> int:
        """The step counted from 0, as keys and schedules count."""
        return self.number - 1

    @cached_property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.run.description["training"]["seed"])

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """The state cells before the step, by ``node.cell``."""
        return self.run.state(self.number)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """How long each node ran in the step, over all rounds."""
        found: dict[str, float] = {}
        for span in self.run.records(SPANS):
            if span.get("step") == self.number and span.get("kind") == "node":
                found[span["name"]] = found.get(span["name"], 0.0) + span["end"] - span["start"]
        return found

    def runs(self, node: str) -> bool:
        """Whether a node runs in this step."""
        return all(when.runs(self.index) for when in self.graph.whens(node))

    def session(self, round: Round = ONLY) -> Session:
        """A session without engines, as the node's in the run."""
        session = Session({}, self.seed, self.state)
        session.begin_step(self.index, Now(self.index, round))
        return session

    # ---- columns

    @cached_property
    def described(self) -> Mapping[Edge, Mapping[str, Any]]:
        """What is known of each recorded column of the graph, such as its shape, without reading it."""
        return {edge: about for edge, about in self._recorded.items() if edge in self.graph.types}

    @cached_property
    def reported(self) -> Mapping[Edge, EdgeType]:
        """The recorded columns that updates reported with their metrics, such as entropies of tokens."""
        known = RowSummaries(self.graph, self.seed).reported
        return {edge: typed for edge, typed in known.items() if edge in self._recorded}

    @cached_property
    def _recorded(self) -> Mapping[Edge, Mapping[str, Any]]:
        found: dict[Edge, Mapping[str, Any]] = {}
        for path in self._files:
            with reading_parquet(path):
                file = pq.ParquetFile(path)
                found |= {Edge.parse(name): about for name, about in described_in(file)["columns"].items()}
        return found

    def is_exact(self, edge: Edge) -> bool:
        """Whether a column is recorded, and comes back as it was."""
        return edge in self.described and bool(self.described[edge].get("exact", True))

    def read(self, edges: Iterable[Edge]) -> dict[Edge, Column]:
        """The recorded ones of these columns."""
        wanted = [edge for edge in edges if edge in self._recorded]
        missing = [str(edge) for edge in wanted if edge not in self._read]
        for path in self._files if missing else ():
            self._read |= {Edge.parse(name): column for name, column in read_columns(path, missing).items()}
        return {edge: self._read[edge] for edge in wanted}

    def column(self, edge: Edge) -> Column:
        """A recorded column."""
        if edge not in self._recorded:
            self.run.column(f"{self.number}/{edge}")  # raises
        return self.read([edge])[edge]

    # ---- rows

    def count(self, axis: str) -> int | None:
        """The number of rows of a row axis; None if no column of it is recorded."""
        edge = self._edge_on(axis)
        return None if edge is None else int(self.described[edge]["shape"][0])

    def row_ids(self, axis: str) -> list[str] | None:
        """The `row_id` of each row of an axis, from a column on it or on the rows that a gate passed; else None."""
        edge = next((e for e in self.described if self._kind(e) == "row id" and row_axis(self.graph, e) == axis), None)
        if edge is not None:
            return [str(row) for row in self.column(edge)]
        before, rows = axis_before(self.graph, axis), self.rows_before(axis)
        if before is None or rows is None or not isinstance(self.maker(axis).initial_operator, Gate):
            return None
        ids = self.row_ids(before)
        return None if ids is None else [ids[row] for row in rows]

    def row_of(self, axis: str, row_id: str) -> int:
        """The number of a row on an axis.

        Raises:
            DataError: the axis has no such row; if a gate dropped it, names the gate.
        """
        ids = self.row_ids(axis) or []
        if row_id in ids:
            return ids.index(row_id)
        before: str | None = axis
        while before is not None and row_id not in ids:
            axis, before = before, axis_before(self.graph, before)
            ids = [] if before is None else self.row_ids(before) or []
        of = f"step {self.number} of {self.run.path}"
        where = f"{maker_of(axis)} dropped the row {row_id} in {of}" if row_id in ids else f"{of} has no row {row_id}"
        known = self.row_ids(axis) or ids
        raise DataError(
            f"{where}. Pass one of its rows, such as {known[0] if known else '0/0/0'}; run.rows({self.number}) lists "
            f"them.",
            code="look.unknown-row",
            path=self.run.path,
            step=self.number,
            row=row_id,
            dropped_by=maker_of(axis) if row_id in ids else None,
        )

    def rows_before(self, axis: str) -> Rows | None:
        """For each row of an axis, the row of the axis before that it comes from; None if that cannot be found."""
        if axis not in self._rows_before:
            before = axis_before(self.graph, axis)
            edges = [e for e in map(self._edge_on, (axis, before)) if e is not None]
            edges += [edge for place, edge in self.maker(axis).inputs.items() if place.port != ROWS]
            self._rows_before[axis] = rows_before(self.graph, axis, self.index, self.read(edges))
        return self._rows_before[axis]

    def maker(self, axis: str) -> Node:
        """The node that made an axis."""
        return self.graph[maker_of(axis)]

    def _edge_on(self, axis: str | None) -> Edge | None:
        """A recorded column on an axis, a small one if there is any."""
        found = [edge for edge in self.described if row_axis(self.graph, edge) == axis]
        return min(found, key=lambda edge: len(self.described[edge]["shape"]), default=None)

    def _kind(self, edge: Edge) -> str:
        return getattr(self.graph.types[edge].type, "kind", "") if edge in self.graph.types else ""

    # ---- rounds

    @cached_property
    def plan(self) -> Plan:
        """The plan of the graph."""
        return Plan(self.graph)

    @cached_property
    def _sampled_in(self) -> tuple[str, Rows] | None:
        """The axis of the sampled rows, and the round of each; None if the step had a single round."""
        if self.plan.collector is None:
            return None
        rounds = self.run.rows(self.number)["round"].to_pylist()
        axis = RowSummaries(self.graph, self.seed).axis
        return None if axis is None or not any(rounds) else (axis, np.array(rounds, dtype=np.int64))

    @property
    def rounds(self) -> int:
        """How many rounds the nodes that run in rounds had."""
        return 1 if self._sampled_in is None else int(self._sampled_in[1].max()) + 1

    def round_of(self, axis: str) -> Rows | None:
        """The round of each row of an axis; None if that cannot be found."""
        if self._sampled_in is None:
            return None
        sampled, rounds = self._sampled_in
        if axis == sampled:
            return rounds
        child: str | None = sampled
        while child is not None and (before := axis_before(self.graph, child)) is not None:
            rows = self.rows_before(child)
            if rows is None:
                return None
            of_before = np.full(self.count(before) or 0, -1, dtype=np.int64)
            of_before[rows] = rounds
            rounds, child = of_before, before
            if child == axis:
                return rounds
        before = axis_before(self.graph, axis)
        rows = self.rows_before(axis)
        of = None if before is None or rows is None else self.round_of(before)
        return None if of is None else of[rows]
