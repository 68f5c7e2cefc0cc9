"""`Recorder`: writes the rows of each step to the run folder: summaries, texts and columns.

The run's own thread writes. On two busy cores, a prototype with a writer thread shortened ``record`` by 30 to 40 ms,
and lengthened the computation after it by 40 to 70 ms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from flowrl.core.graphs.graph import Graph
from flowrl.core.operators.symbols import Edge
from flowrl.data.files import remove, writing
from flowrl.errors import DataError, StorageError
from flowrl.run.engine.result import StepResult
from flowrl.run.recording.files import COLUMNS, ROWS, TEXTS, files_of, reading_parquet, steps_in, writing_parquet
from flowrl.run.recording.recording import Recording
from flowrl.run.recording.row_maps import row_axis
from flowrl.run.recording.statistics import sources
from flowrl.run.recording.summaries import RowSummaries
from flowrl.run.recording.tables import Typed, all_as_json, is_recordable, write_columns
from flowrl.run.training.rollout_log import logged_columns

logger = logging.getLogger(__name__)

TOGETHER = 100
"""So many steps are compacted into one file of ``rows/``."""


class Recorder:
    """Writes rows of the steps of a run.

    Args:
        folder: of the run.
        graph: before fusing.
        seed: of the run.
        retained: whether the columns of a step, counted from 1, are retained whatever the ring drops.
        alarms: the steps that alarms point at, counted from 1.
        everything: whether texts and columns are written now whatever the settings, because an alarm is on.
    """

    def __init__(
        self,
        folder: Path,
        graph: Graph,
        seed: int,
        recording: Recording,
        retained: Callable[[int], bool],
        alarms: Callable[[], Collection[int]] = tuple,
        everything: Callable[[], bool] = bool,
    ) -> None:
        self._folder, self._graph, self._recording = folder, graph, recording
        self._retained, self._alarms, self._everything = retained, alarms, everything
        self._summaries, self._texts = RowSummaries(graph, seed), logged_columns(graph)
        self.stopped: StorageError | None = None
        self.rows = 0  # sampled in the newest step

    def edges(self, step: int) -> Collection[Edge]:
        """The columns that `record` needs of a step, counted from 0."""
        needed = dict.fromkeys(self._summaries.needed)
        if self._of_texts(step):
            needed |= dict.fromkeys(self._texts.values())
        if self._of_columns:
            needed |= dict.fromkeys(self._recordable)
        return () if self.stopped else needed

    @property
    def sources(self) -> dict[str, str]:
        """By metric of `statistics`, the node that it is about."""
        return sources(self._summaries.edges)

    def record(self, step: int, result: StepResult) -> pa.Table | None:
        """Write a step, counted from 0, and return its row summaries; None without rows, or if recording has stopped.

        Raises:
            StorageError: a file cannot be written, and the recording is `strict`.
        """
        table: pa.Table | None = None
        if self.stopped:
            return table
        columns = {e: result.columns[e.node].columns[e.output] for e in self.edges(step) if self._ran(e, result)}
        with self._reported():
            table = self._summaries.table(step, columns, result.metrics.rows, result.round_sizes, result.skipped)
            self.rows = 0 if table is None else table.num_rows
            if table is not None:
                _write(self._path(ROWS, step + 1), table, **_SMALL)
                if (step + 1) % TOGETHER == 0:
                    self._compact(step + 1)
            if self._of_texts(step):
                self._write_texts(step, columns)
            if self._of_columns:
                self._write_columns(step, columns | self._reported_columns(result, columns))
            if self._recording.wants_columns:
                self._prune(step + 1)
        return table

    def summary(self, step: int) -> pa.Table | None:
        """The row summaries of a recorded step, counted from 1; None if they are not there, or damaged."""
        for path in files_of(self._folder / ROWS):
            first, last = steps_in(path)
            if first <= step <= last:
                table = _read(path)
                return None if table is None else table.filter(pc.field("step") == step)
        return None

    def rewind(self, step: int) -> None:
        """Remove what was written of later steps than `step`, counted from 1."""
        with self._reported():
            for path in list(files_of(self._folder / ROWS)):
                first, last = steps_in(path)
                if last > step and first <= step and (table := _read(path)) is not None:
                    for number in range(first, step + 1):
                        _write(self._path(ROWS, number), table.filter(pc.field("step") == number))
                if last > step:
                    remove(path)
            for kind in (TEXTS, COLUMNS):
                for path in list(files_of(self._folder / kind)):
                    if steps_in(path)[1] > step:
                        remove(path)

    def describe(self, steps: int) -> dict[str, Any]:
        """What of the columns of so many steps is gone, for ``run.json``."""
        if not self._recording.wants_columns:
            return {"columns": [], "gone": []}
        there = sorted({steps_in(path)[0] for path in files_of(self._folder / COLUMNS)})
        due = [number for number in range(1, steps + 1) if self._stays(number, steps) and number not in there]
        return {"columns": there, "gone": due, **({"stopped": str(self.stopped)} if self.stopped else {})}

    # ---- writing

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """A write error stops the recording, not the run, unless it is strict."""
        try:
            yield
        except StorageError as error:
            if self._recording.strict:
                raise
            self.stopped = error
            logger.warning("Recording stopped, and the run continues without it: %s", error)

    @cached_property
    def _recordable(self) -> list[Edge]:
        """All columns of the graph that are recorded."""
        types = ((edge, typed.type) for edge, typed in self._graph.types.items() if typed.axes)
        return [edge for edge, type in types if is_recordable(type)]  # type: ignore[arg-type]

    def _of_texts(self, step: int) -> bool:
        every = self._recording.texts
        return self._everything() or (every is not None and (step + 1) % every == 0)

    @property
    def _of_columns(self) -> bool:
        return self._everything() or self._recording.wants_columns

    def _ran(self, edge: Edge, result: StepResult) -> bool:
        return edge.node in result.columns and edge.output in result.columns[edge.node].columns

    def _path(self, kind: str, step: int) -> Path:
        return self._folder / kind / f"step-{step:06d}.parquet"

    def _write_texts(self, step: int, columns: Mapping[Edge, Any]) -> None:
        found = {key: columns[edge] for key, edge in self._texts.items() if edge in columns}
        if "response" not in found:
            return
        as_they_are = {key: pa.array(map(_text, found[key])) for key in ("row_id", "response") if key in found}
        in_json = {
            key: pa.array([text for text, _ in all_as_json(list(found[key]))])
            for key in ("prompt", "ground_truth", "episode")
            if key in found and len(found[key]) == len(found["response"])
        }
        _write(self._path(TEXTS, step + 1), pa.table(as_they_are | in_json))

    def _write_columns(self, step: int, columns: Mapping[Edge, Any]) -> None:
        by_axis: dict[str, dict[str, Typed]] = {}
        types = {**self._graph.types, **self._summaries.reported}
        for edge in (*self._recordable, *self._summaries.reported):
            if edge in columns and types[edge].axes:
                typed: Any = types[edge].type
                by_axis.setdefault(types[edge].axes[0], {})[str(edge)] = Typed(columns[edge], typed)
        for axis, some in by_axis.items():
            path = self._folder / COLUMNS / quote(axis, safe="@") / f"step-{step + 1:06d}.parquet"
            write_columns(path, some, {"step": step + 1, "axis": axis})

    def _reported_columns(self, result: StepResult, columns: Mapping[Edge, Any]) -> dict[Edge, Tensor]:
        """The columns of tokens that updates report with their metrics; 0 in rows that they do not compute."""
        found = {}
        for edge, typed in self._summaries.reported.items():
            rows = next((len(c) for e, c in columns.items() if row_axis(self._graph, e) == typed.axes[0]), None)
            of_tokens = result.metrics.columns.get(f"{edge.node}/{edge.output}")
            if rows is not None and of_tokens is not None:
                numbers, values = of_tokens
                found[edge] = values.new_zeros(rows, values.shape[1])
                found[edge][numbers] = values
        return found

    def _compact(self, last: int) -> None:
        """Join the files of the newest steps of ``rows/``; a kill in between leaves both, and readers ignore one."""
        first = last - TOGETHER + 1
        paths = [self._path(ROWS, number) for number in range(first, last + 1)]
        tables = [table for path in paths if path.exists() and (table := _read(path)) is not None]
        whole = self._folder / ROWS / f"steps-{first:06d}-{last:06d}.parquet"
        _write(whole, pa.concat_tables(tables, promote_options="default"))
        with writing(whole):
            for path in paths:
                remove(path)

    # ---- the ring of columns

    def _stays(self, step: int, newest: int) -> bool:
        """Whether the columns of a step, counted from 1, stay when `newest` is written."""
        recording = self._recording
        ring = recording.columns == "all" or step > newest - recording.recent
        regular = step == 1 or (recording.every is not None and step % recording.every == 0)
        return ring or regular or self._retained(step) or self._near_alarm(step)

    def _near_alarm(self, step: int) -> bool:
        return any(abs(step - other) <= 1 for other in self._alarms())

    def _prune(self, newest: int) -> None:
        """Remove the columns of steps that have left the ring, and while they exceed the budget the oldest."""
        paths: dict[int, list[Path]] = {}
        for path in files_of(self._folder / COLUMNS):
            paths.setdefault(steps_in(path)[0], []).append(path)
        with writing(self._folder / COLUMNS):
            for step in [step for step in paths if not self._stays(step, newest)]:
                for path in paths.pop(step):
                    remove(path)
            sizes = {step: sum(path.stat().st_size for path in some) for step, some in paths.items()}
            order = sorted(sizes, key=lambda step: (self._near_alarm(step), step))
            while sum(sizes.values()) > self._recording.bytes and order:
                step = order.pop(0)
                sizes.pop(step)
                for path in paths[step]:
                    remove(path)


def _read(path: Path) -> pa.Table | None:
    """A table; None, with a warning, if the file is damaged, for example by a crash of the machine."""
    try:
        with reading_parquet(path):
            return pq.read_table(path)
    except DataError as error:
        logger.warning("%s", error)
        return None


_SMALL = {"compression": "snappy", "compression_level": None, "use_dictionary": False, "write_statistics": False}
"""How the summaries of one step are written: they are joined soon, and what zstd and dictionaries save of a few
kilobytes is not worth their time."""


def _write(path: Path, table: pa.Table, **options: Any) -> None:
    with writing_parquet(path) as file:
        pq.write_table(table, file, **{"compression": "zstd", "compression_level": 1, **options})


def _text(value: Any) -> str:
    """Text without lone surrogates, which Parquet cannot hold."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
