"""`RunFiles`: what a run folder holds besides tensors, so that reading it takes no time to import torch."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flowrl.data.files import parse_json
from flowrl.draw.notebook import block, sparkline, table
from flowrl.errors import DataError, ParameterError, offer
from flowrl.look.files import Record, column_files, listed, read_table, read_tables, records, row_files, table_of
from flowrl.look.rows.blame import Blame, blame
from flowrl.run.recording.files import TEXTS, steps_in
from flowrl.run.recording.statistics import PASSED
from flowrl.run.training.lock import LOCK
from flowrl.run.training.run_folder import SPANS

logger = logging.getLogger(__name__)


class RunFiles:
    """The description, metrics, alarms and rows of a run. They are read when they are asked for, so an open run in
    progress grows.

    Args:
        path: the run folder.

    Attributes:
        damage: what could not be read so far, by file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: dict[Path, DataError] = {}

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
        """``"running"``, ``"finished"``, ``"failed"``, ``"interrupted"``; ``"killed"`` if its process is gone;
        ``"damaged"`` if ``run.json`` cannot be read."""
        try:
            status = str(self.description.get("status"))
        except DataError as error:
            self.report(self.path / "run.json", error)
            return "damaged"
        self.report(self.path / "run.json", None)
        return status if status != "running" or _is_held(self.path / LOCK) else "killed"

    # ---- files

    def records(self, file: str) -> list[Record]:
        """The objects of a JSONL file of the folder, without damaged lines; none if there is no such file."""
        return records(self.path / file, self.report)

    def report(self, path: Path, damage: DataError | None) -> None:
        """Note what of a file is damaged, if anything, and warn of it once."""
        if damage is None:
            self.damage.pop(path, None)
        elif str(damage) != str(self.damage.get(path)):
            self.damage[path] = damage
            logger.warning("%s", damage)

    # ---- steps

    @property
    def metrics(self) -> pa.Table:
        """The metrics of each step."""
        return table_of([line for line in self.records("metrics.jsonl") if "timing/step" in line])

    @property
    def validations(self) -> pa.Table:
        """The metrics of each validation; `step` is the number of steps before it."""
        return table_of([line for line in self.records("metrics.jsonl") if "timing/step" not in line])

    @property
    def predictions(self) -> list[Record]:
        """The rows of validations."""
        return self.records("predictions.jsonl")

    @property
    def spans(self) -> pa.Table:
        """Start and end of nodes, transfers and waits, in Unix seconds; `open` names a node that started."""
        return table_of(self.records(SPANS))

    @property
    def alarms(self) -> list[Record]:
        """The alarms that fired."""
        return self.records("alarms.jsonl")

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
        for record in self.records("state.jsonl"):
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
            DataError: the run has no row summaries, none of this step, or they are damaged.
            ParameterError: `by` is no column; or both `best` and `worst` are given.
        """
        files = list(row_files(self.path, None if step is None else [step]))
        table = read_table(files[0]) if len(files) == 1 else read_tables(files, self.report)
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
        path = self.texts_file(step)
        table = read_tables([path], self.report) if path.is_file() else None
        found: dict[str, Record] = {}
        for number, row in enumerate([] if table is None else table.to_pylist()):
            parsed = {key: json.loads(row[key]) for key in ("prompt", "ground_truth", "episode") if row.get(key)}
            found[row.get("row_id", str(number))] = {**row, **parsed}
        return found

    def texts_file(self, step: int) -> Path:
        """Where the texts of a step are, if they are recorded."""
        return self.path / TEXTS / f"step-{step:06d}.parquet"

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

    def blame(self, metric: str, step: int | None = None, against: int | None = None) -> Blame:
        """The rows that make a metric of a step, by default the newest, or its change since another step; see
        `flowrl.look.rows.blame.blame`."""
        return blame(self, metric, step, against)

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


def open_files(path: str | Path) -> RunFiles:
    """The files of a run folder.

    Raises:
        DataError: the folder holds no run.
    """
    folder = Path(path).expanduser()
    if not (folder / "run.json").is_file() and not (folder / "metrics.jsonl").is_file():
        raise DataError(
            f"{folder} holds no run: it has no run.json. Pass the folder of a run, such as runs/grpo-001.",
            code="look.no-run",
            path=folder,
        )
    return RunFiles(folder)


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
