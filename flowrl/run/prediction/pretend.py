"""`PretendRunner`: computes nothing; instances take their measured costs on a virtual clock.

The same `Steps` drives it as the other runners, so it predicts the engine that runs the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.core.graphs.graph import Graph, Node
from flowrl.data.balance import deal
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import NodeError
from flowrl.protocols.backend import Backend
from flowrl.run.engine.runner import Counts, Lengths, Task, TaskResult, load_of
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.placement.place import ProcessSpec, asked_by
from flowrl.run.placement.placement import processes_of, rows_of_ranks, slots_of
from flowrl.run.placement.turns import Turns
from flowrl.run.prediction.cost import Load
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.measured.clock import SharedClock
from flowrl.run.prediction.measured.work import Work, writes_tokens

_HERE = frozenset({0})


class Rows(NamedTuple):
    """A placeholder for a column: its number of rows."""

    number: int


class _Launched(NamedTuple):
    """An instance that runs: its result, and the seconds of each of its processes, if no other computed."""

    result: TaskResult
    start: float
    seconds: Sequence[float]
    processes: Sequence[ProcessSpec]


class PretendRunner:
    """Runs instances on a virtual clock; a `flowrl.run.engine.runner.Runner`.

    `processes` are those of the layout; None is one process, which runs all nodes.
    """

    def __init__(
        self, processes: Sequence[ProcessSpec] | None, costs: Costs, bindings: Mapping[str, Backend] | None = None
    ) -> None:
        self.timeline = Timeline()
        self.engines: Mapping[str, Any] = {}
        self._here = processes is None
        self._processes, self._costs = list(processes or ()), costs
        self._loses_weights = {role for role, backend in (bindings or {}).items() if backend.loses_weights_asleep}
        self._unsynced: set[ProcessSpec] = set()
        self._turns = Turns(self._processes)
        self._clock: SharedClock[_Launched] = SharedClock(costs.contention)
        self._works: dict[str, Work] = {}

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self._clock.now

    @property
    def swaps(self) -> bool:
        """Whether it can sync during generation: not in one process, which runs one node at a time."""
        return not self._here

    def slots(self, node: Node) -> frozenset[int]:
        """The slots of all roles of a node; nodes without a role occupy none."""
        return _HERE if self._here else slots_of(node, self._processes)

    def put(self, node: Node, columns: Mapping[str, Any]) -> Mapping[str, Rows]:
        """The rows of an input's columns; also advances the clock by a step's time between nodes."""
        self._clock.spend(self._costs.between)
        return {name: Rows(len(column)) for name, column in columns.items()}

    def launch(self, task: Task) -> None:
        """Start an instance, after processes that share its slots were put to sleep."""
        node, name = task.node, task.node.name
        processes = processes_of(node, self._processes)
        if node.is_sync:
            self._turn([one for one in self._processes if set(node.reads) & set(one.roles)], name)
        self._turn([*processes, *asked_by(node, self._processes)], name)
        rows = _rows(task)
        written = self._written(task, rows)
        start = self.now + self._costs.gap(name)
        dealt = _shares(task, rows, processes[0].mesh.data_ranks if processes else 1)
        shares = [dealt[one.position.data_rank] for one in processes] or dealt
        lengths, work = written or task.lengths, self._work(node)
        loads = [work.load(_load(lengths, share), 0 if lengths is None else len(lengths.tokens)) for share in shares]
        seconds = [self._costs.seconds(name, len(shares), load, task.step) for load in loads]
        outputs = {
            output: Rows(rows * node.operator.rows_factor) if isinstance(column, ColumnType) else None
            for output, column in node.signature.outputs.items()
        }
        if node.is_sync:
            self._unsynced.difference_update(processes)
        done = TaskResult(task, outputs, Metrics(), {}, written, max(seconds))
        self._clock.start(_Launched(done, start, seconds, processes), start, seconds, bool(self.slots(node)))

    def wait(self) -> Sequence[TaskResult]:
        """The instances that end next."""
        done = []
        for launched, seconds in self._clock.wait():
            self._enter(launched, seconds)
            done.append(replace(launched.result, seconds=seconds))
        return done

    def fetch(self, node: Node, output: str, value: Rows) -> Tensor | np.ndarray[Any, Any]:
        """An empty column with as many rows."""
        column = node.signature.outputs[output]
        assert isinstance(column, ColumnType)
        return blank(column, value.number)

    def secure(self, node: Node, outputs: Mapping[str, Rows]) -> Mapping[str, Rows]:
        """The same outputs: nothing can be lost."""
        return outputs

    def join(self, node: Node, makers: Mapping[str, str], parts: Sequence[Mapping[str, Rows]]) -> Mapping[str, Rows]:
        """The sum of the rows of all rounds."""
        return {output: Rows(sum(part[output].number for part in parts)) for output in makers}

    def _turn(self, processes: Sequence[ProcessSpec], node: str) -> None:
        """Wake some processes on their slots; the driver waits for that."""
        slept, woken = self._turns.needed(processes)
        self._turns.awake.difference_update(slept)
        self._turns.awake.update(woken)
        self._unsynced |= {one for one in slept if self._loses_weights & set(one.roles)}
        for event, affected in (("sleep", slept), ("wake", woken)):
            if affected:
                start = self.now
                self._clock.spend(self._costs.turn(event, node))
                self.timeline.add(event, "driver", start, self.now, kind="wait")

    def _written(self, task: Task, rows: int) -> Lengths | None:
        """The lengths of a node's output rows, if it writes tokens."""
        operator = task.node.operator
        if not writes_tokens(task.node):
            return None
        key = Key.of(task.seed).derive(task.node.name, -1 if task.step is None else task.step)
        return self._costs.draw(task.node.name, rows * operator.rows_factor, key, self._work(task.node).tokens)

    def _work(self, node: Node) -> Work:
        """What a node does with its rows."""
        if node.name not in self._works:
            self._works[node.name] = Work.of(node)
        return self._works[node.name]

    def _enter(self, launched: _Launched, seconds: float) -> None:
        """Add a span for every busy slot; a sync also occupies those of the trainer."""
        task, start = launched.result.task, launched.start
        slower = seconds / most if (most := max(launched.seconds)) else 1.0
        by_slot = {slot: s for one, s in zip(launched.processes, launched.seconds, strict=False) for slot in one.slots}
        for slot in sorted(self.slots(task.node)):
            taken = slower * by_slot.get(slot, most)
            self.timeline.spans.append(Span(task.node.name, place_of(slot), start, start + taken, step=task.step))
        if not self.slots(task.node):
            self.timeline.spans.append(Span(task.node.name, "general", start, start + seconds, step=task.step))

    # ---- engines: there are none

    @property
    def needs_sync(self) -> bool:
        """Whether an engine would have lost its weights in sleep."""
        return bool(self._unsynced)

    def can_recover(self, error: NodeError) -> bool:
        """False: nothing can be lost."""
        return False

    def recover(self, error: NodeError) -> None:
        raise error

    def version(self, role: str) -> int:
        return 0

    def tokenizer(self, role: str) -> ChatTokenizer:
        raise NotImplementedError(f"{role} is not loaded: a prediction counts prompts and does not read them")

    def save(self, role: str, folder: Path) -> None:
        """There is nothing to write."""

    def load(self, role: str, folder: Path) -> None:
        """There is nothing to read."""

    def save_pretrained(self, role: str, folder: Path) -> None:
        """There is nothing to write."""


