"""`Training`: a job, its data and its length; `run` writes a run folder."""

from __future__ import annotations

import dataclasses
import logging
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from typing import Any, Self

import torch
from pydantic import Field, field_validator, model_validator

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.plan import Plan
from flowrl.data.files import noting
from flowrl.data.sources.source import Source
from flowrl.draw.notebook import job_html
from flowrl.files.graph_io import graph_to_dict
from flowrl.files.values import encode
from flowrl.hub.repositories import Commits
from flowrl.protocols.protocols import Trainer
from flowrl.protocols.scorers import RewardTrainer
from flowrl.run.alarms.defaults import DEFAULT
from flowrl.run.alarms.rule import Check, Rule
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.recording.recording import Recording
from flowrl.run.reporting.reporter import Reporter, refuse_bad_reporters
from flowrl.run.training.checkpoint import Checkpoints, refuse_no_checkpoints
from flowrl.run.training.identity import backends_of, identity_of
from flowrl.run.training.job import Job
from flowrl.run.training.length import over_run
from flowrl.run.training.loop import Loop, Run
from flowrl.run.training.provenance import provenance
from flowrl.run.training.resume import Accepted, accepted, find
from flowrl.run.training.run_folder import CHECKPOINTS, Resume, RunFolder, recorded_commits
from flowrl.run.training.signals import ended_in_order
from flowrl.run.training.sources import (
    Data,
    by_input,
    pinned_data,
    refuse_no_feedback,
    refuse_no_source,
    refuse_no_tokenizer,
    sources_here,
)
from flowrl.run.validation.held_out import held_out, with_engines
from flowrl.run.validation.stopping import Best, EarlyStopping, refuse_unknown_metric
from flowrl.run.validation.validation import Validation
from flowrl.spec import Spec

logger = logging.getLogger(__name__)


