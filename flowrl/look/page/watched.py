"""`WatchedRun`: a run whose files are read as they grow, each byte once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer

from flowrl.core.graphs.graph import Graph
from flowrl.errors import DataError, FlowrlError, ParameterError
from flowrl.look.files import Record, Report, damaged_lines, record_of
from flowrl.look.recorded_run import RecordedRun
from flowrl.look.steps.step_reader import StepReader
from flowrl.run.engine.timeline import Timeline
from flowrl.run.training.run_folder import SPANS

_SHOWN = ("*.json", "*.jsonl", "rows", "texts", "columns")
NO_TEXTS = "The texts of this step were not recorded. Record them with Training(recording=Recording(texts=1))."
_RECENT = 4
"""Steps whose rows stay in memory."""


class Growing:
    """The records of a JSONL file, which may not be there yet.

    `generation` changes when the file was rewritten, as a resume does.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self._path, self._report, self._offset, self._records = path, report, 0, list[Record]()
        self._lines, self._damaged = 0, list[int]()
        self.generation = 0

    def records(self) -> list[Record]:
        """All complete records; reads what is new."""
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                if found.st_ino != self.generation or found.st_size < self._offset:
                    self._offset, self._records, self.generation = 0, [], found.st_ino
                    self._lines, self._damaged = 0, []
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.split(b"\n")[:-1]:
            self._lines += 1
            if (record := record_of(line)) is not None:
                self._records.append(record)
            else:
                self._damaged.append(self._lines)
        self._report(self._path, damaged_lines(self._path, self._damaged))
        return self._records


class StepRows:
    """The rows of a step, read once.

    Args:
        step: counted from 1.
    """

    def __init__(self, run: RecordedRun, step: int) -> None:
        self.run, self.step = run, step

    @cached_property
    def columns(self) -> StepReader:
        """The columns.

        Raises:
            DataError: they were not recorded.
        """
        return StepReader(self.run, self.step)

    @cached_property
    def table(self) -> pa.Table:
        """The summaries."""
        return self.run.rows(self.step)

    @cached_property
    def rows(self) -> dict[str, Record]:
        """The summaries by row id; by number where rows have none."""
        return {str(one["row_id"] if one["row_id"] is not None else one["row"]): one for one in self.table.to_pylist()}

    @cached_property
    def texts(self) -> dict[str, Record]:
        """The recorded texts by row id; none if the run did not record them."""
        return self.run.texts(self.step)

    @property
    def no_texts(self) -> str:
        """Why there are no texts."""
        damage = self.run.damage.get(self.run.texts_file(self.step))
        return NO_TEXTS if damage is None else str(damage)