def place_of(slot: int) -> str:
    """The name of a slot in a timeline."""
    return f"slot {slot}"


def blank_batch(graph: Graph, draws: int) -> dict[str, DataProto]:
    """A batch of this many draws for each input of a graph, with empty rows."""
    batches = {}
    for name in graph.inputs:
        operator = graph[name].operator
        columns = {
            name: column for name, column in operator.signature.outputs.items() if isinstance(column, ColumnType)
        }
        rows = draws * operator.rows_factor
        batches[name] = DataProto({name: blank(column, rows) for name, column in columns.items()})
    return batches


def blank(column: ColumnType, rows: int) -> Tensor | np.ndarray[Any, Any]:
    """A column with this many rows; its other axes have width 0."""
    if column.dtype == "object":
        return np.full(rows, None, dtype=object)
    return torch.empty(rows, *(0 for _ in column.axes[1:]), dtype=getattr(torch, column.dtype))


def _rows(task: Task) -> int:
    """The number of input rows of an instance."""
    fields = task.node.signature.fields
    columns = (task.inputs[place] for place in task.inputs if getattr(fields[place], "on_batch", False))
    return next((one.number for one in columns if isinstance(one, Rows)), 0)


def _shares(task: Task, rows: int, ranks: int) -> list[Counts | None]:
    """The rows of each data rank; None is all. Groups may be split, since the groups of rows are unknown."""
    operator = task.node.operator
    if ranks == 1 or operator.creates_axis("batch") or not rows:
        return [None] * ranks
    if operator.granularity == "batch":
        return rows_of_ranks(task, ranks)
    weights = np.ones(rows, dtype=np.int64) if task.lengths is None else task.lengths.tokens + 1
    rank_of = np.array(deal(weights.tolist(), ranks))
    return [np.flatnonzero(rank_of == rank) for rank in range(ranks)]


def _load(lengths: Lengths | None, rows: Counts | None) -> Load:
    if lengths is None:
        return Load()
    mine = lengths.of(rows)
    longest = 0 if mine.response is None else int(mine.response.max(initial=0))
    return Load(*load_of(mine), longest)