class Training(Spec):
    """A training run of a job: ``Training(job, data, steps=100, prompts=32).run()``.

    Args:
        job: the bound graph.
        data: the source of the graph's input, such as ``PromptData("train.jsonl")``; for a graph with several inputs a
            source for each, by its name: ``{"batch": PromptData(...), "demos": DemoData(...)}``.
        steps: number of steps; or pass `epochs`. A learning rate without ``steps=`` in its schedule lasts as long; a
            run that resumes with another length warns, since the rest of its schedule differs.
        epochs: passes over the data instead of `steps`: as many steps as draw every row of the first input that often.
            The last step may begin another pass. Rows that `Collect` draws in addition do not count.
        prompts: prompts per step, and draws of every other source; rows are prompts times the graph's repeats. If a
            source has fewer, a step repeats some of them, each time as a separate group, and a warning names them.
        seed: root of all randomness: data order, sampling, mini-batches.
        validation: one or several.
        early_stopping: ends the run when a metric of a validation no longer improves.
        keep_best: a metric of a validation, such as ``"val/reward/mean"``, or ``Best("val/loss", mode="min")``: the run
            writes a checkpoint after each step with a new best value, and retains the newest of these beyond
            `max_checkpoints`. ``run.json`` names it under ``best``.
        load_best_at_end: restore that checkpoint at the end, so that the saved model is the best one.
        folder: the run folder; None is ``runs/<graph>-<number>``.
        save_model: write each trained policy to ``<folder>/<role>`` at the end.
        checkpoint_every: steps between two checkpoints, in ``<folder>/checkpoints``; None writes none.
        max_checkpoints: how many of the newest checkpoints to retain.
        resume: resume the run in `folder` from its newest undamaged checkpoint, or from step 0 if it has none.
            ``"or-start"`` starts the run if there is none, for jobs that are restarted; True refuses that.
        accept: what may differ from the run that is resumed: ``("data",)`` for corrected data. ``run.json`` and the
            checkpoints record it.
        rollouts_every: steps between two steps whose sampled rows are all written to ``rollouts.jsonl``; None writes
            none.
        recording: what the run writes of its rows besides their summaries.
        alarms: rules that are evaluated after every step, and functions as such rules; see `flowrl.run.alarms`.
        costs: the folder of a run whose measured costs predict the step time; ``run.json`` then holds the predicted and
            the measured seconds. None predicts nothing.

    Raises:
        ParameterError: both or neither of `steps` and `epochs`; two validations share a name, which prefixes their
            metrics; a metric that no validation has; `resume` without `folder`; an input without a source, or a source
            without an input; a source that lacks columns of its input, or learns from scores that the graph does not
            report.
    """

    schedulable = False

    job: Job[Any]
    data: Data
    steps: int | None = Field(default=None, ge=1)
    prompts: int = Field(ge=1, kw_only=True)
    epochs: int | None = Field(default=None, ge=1, kw_only=True)
    seed: int = 0
    validation: Validation | tuple[Validation, ...] = ()
    early_stopping: EarlyStopping | None = Field(default=None, kw_only=True)
    keep_best: Best | str | None = Field(default=None, kw_only=True)
    load_best_at_end: bool = Field(default=False, kw_only=True)
    folder: str | None = Field(default=None, min_length=1)
    save_model: bool = True
    checkpoint_every: int | None = Field(default=None, ge=1)
    max_checkpoints: int = Field(default=3, ge=1)
    resume: Resume = False
    accept: tuple[Accepted, ...] = ()
    rollouts_every: int | None = Field(default=None, ge=1)
    recording: Recording = Recording()
    alarms: tuple[Rule, ...] = DEFAULT
    costs: str | None = None

    @field_validator("job", mode="before")
    @classmethod
    def _refuse_unbound(cls, job: Any) -> Any:
        if isinstance(job, Graph):
            roles = ", ".join(f"{role}=..." for role in job.roles())
            raise ValueError(f"this is a graph; pass a job: graph.bind({roles})")
        return job

    @field_validator("alarms", mode="before")
    @classmethod
    def _rules_of_functions(cls, alarms: Any) -> Any:
        """Functions as rules."""
        if not isinstance(alarms, list | tuple):
            raise ValueError("pass a tuple of rules, such as (*DEFAULT, Above('kl/ref', 1.0))")
        return tuple(Check(one) if callable(one) and not isinstance(one, Rule) else one for one in alarms)

    @field_validator("data", mode="before")
    @classmethod
    def _refuse_path(cls, data: Any) -> Any:
        return refuse_no_source(data)

    @model_validator(mode="after")
    def _refuse_unfit(self) -> Self:
        names = [validation.name for validation in self.validations]
        if (self.steps is None) == (self.epochs is None):
            given = "neither steps nor epochs" if self.steps is None else "both steps and epochs"
            raise ValueError(f"it got {given}; pass one of the two: Training(..., steps=100), or epochs=2")
        if self.early_stopping is not None:
            refuse_unknown_metric("early_stopping", self.early_stopping.metric, names)
        if self.best is not None:
            refuse_unknown_metric("keep_best", self.best.metric, names)
        if self.load_best_at_end and self.best is None:
            raise ValueError("load_best_at_end=True needs a metric; pass keep_best='val/reward/mean'")
        if self.resume and self.folder is None:
            given = f"resume={self.resume!r}"
            raise ValueError(f"{given} needs the folder of the run; pass it: Training(..., folder=...), --folder")
        if self.accept and not self.resume:
            raise ValueError(f"accept={self.accept!r} needs a run to resume; pass resume=True, --resume")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two validations are named {twice[0]!r}; rename one: Validation(..., name=...)")
        refuse_no_feedback(self.job.graph, self.sources)
        return self

    @property
    def sources(self) -> dict[str, Source]:
        """`data` by input."""
        return by_input(self.job.graph, self.data, "Training")

    @property
    def validations(self) -> tuple[Validation, ...]:
        """`validation` as a tuple."""
        return (self.validation,) if isinstance(self.validation, Validation) else self.validation

    @property
    def best(self) -> Best | None:
        """`keep_best` with its mode."""
        return Best(self.keep_best) if isinstance(self.keep_best, str) else self.keep_best

    @property
    def length(self) -> str:
        """The length as text, such as ``"100 steps"``."""
        return f"{self.epochs} epochs" if self.steps is None else f"{self.steps} steps"

    @property
    def policies(self) -> list[str]:
        """The roles whose model is written as a folder: policies and reward models that are trained."""
        found = self.job.graph.roles().items()
        trained = {role: [use for use in uses if use.mode == "writes"] for role, uses in found}
        protocols = (Trainer, RewardTrainer)
        return [role for role, uses in trained.items() if any(use.goes_through(p) for use in uses for p in protocols)]

    @property
    def whole(self) -> Job[Any]:
        """The job with the validations' own engines: what is built and placed.

        Raises:
            GraphError, PortError, BindError: a validation does not fit the graph.
        """
        graph = self.job.graph
        return dataclasses.replace(self.job, graph=with_engines(graph, held_out(graph, self.validations)))

    def refuse_unready(self) -> None:
        """Check everything that can be checked before a model loads.

        Raises:
            RuleError, BindError, GraphError, ParameterError: what `Job.refuse_unready` refuses; no model with a
                tokenizer for the data; a validation that does not fit the graph, or its data.
            DataError: a data file is missing; a state that a checkpoint cannot hold.
        """
        self.job.refuse_unready(self.prompts)
        graph = self.job.graph
        refuse_no_tokenizer(graph, self.sources)
        forks = held_out(graph, self.validations)
        for one in forks:
            one.refuse_unready()
        if self.whole.graph is not graph:
            self.whole.refuse_unready(self.prompts)
        for sources in (self.sources, *(one.sources for one in forks)):
            for source in sources.values():
                source.refuse_missing()
        if self.checkpoint_every is not None:
            refuse_no_checkpoints(graph, f"checkpoint_every={self.checkpoint_every}")
        if self.keep_best is not None:
            refuse_no_checkpoints(graph, f"keep_best={self.keep_best!r}")
        if any(rule.action == "checkpoint" for rule in self.alarms):
            refuse_no_checkpoints(graph, "an alarm with action='checkpoint'")

    def refuse_unfit_data(self) -> None:
        """Read and tokenize all data, as the run does when its models are loaded.

        Raises:
            DataError: a file or a row cannot be read, or a prompt is too long for its model.
        """
        training = sources_here(self.job.graph, self.sources, self.seed)
        for one in held_out(self.job.graph, self.validations):
            found = sources_here(one.graph, one.sources, self.seed)
            if found and training:
                found.warn_of_shared_rows(one.validation.name, training.streams)

    def pinned(self, commits: Commits) -> Self:
        """The same training with the repositories of its models and data resolved to commits.

        Raises:
            HubError: see `Job.pinned`.
        """
        validations = tuple(validation.pinned(commits) for validation in self.validations)
        return dataclasses.replace(
            self,
            job=self.job.pinned(commits),
            data=pinned_data(self.data, commits),
            validation=validations[0] if isinstance(self.validation, Validation) else validations,
        )

    def missing_here(self) -> list[str]:
        """The data sets on the Hub that are not on this machine; `flowrl check` does not download them."""
        data = [self.sources, *(one.sources for one in held_out(self.job.graph, self.validations))]
        return list(dict.fromkeys(name for each in data for source in each.values() for name in source.missing_here()))

    def run(self, reporters: Sequence[Reporter] = ()) -> Run:
        """Train.

        Raises:
            RuleError, BindError, GraphError, ParameterError: before any model is loaded; see `refuse_unready`.
            HubError: before any model is loaded, if a repository cannot be resolved or lacks files.
            DataError: before any model is loaded, if data or costs are missing or the run cannot resume from a
                checkpoint; otherwise, as all errors below, after ``run.json`` was written, which records the failure.
            NodeError: a node failed; the run folder holds all metrics until then.
            StorageError: a file cannot be written, for example because the disk is full.
        """
        refuse_bad_reporters(reporters)
        self.refuse_unready()
        commits = Commits(recorded_commits(self.folder) if self.resume else ())
        pinned = self.pinned(commits)
        if commits.record():
            pinned.refuse_unready()
        return pinned._over_run()._run(reporters, commits)

    def _over_run(self) -> Self:
        """The same training with the length of its schedules."""
        length = self.sources, self.steps, self.epochs or 1, self.prompts
        graph = over_run(self.job.graph, *length)
        return (
            self
            if graph is self.job.graph
            else dataclasses.replace(self, job=dataclasses.replace(self.job, graph=graph))
        )

    def _run(self, reporters: Sequence[Reporter], commits: Commits) -> Run:
        """`run` with all repositories resolved."""
        self.job.warn_of_no_gain()
        described = self.describe()  # now: the source of a reward function may be edited during the run
        if record := commits.record():
            described["commits"] = record
        seconds: dict[str, float] = {}
        if self.costs is not None:
            job, costs = self.job, Costs.measured(self.costs)
            seconds["predicted"] = predict(job.graph, job.place, self.prompts, costs, optimize=job.optimize).seconds
            described["step_seconds"] = seconds
        exports = self.policies if self.save_model else ()
        folder = RunFolder.create(self.folder, self.job.graph.name, self.resume, exports)
        with closing(folder), ended_in_order() as ending:
            checkpoints = Checkpoints(folder.path / CHECKPOINTS, self.max_checkpoints)
            found = None
            if self.resume:
                bindings = backends_of(self.job.graph)
                found = find(folder, checkpoints, described["identity"], bindings, self.steps, self.accept)
                described["accepted"] = accepted(found, described["identity"])
            try:
                folder.describe({"status": "running", **provenance(folder.before, found), **described})
                with self.whole.open(self.seed) as opened:
                    steps = opened.fork(Plan(self.job.runs), self.seed)
                    loop = Loop(self, steps, folder, checkpoints, reporters, described, ending)
                    described["training"]["steps"] = loop.last  # known now, if the length is in epochs
                    folder.describe({"training": described["training"]})
                    run = loop.run(found)
                if seconds and run.metrics:
                    seconds["measured"] = statistics.median(step["timing/step"] for step in run.metrics)
                folder.describe({"status": "finished", "ended": time.time(), **described})
            except BaseException as error:
                status = "failed" if isinstance(error, Exception) else "interrupted"
                with noting(error):
                    text = f"{type(error).__name__}: {error}"
                    folder.describe({"status": status, "ended": time.time(), "error": text, **described})
                raise
        return run

    def _repr_html_(self) -> str:
        default = {field.name: field.default for field in dataclasses.fields(self)}
        changed = {name: getattr(self, name) for name in default if getattr(self, name) != default[name]}
        changed.pop("job", None)
        return job_html(self.job.graph, f"{self.job.graph.name}: {self.length}", changed)

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the original: all but backends, place and length.

        Raises:
            DataError, BindError: data or weights cannot be read.
        """
        return identity_of(self.job.graph, self.sources, self.seed, self.prompts)

    def describe(self) -> dict[str, Any]:
        """The run as JSON-able data: graph with backends, data, seed, versions.

        Raises:
            GraphError: a parameter of an operator or backend is neither a plain value nor a spec.
        """
        graph = self.job.graph
        fields = [field.name for field in dataclasses.fields(self) if field.name != "job"]
        versions = {name: metadata.version(name) for name in ("flowrl", "torch", "transformers", "numpy")}
        return {
            "fingerprint": graph.fingerprint(),
            "identity": self.identity(),
            "graph": graph_to_dict(graph, portable=False),
            **{name: encode(getattr(self.job, name), name, portable=False) for name in ("place", "optimize")},
            "training": {name: encode(getattr(self, name), name, portable=False) for name in fields},
            "versions": {"python": platform.python_version(), **versions},
            "threads": torch.get_num_threads(),
        }