class WatchedRun:
    """A run for the page: what its files say so far.

    Args:
        name: what the page calls it.
    """

    def __init__(self, name: str, run: RecordedRun) -> None:
        self.name, self.run, self.path = name, run, run.path
        files = "metrics.jsonl", SPANS, "predictions.jsonl", "alarms.jsonl"
        self.lines, self._spans, self._predictions, self._alarms = (Growing(run.path / n, run.report) for n in files)
        self._all_rows: tuple[tuple[int, int], pa.Table] | None = None
        self._by_step: dict[int, list[Record]] = {}
        self._counted = 0, 0
        self._recent: dict[tuple[int, int], StepRows] = {}
        self.graph_problem: FlowrlError | None = None

    @property
    def description(self) -> Mapping[str, Any]:
        """The content of ``run.json``; empty if it cannot be read."""
        try:
            return self.run.description
        except DataError:
            return {}

    @property
    def status(self) -> str:
        """As that of the run."""
        return self.run.status

    @property
    def damage(self) -> list[str]:
        """What could not be read so far, by the names of its files."""
        return [str(error) for _, error in sorted(self.run.damage.items())]

    @cached_property
    def graph(self) -> Graph | None:
        """The graph; None if it cannot be read, for the reason that `graph_problem` is then."""
        try:
            return self.run.graph
        except FlowrlError as error:
            self.graph_problem = error
        except LookupError:
            path = self.path / "run.json"
            self.graph_problem = DataError(
                f"{path} has no graph. Restore it from a copy.", code="run.damaged", path=path
            )
        return None

    @cached_property
    def decode(self) -> Callable[[Sequence[int]], str] | None:
        """The text of tokens by the tokenizer of the run's models, read without the models' library if possible."""
        backends = [one for one in ((self.description.get("graph") or {}).get("bindings") or {}).values() if one]
        folders = [Path(str(one["model"])) for one in backends if one.get("model")]
        files = [*(folder / "tokenizer.json" for folder in folders), *self.path.glob("*/tokenizer.json")]
        if found := next((file for file in files if file.is_file()), None):
            tokenizer = Tokenizer.from_file(str(found))
            return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
        try:
            return None if (other := self.run.tokenizer) is None else other.shown
        except FlowrlError:
            return None

    @property
    def reporters(self) -> Mapping[str, str]:
        """The node that reports a metric, by its key."""
        found: Mapping[str, str] = self.description.get("metrics") or {}
        return found

    @property
    def training(self) -> list[Record]:
        """The metrics of each step."""
        return [line for line in self.lines.records() if "timing/step" in line]

    @property
    def validations(self) -> list[Record]:
        """The metrics of each validation."""
        return [line for line in self.lines.records() if "timing/step" not in line and "step" in line]

    @property
    def steps(self) -> list[int]:
        """The steps that are done, counted from 1."""
        return [line["step"] for line in self.training]

    @property
    def predictions(self) -> list[Record]:
        """The rows of validations."""
        return self._predictions.records()

    @property
    def all_rows(self) -> pa.Table:
        """Which prompts all rows are of, and their scores."""
        at = self.lines.generation, len(self.lines.records())
        if self._all_rows is None or self._all_rows[0] != at:
            table = self.run.rows()
            wanted = [name for name in ("prompt", "uid", "step", "row_id", "score") if name in table.column_names]
            self._all_rows = at, table.select(wanted)
        return self._all_rows[1]

    @property
    def alarms(self) -> list[Record]:
        """The alarms that fired."""
        return self._alarms.records()

    def rows(self, step: int) -> StepRows:
        """The rows of a step; those of the latest few stay in memory until the run resumes."""
        self.lines.records()
        at = step, self.lines.generation
        self._recent[at] = self._recent.pop(at) if at in self._recent else StepRows(self.run, step)
        while len(self._recent) > _RECENT:
            self._recent.pop(next(iter(self._recent)))
        return self._recent[at]

    def spans(self, step: int | None = None) -> list[Record]:
        """The finished spans of a step, or of all."""
        by_step = self._spans_by_step()
        return by_step.get(step, []) if step is not None else [span for spans in by_step.values() for span in spans]

    @property
    def open_nodes(self) -> list[str]:
        """The nodes that have started and not ended; a validation lasts until a node starts."""
        found: dict[str, None] = {}
        for record in self._spans.records()[-1000:]:
            if record.get("open") is not None:
                found = {name: None for name in found if self.graph is None or name in self.graph.nodes}
                found[str(record["open"])] = None
            else:
                found.pop(str(record.get("name")), None)
        return list(found)

    def _spans_by_step(self) -> dict[int, list[Record]]:
        found = self._spans.records()
        if not found:
            return self._traced
        generation, count = self._counted
        if generation != self._spans.generation:
            self._by_step, count = defaultdict(list), 0
        for span in found[count:]:
            if type(span.get("step")) is int and _is_sound(span):
                self._by_step[span["step"]].append(span)
        self._counted = self._spans.generation, len(found)
        return self._by_step

    @cached_property
    def _traced(self) -> dict[int, list[Record]]:
        """The spans of ``trace.json``, which runs of format 1 wrote at their end."""
        path = self.path / "trace.json"
        try:
            spans = Timeline.load(path).spans if path.exists() else []
        except DataError as error:
            self.run.report(path, error)
            spans = []
        found: dict[int, list[Record]] = {}
        for span in spans:
            if span.step is not None:
                found.setdefault(span.step + 1, []).append({**asdict(span), "step": span.step + 1})
        return found


def _refuse_links(folder: Path) -> None:
    """Refuse links that would show what is outside of the folder. The folder may itself be a link, and so may a
    checkpoint, which the page does not read."""
    inside = folder.resolve()
    for path in (found for part in _SHOWN for pattern in (part, f"{part}/**/*") for found in folder.glob(pattern)):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise ParameterError(
                f"{path} is a link to {path.readlink()}, which is outside of the run's folder; the page shows only the "
                f"folder. Replace the link by a copy, or remove it.",
                code="run.link",
                path=path,
                target=path.readlink(),
            )


def _is_sound(span: Mapping[str, Any]) -> bool:
    texts = all(isinstance(span.get(name), str) for name in ("name", "place", "kind"))
    return texts and all(isinstance(span.get(name), int | float) for name in ("start", "end"))


def watched(runs: Sequence[RecordedRun]) -> dict[str, WatchedRun]:
    """Runs by their names; those of one name by their paths.

    Raises:
        ParameterError: a file of a run is a link to a place outside of its folder.
    """
    for run in runs:
        _refuse_links(run.path)
    names = [run.name for run in runs]
    called = {run.name if names.count(run.name) == 1 else str(run.path): run for run in runs}
    return {name: WatchedRun(name, run) for name, run in called.items()}
