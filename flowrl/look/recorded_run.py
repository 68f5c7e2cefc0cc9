"""`RecordedRun`: a run folder to look into, whether the run is in progress, finished, failed or killed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc

from flowrl.core.graphs.graph import Graph
from flowrl.core.operators.symbols import Edge
from flowrl.data.files import parse_json
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.draw.notebook import block, sparkline, table
from flowrl.errors import DataError, GraphError, ParameterError, offer
from flowrl.files.graph_io import graph_from_dict
from flowrl.hub.models import folder_of
from flowrl.look.address import Address, address_of
from flowrl.look.files import Record, column_files, read_tables, records, row_files, table_of
from flowrl.look.row import RecordedRow, RecordedStep, row_of, step_of
from flowrl.look.rows.blame import Blame, blame
from flowrl.look.steps import replay
from flowrl.look.steps.derivation import Derivation, why
from flowrl.look.steps.what_if import WhatIf, what_if
from flowrl.run.recording.recorder import TEXTS, steps_in
from flowrl.run.recording.statistics import PASSED
from flowrl.run.recording.tables import Column, read_columns
from flowrl.run.training.lock import LOCK
from flowrl.run.training.run_folder import SPANS


class RecordedRun:
    """What a run folder holds. It is read when it is asked for, so an open run in progress grows.

    Args:
        path: the run folder.
        imports: see `flowrl.open`.
        kind: the class of its `graph`.
    """

    def __init__(self, path: Path, imports: bool = False, kind: type[Graph] = Graph) -> None:
        self.path, self._imports, self._kind = path, imports, kind

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def description(self) -> Mapping[str, Any]:
        """The content of ``run.json``."""
        path = self.path / "run.json"
        try:
            found = parse_json(path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({error}). Restore it from a copy; the other files of the run remain readable.",
                code="run.damaged",
                path=path,
                reason=str(error),
            ) from error
        return found

    @property
    def status(self) -> str:
        """``"running"``, ``"finished"``, ``"failed"``, ``"interrupted"``; or ``"killed"`` if its process is gone."""
        status = str(self.description.get("status"))
        return status if status != "running" or _is_held(self.path / LOCK) else "killed"

    @cached_property
    def graph(self) -> Graph:
        """The graph, with its backends.

        Raises:
            GraphError: it names classes that the program has not imported; see ``flowrl.open(imports=)``.
        """
        data = self.description["graph"]
        if not self._imports:
            with suppress(GraphError):  # it names code that the program has not imported, or that has changed since
                return graph_from_dict(self._kind, data, None)
        return graph_from_dict(self._kind, data, self._imports)

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer of a model of the run; None if no folder of one is there."""
        bindings = self.description.get("graph", {}).get("bindings", {}).values()
        named = [(str(b.get("model")), b.get("revision")) for b in bindings if isinstance(b, dict)]
        folders = [folder_of(model, revision) for model, revision in named]
        found = [folder for folder in folders if (folder / "tokenizer_config.json").is_file()]
        return ChatTokenizer(str(found[0])) if found else None

    # ---- steps

    @property
    def metrics(self) -> pa.Table:
        """The metrics of each step."""
        return table_of([line for line in records(self.path / "metrics.jsonl") if "timing/step" in line])

    @property
    def validations(self) -> pa.Table:
        """The metrics of each validation; `step` is the number of steps before it."""
        return table_of([line for line in records(self.path / "metrics.jsonl") if "timing/step" not in line])

    @property
    def predictions(self) -> list[Record]:
        """The rows of validations."""
        return records(self.path / "predictions.jsonl")

    @property
    def spans(self) -> pa.Table:
        """Start and end of nodes, transfers and waits, in Unix seconds; `open` names a node that started."""
        return table_of(records(self.path / SPANS))

    @property
    def alarms(self) -> list[Record]:
        """The alarms that fired."""
        return records(self.path / "alarms.jsonl")

    @property
    def steps(self) -> list[int]:
        """The steps with metrics, counted from 1."""
        found = self.metrics
        return found["step"].to_pylist() if found.num_rows else []

    @property
    def recorded_steps(self) -> list[int]:
        """The steps whose columns are there."""
        return list(column_files(self.path))

    @property
    def row_steps(self) -> list[int]:
        """The steps whose row summaries are there."""
        spans = (steps_in(path) for path in row_files(self.path))
        return sorted({step for first, last in spans for step in range(first, last + 1)})

    def state(self, step: int) -> Mapping[str, Any]:
        """The state cells before a step, by ``node.cell``."""
        for record in records(self.path / "state.jsonl"):
            if record.get("step") == step:
                found: Mapping[str, Any] = record["state"]
                return found
        return {}

    # ---- rows

    def rows(
        self,
        step: int | None = None,
        *,
        prompt: int | None = None,
        best: int | None = None,
        worst: int | None = None,
        by: str = "score",
    ) -> pa.Table:
        """The row summaries of a step, or of all steps.

        Args:
            step: counted from 1.
            prompt: only rows of this prompt, by its position in the data.
            best, worst: only so many rows with the largest or smallest `by`, in this order.
            by: a column of the table, such as ``"kl"`` or ``"reward/format"``.

        Raises:
            DataError: the run has no row summaries, or none of this step.
            ParameterError: `by` is no column; or both `best` and `worst` are given.
        """
        table = read_tables(row_files(self.path, None if step is None else [step]))
        if table is not None and step is not None:
            table = table.filter(pc.field("step") == step)
        if table is None or not table.num_rows:
            raise self._no_rows(step)
        if prompt is not None:
            table = table.filter(pc.field("prompt") == prompt)
        if best is not None and worst is not None:
            raise ParameterError(
                f"rows(best={best}, worst={worst}) asks for both ends. Pass one of the two.",
                code="look.invalid-query",
                argument="best",
            )
        if by not in table.column_names:
            raise ParameterError(
                f"The rows of {self.path} have no column {by!r}; {offer(by, table.column_names)}",
                code="look.invalid-query",
                argument="by",
                found=by,
                known=table.column_names,
            )
        if best is None and worst is None:
            return table
        values, sign = table[by].to_pylist(), 1 if best is None else -1
        known = [row for row, value in enumerate(values) if value is not None]
        order = sorted(known, key=lambda row: sign * values[row])
        return table.take(order[: best if best is not None else worst])

    def texts(self, step: int) -> dict[str, Record]:
        """Prompt, response, ground truth and episode of the rows of a step, by `row_id`; empty if not recorded."""
        path = self.path / TEXTS / f"step-{step:06d}.parquet"
        table = read_tables([path]) if path.is_file() else None
        found: dict[str, Record] = {}
        for number, row in enumerate([] if table is None else table.to_pylist()):
            parsed = {key: json.loads(row[key]) for key in ("prompt", "ground_truth", "episode") if row.get(key)}
            found[row.get("row_id", str(number))] = {**row, **parsed}
        return found

    def prompts(self, never: bool = False, passed: float = PASSED) -> pa.Table:
        """Every prompt: attempts, how many solved it, the first and the last solved step, and its latest mean score.

        Args:
            never: only prompts that no row has solved.
            passed: a row has solved its prompt if its score is above this.
        """
        table = self.rows().select(["prompt", "step", "score"])
        table = table.append_column("solved", pc.cast(pc.greater(table["score"], passed), pa.int64()))
        when = pc.if_else(pc.equal(table["solved"], 1), table["step"], pa.scalar(None, pa.int64()))
        table = table.append_column("when", when)
        by_step = table.group_by(["prompt", "step"]).aggregate([("score", "mean")])
        latest = by_step.sort_by([("step", "ascending")]).group_by("prompt", use_threads=False)
        scores = latest.aggregate([("score_mean", "last")]).rename_columns({"score_mean_last": "score"})
        sums = [("step", "count"), ("solved", "sum"), ("when", "min"), ("when", "max")]
        found = table.group_by("prompt").aggregate(sums).join(scores, "prompt").sort_by("prompt")
        names = {
            "step_count": "attempts",
            "solved_sum": "solved",
            "when_min": "first_solved",
            "when_max": "last_solved",
        }
        found = found.rename_columns(names)
        return found.filter(pc.field("solved") == 0) if never else found

    def row(self, address: str | Address) -> RecordedRow:
        """A row with its text and the numbers of its tokens: ``run.row("17[0/516/0#1]")``.

        Raises:
            DataError: the step has no such row, or no row summaries.
            ParameterError: the address names no row of a step.
        """
        place = address_of(address)
        if place.step is None or place.row is None:
            raise ParameterError(
                f"{str(place)!r} names no row of a step. Write STEP[ROW], such as 17[0/516/0#1].",
                code="look.invalid-address",
                found=str(place),
            )
        return row_of(self, place)

    def step(self, step: int) -> RecordedStep:
        """A step with its metrics and alarms.

        Raises:
            DataError: the run has no such step.
        """
        return step_of(self, step)

    def blame(self, metric: str, step: int | None = None, against: int | None = None) -> Blame:
        """The rows that make a metric of a step, by default the newest, or its change since another step; see
        `flowrl.look.rows.blame.blame`."""
        return blame(self, metric, step, against)

    # ---- columns

    def columns(self, step: int, edges: Sequence[Edge] | None = None) -> dict[Edge, Column]:
        """The recorded columns of a step: all, or those of these edges that are there. Updates add the ``entropies`` of
        their first pass, which are no column of the graph.

        Raises:
            DataError: the columns of the step are not recorded, or damaged.
        """
        files = column_files(self.path)
        if step not in files:
            raise DataError(
                f"The columns of step {step} of {self.path} are not recorded; those of {listed(list(files))} are. "
                f"Record every step with Training(recording=Recording(columns='all')).",
                code="look.not-recorded",
                path=self.path,
                step=step,
                known=list(files),
            )
        wanted = None if edges is None else {str(edge) for edge in edges}
        found: dict[Edge, Column] = {}
        for path in files[step].values():
            for name, column in read_columns(path, wanted).items():
                found[Edge.parse(name)] = column
        return found

    def column(self, address: str | Address) -> Column:
        """A recorded column, as it was: ``run.column("17/gae.advantages")``.

        Raises:
            DataError: the step or the column is not recorded.
            ParameterError: the address names no step and column.
        """
        place = address_of(address)
        if place.step is None or place.edge is None:
            raise ParameterError(
                f"{str(place)!r} names no column of a step. Write STEP/NODE.COLUMN, such as 17/gae.advantages.",
                code="look.invalid-address",
                found=str(place),
            )
        found = self.columns(place.step, [place.edge])
        if place.edge not in found:
            there = list(self.columns(place.step))
            own = [edge.output for edge in there if edge.node == place.node]
            nodes = sorted({edge.node for edge in there})
            near = offer(place.column, own, f"{place.node} has") if own else offer(place.node, nodes, "it has")
            raise DataError(
                f"{place.edge} is not recorded in step {place.step} of {self.path}: {near}",
                code="look.not-recorded",
                path=self.path,
                step=place.step,
                found=str(place.edge),
            )
        return found[place.edge]

    # ---- why, replay, what if

    def why(self, address: str | Address) -> Derivation:
        """Where a number comes from: ``run.why("17/update_actor.advantages[0/516/0#1]")``.

        Raises:
            DataError: the step is not recorded, or has no such row.
            ParameterError: the address names no step, node, column and row.
        """
        return why(self, address_of(address))

    def replayable(self, step: int) -> dict[str, str | None]:
        """What each node that ran in a step lacks to be recomputed; None for a node that can be."""
        return replay.replayable(self, step)

    @overload
    def replay(self, address: str | int | Address) -> replay.Replay: ...
    @overload
    def replay(self, address: str | int | Address, **verbs: Any) -> WhatIf: ...
    def replay(self, address: str | int | Address, **verbs: Any) -> replay.Replay | WhatIf:
        """Recompute a node (``"17/gae"``) or all nodes without weights (``17``), and compare with what is recorded.

        With verbs of `Graph.edit`, such as ``set={"gae.lam": 0.5}``: the effect of that edit on the step.

        Raises:
            DataError: the step is not recorded, or the node cannot be recomputed.
            GraphError: the edit is not possible.
        """
        place = address_of(address)
        return what_if(self, place, verbs) if verbs else replay.replay(self, place)

    def __repr__(self) -> str:
        steps = self.steps
        lines = [f"{self.path}: {self.status}, {len(steps)} steps"]
        found = self.metrics
        for key in ("reward/mean", "kl/ref"):
            if key in found.column_names and found[key].null_count < len(found):
                lines.append(f"  {key} {found[key][0].as_py():.3f} -> {found[key][-1].as_py():.3f}")
        alarms = self.alarms
        if alarms:
            lines.append(
                f"  {len(alarms)} alarms, the first in step {alarms[0].get('step')}: {alarms[0].get('message')}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        found = self.metrics
        names = [n for n in found.column_names if n.count("/") and not n.startswith(("timing/", "total/", "sync/"))]
        rows = [(n, found[n][-1].as_py(), sparkline(found[n].to_pylist())) for n in names if found[n][-1].as_py()]
        alarms = [(alarm.get("step"), alarm.get("rule"), alarm.get("message")) for alarm in self.alarms]
        parts = table(rows), table(alarms, ("step", "alarm", "")) if alarms else ""
        return block(repr(self).splitlines()[0], *parts)

    def _no_rows(self, step: int | None) -> DataError:
        if step is None or step not in self.steps:
            known = f"it has the steps {listed(self.steps)}" if self.steps else "it has no finished step"
        else:
            known = "it was written by an older flowrl, its graph samples no rows, or its recording stopped"
        return DataError(
            f"{self.path} has no row summaries{'' if step is None else f' of step {step}'}: {known}. A run of this "
            f"version writes them to rows/.",
            code="look.not-recorded",
            path=self.path,
            step=step,
        )


def open_run(path: str | Path, imports: bool = False, kind: type[Graph] = Graph) -> RecordedRun:
    """See `flowrl.open`."""
    folder = Path(path).expanduser()
    if not (folder / "run.json").is_file() and not (folder / "metrics.jsonl").is_file():
        raise DataError(
            f"{folder} holds no run: it has no run.json. Pass the folder of a run, such as runs/grpo-001.",
            code="look.no-run",
            path=folder,
        )
    return RecordedRun(folder, imports, kind)


def _is_held(lock: Path) -> bool:
    """Whether the process that the lock file names is alive; a process of another host counts as alive."""
    try:
        named = parse_json(lock.read_bytes())
        if named["host"] != socket.gethostname():
            return True
        os.kill(int(named["process"]), 0)
    except PermissionError:
        return True  # of another user
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return True


def listed(numbers: Sequence[int]) -> str:
    """Steps as text: ``"1, 18 to 37"``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "none"
