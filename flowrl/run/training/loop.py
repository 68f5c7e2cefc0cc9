"""`Loop`: a run in progress: steps, validations, checkpoints, and what each of them writes to the run folder."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from flowrl.core.operators.symbols import Edge
from flowrl.data.files import noting, writing
from flowrl.data.proto.formats import check_json
from flowrl.data.sources.source import Source
from flowrl.draw.notebook import block, sparkline, table
from flowrl.run.alarms.alarms import ALARMS, Alarms, Fired, refuse_to_continue
from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Rule
from flowrl.run.engine.in_flight import Batches
from flowrl.run.engine.result import StepResult
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Timeline, idle
from flowrl.run.recording.recording import Recording
from flowrl.run.recording.span_log import SpanLog
from flowrl.run.recording.statistics import statistics
from flowrl.run.reporting.reporter import Reporter
from flowrl.run.reporting.reports import Reports
from flowrl.run.training.checkpoint import Checkpoints
from flowrl.run.training.identity import backends_of
from flowrl.run.training.job import Job
from flowrl.run.training.resume import Found, refuse_fewer_steps, warn_of_changed_prompts
from flowrl.run.training.rollout_log import logged_columns, rollout_records
from flowrl.run.training.run_folder import TRACE, Resume, RunFolder, jsonable
from flowrl.run.training.signals import Ending
from flowrl.run.training.sources import Sources
from flowrl.run.validation.held_out import held_out
from flowrl.run.validation.stopping import Best, EarlyStopping, Value, refuse_unreported_metric
from flowrl.run.validation.validating import Validating
from flowrl.run.validation.validation import Validation

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

MAX_CELL = 1 << 16
"""Bytes of a state cell, as JSON, above which ``state.jsonl`` has its digest."""


class Settings(Protocol):
    """The settings of a run; `flowrl.run.training.training.Training` documents them."""

    @property
    def job(self) -> Job[Any]: ...
    @property
    def sources(self) -> Mapping[str, Source]: ...
    @property
    def validations(self) -> Sequence[Validation]: ...
    @property
    def policies(self) -> Sequence[str]: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def early_stopping(self) -> EarlyStopping | None: ...
    @property
    def best(self) -> Best | None: ...
    @property
    def load_best_at_end(self) -> bool: ...
    @property
    def prompts(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def save_model(self) -> bool: ...
    @property
    def checkpoint_every(self) -> int | None: ...
    @property
    def rollouts_every(self) -> int | None: ...
    @property
    def recording(self) -> Recording: ...
    @property
    def alarms(self) -> Sequence[Rule]: ...
    @property
    def resume(self) -> Resume: ...
    @property
    def accept(self) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its folder, the metrics of every step and validation, and the live engines."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]
    validations: Sequence[Mapping[str, float]]
    engines: Mapping[str, Any]

    def __repr__(self) -> str:
        curves = [f"{self.folder}: {len(self.metrics)} steps done; flowrl.open({str(self.folder)!r}) looks into them"]
        for name in ("reward/mean", "kl/ref"):
            if self.metrics and name in self.metrics[0] and name in self.metrics[-1]:
                curves.append(f"  {name} {self.metrics[0][name]:.3f} -> {self.metrics[-1][name]:.3f}")
        return "\n".join(curves)

    def _repr_html_(self) -> str:
        last = self.metrics[-1] if self.metrics else {}
        names = [name for name in last if name.startswith(("reward/", "kl/", "actor/"))]
        rows = [(name, last[name], sparkline([m.get(name) for m in self.metrics])) for name in names]
        return block(repr(self).splitlines()[0], table(rows))


class Loop:
    """The state of a run in progress."""

    def __init__(
        self,
        training: Settings,
        steps: Steps,
        folder: RunFolder,
        checkpoints: Checkpoints,
        reporters: Sequence[Reporter],
        described: Mapping[str, Any],
        ending: Ending,
    ) -> None:
        self.training, self.steps, self.folder = training, steps, folder
        self.reports = Reports(reporters, folder.path, bool(training.resume))
        self.checkpoints, self.described, self.ending = checkpoints, described, ending
        tokenizer = steps.tokenizer()
        graph, region = training.job.graph, steps.plan.region
        again = [name for name in graph.inputs if name in region]
        self.sources = Sources(training.sources, tokenizer, training.seed, graph, again)
        self.sources.warn_of_few(training.prompts)
        self.logged_columns = logged_columns(graph)
        self.validations = Validating(held_out(graph, training.validations), steps, tokenizer, training.seed)
        self.validations.warn_of_shared_rows(self.sources)
        self.last = training.steps or self.sources.steps_of(training.epochs or 1, training.prompts)
        """The last step: that of the settings, or an earlier one if a validation ends the run."""
        self.content = {**self.sources.digests, **self.validations.digests}
        self.metrics: list[Mapping[str, float]] = []
        self.validated: list[Mapping[str, float]] = []
        self.seconds: list[Mapping[str, float]] = []
        self.makespans: list[float] = []
        self.started = 0.0
        self.scored: dict[int, Mapping[str, float]] = {}  # by step, when its rows were sampled
        self.before = Timeline.of_starts(folder.path / TRACE)  # the starts that this run resumes
        # here: pyarrow starts threads, so that no worker can be forked from a process that imported `Training`
        from flowrl.run.recording.recorder import Recorder

        self.alarms = alarms = Alarms(training.alarms, str(folder.path))
        recorded = self._has_checkpoint, lambda: alarms.steps, lambda: alarms.does("record")
        self.recorder = Recorder(folder.path, graph, training.seed, training.recording, *recorded)
        self.rows: pa.Table | None = None  # the summaries of the newest step
        self.spans = SpanLog(folder)
        self.totals = dict.fromkeys(("total/rows", "total/tokens", "total/seconds"), 0.0)
        self.reported_by: dict[str, str] = {}

    def run(self, found: Found | None) -> Run:
        """Run all steps, or those after the checkpoint."""
        done = 0 if found is None else int(found[1]["step"])
        try:
            with self.reports.started(self.training.job.graph.name, self.last, done):
                self._begin(found)
                with nullcontext() if self.training.checkpoint_every is None else self.ending.deferred():
                    self._go(range(done, self.last))
                if self.makespans:
                    summary = self.steps.timeline.summary(self.steps.plan, self.seconds, self.makespans)
                    self.reports.summary = dataclasses.replace(summary, idle=idle(self._timeline().spans))
        except BaseException as error:
            with noting(error):
                self._trace()
            raise
        finally:
            self.folder.describe({"recorded": self.recorder.describe(len(self.metrics))})
        self._trace()
        if self.training.load_best_at_end:
            self._load_best()
        if self.training.save_model:
            for role in self.training.policies:
                with writing(self.folder.path / role):
                    self.steps.save_pretrained(role, self.folder.path / role)
        return Run(self.folder.path, self.metrics, self.validated, self.steps.runner.engines)

    def _begin(self, found: Found | None) -> None:
        """Restore engines, state, data and the lines of the folder, or start from step 0."""
        if found is None:
            if self.folder.before is not None:
                self.folder.rewind(-1)  # lines of an earlier start without a checkpoint
                self.recorder.rewind(0)
            self.steps.sync()
            self._validate(0)
            return
        path, state = found
        refuse_fewer_steps(found, self.last)
        warn_of_changed_prompts(path, state["content"], self.content)
        self.steps.state.update(state["state"])
        self.sources.seek(state["data"], changed="data" in self.training.accept)
        self.scored = {int(step): numbers for step, numbers in state["last_scored_step"].items()}
        self.steps.load(path, self.training.job.graph.lag.versions)
        self.metrics, self.validated = self.folder.rewind(state["step"], state["lines"])
        self.recorder.rewind(state["step"])
        self.reports.earlier(self.metrics, self.validated)
        self.rows = self.recorder.summary(state["step"])
        self.reported_by |= (self.folder.before or {}).get("metrics", {})
        self.alarms.resume(self._history(), [record["step"] for record in self.folder.records(ALARMS)])
        self.totals |= {key: self.metrics[-1][key] for key in self.totals if self.metrics and key in self.metrics[-1]}
        if self.validations.reached(self.validated) or self._stops() is not None:
            self.last = state["step"]
        self._describe_best(self._best(state["step"]))

    def _checkpoint(self, step: int, fired: Sequence[Fired]) -> None:
        actions = {action for _, action in fired}
        ends = self.training.checkpoint_every is not None and (self.ending.received or "stop" in actions)
        best = self._best(step)
        is_best = best is not None and best.step == step
        if not (self._has_checkpoint(step) or ends or is_best or "checkpoint" in actions):
            return
        self.steps.drain()
        state = {
            "data": self.sources.position,
            "last_scored_step": {str(step): numbers for step, numbers in self.scored.items()},
            "state": self.steps.state,
            "content": self.content,
            "made_with": jsonable(self.described["identity"]),
            "accepted": self.described.get("accepted", []),
            "bindings": backends_of(self.training.job.graph),
            "lines": self.folder.marks(),
        }
        self.checkpoints.save(step, state, self._write, None if best is None else best.step)
        self._describe_best(best)

    def _describe_best(self, best: Value | None) -> None:
        """Write the best value so far, and its checkpoint, to ``run.json``."""
        if best is not None:
            where = self.checkpoints.path(best.step).relative_to(self.folder.path).as_posix()
            self.folder.describe({"best": {**best._asdict(), "checkpoint": where}})

    def _best(self, step: int) -> Value | None:
        """The best validation among the steps with a checkpoint and `step`."""
        best = self.training.best
        return None if best is None else best.of(self.validated, {*self.checkpoints.steps(), step} - {0})

    def _load_best(self) -> None:
        """Restore the best checkpoint."""
        best = self._best(self.last)
        if best is None:
            logger.warning("No validation reported a finite value, so the run ends with its last weights.")
        elif best.step != self.last:
            self.steps.load(self.checkpoints.intact(best.step), self.training.job.graph.lag.versions)

    def _stops(self) -> str | None:
        """Why early stopping ends the run; None if it does not."""
        stopping = self.training.early_stopping
        return None if stopping is None else stopping.reason(self.validated)

    def _has_checkpoint(self, step: int) -> bool:
        """Whether there is a checkpoint after a step, counted from 1."""
        every = self.training.checkpoint_every
        return every is not None and (step % every == 0 or step == self.last)

    @property
    def _writes_checkpoints(self) -> bool:
        """Whether the run writes checkpoints, for any reason but an alarm."""
        return self.training.checkpoint_every is not None or self.training.best is not None

    def _write(self, checkpoint: Path) -> None:
        """Write the trained roles; and policies as Hugging Face folders, for other programs to load."""
        self.steps.save(checkpoint)
        for role in self.training.policies:
            self.steps.save_pretrained(role, checkpoint / role / "huggingface")

    def _timeline(self) -> Timeline:
        """All spans since this start; those of validations prefixed with their names."""
        timeline = Timeline()
        timeline.spans += [*self.steps.timeline.spans, *self.validations.spans]
        return timeline

    def _trace(self) -> None:
        timeline = self._timeline()
        timeline.spans[:0] = self.before.spans
        timeline.save(self.folder.path / TRACE)

    def _go(self, steps: range) -> None:
        """Run steps, each with the validations and the checkpoint that are due after it."""
        more, columns, lag = self.sources.more, self._columns_due, self.training.job.graph.lag.versions
        results = self.steps.run(self._draw, steps, lag=lag, on_node=self._report_node, more=more, columns=columns)
        for step in steps:
            cells = jsonable(self.steps.state)
            self.started = time.perf_counter()
            result = next(results)
            self._enter(step, result, time.perf_counter() - self.started)
            self.folder.append("state.jsonl", [{"step": step + 1, "state": _short(cells)}])
            if self._logged(step):
                rows = [{"step": step + 1, **row} for row in rollout_records(self.logged_columns, result.columns)]
                self.folder.append("rollouts.jsonl", rows)
            self._validate(step + 1)
            fired = self._alarm()
            self._checkpoint(step + 1, fired)
            refuse_to_continue(fired, self.folder.path)
            if step + 1 == self.last:
                break
            self.ending.end_after(step + 1, self.folder.path)

    def _draw(self, step: int) -> Batches:
        self.scored[step] = self.sources.last_scored_step
        batches = self.sources.next(self.training.prompts)
        self.started = time.perf_counter()  # reading data does not count as part of the step
        return batches

    def _enter(self, step: int, result: StepResult, seconds: float) -> None:
        """Write what a step leaves: its rows first, so that every step with metrics has them."""
        began = time.time()
        self.rows = rows = self.recorder.record(step, result)
        self.steps.timeline.add("record", "this process", began, time.time(), kind="record")
        recording = {"timing/record": time.time() - began}
        computed = ({} if rows is None else statistics(rows)) | result.metrics.compute()
        self.totals["total/seconds"] += seconds
        self.totals["total/rows"] += self.recorder.rows
        self.totals["total/tokens"] += computed.get("response_length/total", 0.0)
        of_run = {"time": time.time(), **self.totals}
        timing = {**result.timing(seconds), **recording}
        metrics = {"step": step + 1, **computed, **self.scored.pop(step), **timing, **of_run}
        self.sources.learn(step + 1, result.scores)
        if self._writes_checkpoints:  # now, not hours later when it is saved
            check_json(self.steps.state, f"the state after step {step + 1}")
        self.metrics.append(metrics)
        self.seconds.append(result.seconds)
        self.makespans.append(seconds)
        self.folder.append("metrics.jsonl", [metrics])
        of_rows = {key: node for key, node in self.recorder.sources.items() if key in computed}
        reported_by = {**of_rows, **result.reported_by}
        if reported_by.keys() - self.reported_by.keys():
            self.reported_by |= reported_by
            self.folder.describe({"metrics": self.reported_by})
        self.spans.write("steps", self.steps.timeline.spans)
        self.reports.step(step + 1, metrics)
        if rows is not None:
            self.reports.rows(step + 1, rows)

    def _validate(self, step: int) -> None:
        for validated in self.validations.due(step, lambda: step == self.last, self._report_node):
            self.validated.append(validated.metrics)
            self.folder.append("metrics.jsonl", [validated.metrics])
            self.folder.append("predictions.jsonl", validated.predictions)
            self.reports.validation(step, validated.metrics)
            reason = "a validation reached its goal" if validated.reached else self._stops()
            if reason is not None and step < self.last:
                self.last = step
                self.folder.describe({"ended_early": reason})
        if step == 0:
            self._refuse_unreported()
        self.spans.write("validations", self.validations.spans)

    def _refuse_unreported(self) -> None:
        """Refuse metrics that decide about the run and that no validation reports."""
        for setting, one in {"early_stopping": self.training.early_stopping, "keep_best": self.training.best}.items():
            if one is not None:
                refuse_unreported_metric(setting, one.metric, self.validated)

    def _alarm(self) -> list[Fired]:
        """The alarms that fire after the newest step, which are written and logged."""
        fired = list(self.alarms.after(self._history()))
        self.folder.append(ALARMS, [dataclasses.asdict(alarm) for alarm, _ in fired])
        for alarm, _ in fired:
            logger.warning("%s", alarm)
            self.reports.alarm(alarm)
        return fired

    def _history(self) -> History:
        facts = {"stopped": self.recorder.stopped, "free": shutil.disk_usage(self.folder.path).free}
        return History(self.metrics, self.validated, self.rows, self.reported_by, facts)

    def _columns_due(self, step: int) -> Collection[Edge]:
        """The columns that are written of a step."""
        return {*self.recorder.edges(step), *(self.logged_columns.values() if self._logged(step) else ())}

    def _logged(self, step: int) -> bool:
        """Whether the rows of a step go to ``rollouts.jsonl``."""
        every = self.training.rollouts_every
        return every is not None and (step + 1) % every == 0

    def _report_node(self, name: str) -> None:
        self.spans.write("steps", self.steps.timeline.spans)
        self.spans.open(name)
        self.reports.node(name)


def _short(cells: Any) -> Any:
    """State cells for ``state.jsonl``: large ones by digest."""
    texts = {name: json.dumps(value) for name, value in cells.items()}
    large = {name for name, text in texts.items() if len(text) > MAX_CELL}
    return {
        name: {"digest": xxhash.xxh3_128_hexdigest(texts[name].encode())} if name in large else value
        for name, value in cells.items()
    }
