"""`Training`: a job, its data, and how long to run it; what it leaves is a run folder."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from pydantic import Field, model_validator

import flowrl
from flowrl.checkpoint import Checkpoints
from flowrl.data import PromptData, PromptStream
from flowrl.engines import Rollout, Trainer
from flowrl.errors import BindError, DataError, GraphError
from flowrl.executor import Executor, LocalExecutor, StepResult
from flowrl.graph import Graph
from flowrl.job import Job
from flowrl.keys import Key
from flowrl.plan import Plan
from flowrl.records import PromptBatch
from flowrl.run_folder import RunFolder
from flowrl.serial import encode, graph_to_dict
from flowrl.spec import Spec
from flowrl.validation import Validation


class Reporter(Protocol):
    """Who is told how a run goes. `end` is called once for every `start` that returned, however the run ends."""

    def start(self, name: str, steps: int, folder: Path) -> None:
        """The run begins: the graph's name, the number of steps, the run folder."""
        ...

    def node(self, name: str) -> None:
        """This node, or this validation, runs now."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """So many steps are done; the numbers of the last one."""
        ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """What a validation after so many steps found."""
        ...

    def end(self) -> None:
        """The run is over, or has failed."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """What a finished run left: its folder, the metrics of every step and validation, and the live engines."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]
    validations: Sequence[Mapping[str, float]]
    engines: Mapping[str, Any]


class Training(Spec):
    """A job that is to be trained: ``Training(job, data, steps=100, prompts=32).run()``.

    Args:
        job: the bound graph.
        data: prompts to train on.
        steps: how many steps.
        prompts: prompts a step; rows are prompts times what the graph repeats them by.
        seed: root of all randomness: data order, sampling, mini-batches.
        validation: one or several.
        folder: where the run is written; None is ``runs/<graph>-<number>``.
        save_model: write each trained policy to ``<folder>/<role>`` at the end.
        checkpoint_every: steps between two checkpoints, in ``<folder>/checkpoints``; None writes none.
        keep: how many checkpoints are kept.
        resume: go on from the newest whole checkpoint in `folder`; where there is none, start.

    Raises:
        ParameterError: two validations share a name, under which their numbers are logged.
    """

    job: Job
    data: PromptData
    steps: int = Field(ge=1)
    prompts: int = Field(ge=1)
    seed: int = 0
    validation: Validation | tuple[Validation, ...] = ()
    folder: str | None = None
    save_model: bool = True
    checkpoint_every: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=1)
    resume: bool = False

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [validation.name for validation in self.validations]
        if self.resume and self.folder is None:
            raise ValueError("resume=True, but no folder says which run; name it: Training(..., folder=...)")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two validations are named {twice[0]!r}; give one another: Validation(..., name=...)")
        return self

    @property
    def validations(self) -> tuple[Validation, ...]:
        """`validation` as a tuple."""
        return (self.validation,) if isinstance(self.validation, Validation) else self.validation

    def refuse_unready(self) -> None:
        """Everything that can be refused before a model loads.

        Raises:
            RuleError, BindError, GraphError: what `Job.refuse_unready` refuses; an input that prompts cannot feed; no
                engine that could tokenise prompts; a validation that does not fit the graph.
        """
        self.job.refuse_unready(self.prompts)
        graph = self.job.graph
        for name in graph.inputs:
            if missing := [c for c in graph[name].operator.signature.outputs if c not in PromptBatch._fields]:
                raise GraphError(
                    f"the input {name!r} of {graph.name} wants the columns {', '.join(missing)}, which prompts do not "
                    f"have; Training feeds {', '.join(PromptBatch._fields)}: compute the others in the graph, or walk "
                    f"it by LocalExecutor(...).step(batch, step)."
                )
        if _generator(graph) is None:
            raise BindError(
                f"no node of {graph.name} reads a rollout engine, and it is its tokeniser that prompts become tokens "
                f"by; expected a Generate()(prompts) in the graph."
            )
        for validation in self.validations:
            _ = Plan(validation.graph(graph)).order

    def run(self, reporters: Sequence[Reporter] = ()) -> Run:
        """Train.

        Raises:
            RuleError, BindError, GraphError, ParameterError: before any model is loaded; see `refuse_unready`.
            DataError: the prompts cannot be read; as everything below, after ``run.json`` was written, which says so.
            NodeError: a node failed; the run folder holds all that was measured until then.
        """
        self.refuse_unready()
        described = self.describe()  # now: the source of a reward function may be edited while the run goes
        folder = RunFolder.create(self.folder, self.job.graph.name, self.resume)
        folder.describe({"status": "running", **described})
        try:
            with self.job.open(self.seed) as executor:
                run = _Loop(self, executor, folder, reporters).run()
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            folder.describe({"status": status, "error": f"{type(error).__name__}: {error}", **described})
            raise
        folder.describe({"status": "finished", **described})
        return run

    def describe(self) -> dict[str, Any]:
        """What would run, as JSON-able data: graph with backends, data, seed, versions.

        Raises:
            GraphError: a parameter of an operator or backend is neither a plain value nor a spec.
        """
        graph = self.job.graph
        fields = [field.name for field in dataclasses.fields(self) if field.name != "job"]
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
        return {
            "fingerprint": graph.fingerprint(),
            "graph": graph_to_dict(graph, portable=False),
            "training": {name: encode(getattr(self, name), name, portable=False) for name in fields},
            "versions": {"flowrl": flowrl.__version__, "python": platform.python_version(), **versions},
            "threads": torch.get_num_threads(),
        }


def _generator(graph: Graph) -> str | None:
    """The first role that the graph generates with."""
    return next(
        (r for r, uses in graph.roles().items() for u in uses if (u.protocol, u.mode) == (Rollout, "reads")), None
    )


class _Loop:
    """The state of a run while it goes."""

    def __init__(
        self, training: Training, executor: Executor, folder: RunFolder, reporters: Sequence[Reporter]
    ) -> None:
        self.training, self.executor, self.folder, self.reporters = training, executor, folder, reporters
        graph, tokenizer = training.job.graph, executor.tokenizer()
        self.stream = training.data.load(tokenizer, training.seed)
        # Validations draw from keys of their own, the same ones every time: curves differ by the policy alone.
        held_out = Key.of(training.seed).derive("validation").bits
        self.validations: list[tuple[Validation, Executor, PromptStream]] = [
            (v, executor.fork(Plan(v.graph(graph)), held_out), v.data.load(tokenizer, training.seed))
            for v in training.validations
        ]
        self.checkpoints = Checkpoints(folder.path / "checkpoints", training.keep)
        self.metrics: list[Mapping[str, float]] = []
        self.validated: list[Mapping[str, float]] = []

    def run(self) -> Run:
        with ExitStack() as ends:
            for reporter in self.reporters:
                reporter.start(self.training.job.graph.name, self.training.steps, self.folder.path)
                ends.callback(reporter.end)
            done = self._resume() if self.training.resume else 0
            if not done:
                self.executor.sync()
                self._validate(0)
            for step in range(done, self.training.steps):
                self._step(step)
                self._validate(step + 1)
                self._checkpoint(step + 1)
        if self.training.save_model:
            for role, uses in self.training.job.graph.roles().items():
                if any((use.protocol, use.mode) == (Trainer, "writes") for use in uses):
                    self.executor.save_pretrained(role, str(self.folder.path / role))
        self.executor.trace.save(self.folder.path / "trace.json")
        engines = self.executor.session.engines if isinstance(self.executor, LocalExecutor) else {}
        return Run(self.folder.path, self.metrics, self.validated, engines)

    def _checkpoint(self, step: int) -> None:
        every = self.training.checkpoint_every
        if every is None or (step % every and step != self.training.steps):
            return
        state = {
            "data": self.stream.position,
            "state": self.executor.state,
            "fingerprint": self.training.job.graph.fingerprint(),
            "seed": self.training.seed,
            "prompts": self.training.prompts,
        }
        self.checkpoints.save(step, state, self.executor.save)

    def _resume(self) -> int:
        """Go back to the newest whole checkpoint; returns the steps that it stands after, 0 where there is none.

        Raises:
            DataError: the checkpoint is of another graph, seed or number of prompts.
        """
        found = self.checkpoints.latest()
        if found is None:
            return 0
        path, state = found
        now = {
            "fingerprint": self.training.job.graph.fingerprint(),
            "seed": self.training.seed,
            "prompts": self.training.prompts,
        }
        if other := [key for key, value in now.items() if state[key] != value]:
            raise DataError(
                f"{path} is of a run with another {other[0]} ({state[other[0]]!r}, and this one has {now[other[0]]!r}); resume "
                f"with what it was made with, or name another folder."
            )
        self.executor.state.update(state["state"])
        self.stream.seek(state["data"])
        self.executor.load(path)
        done = int(state["step"])
        self.metrics, self.validated = self.folder.rewind(done)
        return done

    def _step(self, step: int) -> None:
        batch = self.stream.next(self.training.prompts)
        started = time.perf_counter()
        result = self.executor.step(batch, step, on_node=self._tell_node)
        seconds = time.perf_counter() - started
        metrics = {"step": step + 1, **result.metrics.compute(), **_timing(result, seconds)}
        self.metrics.append(metrics)
        self.folder.append("metrics.jsonl", [metrics])
        for reporter in self.reporters:
            reporter.step(step + 1, metrics)

    def _validate(self, step: int) -> None:
        for validation, executor, stream in self.validations:
            if step % validation.every and step != self.training.steps:
                continue
            self._tell_node(validation.name)
            total: dict[str, Any] = {}
            predictions: list[dict[str, Any]] = []
            for batch in stream.batches(validation.batch):
                result = executor.step(batch, 0, keep=tuple(executor.plan.graph.nodes))
                predictions += _predictions(result, step, validation.name)
                for key, metric in result.metrics.items():
                    total[key] = total[key].merge(metric) if key in total else metric
            metrics = {"step": step, **{f"{validation.name}/{key}": m.compute() for key, m in total.items()}}
            self.validated.append(metrics)
            self.folder.append("metrics.jsonl", [metrics])
            self.folder.append("predictions.jsonl", predictions)
            for reporter in self.reporters:
                reporter.validation(step, metrics)

    def _tell_node(self, name: str) -> None:
        for reporter in self.reporters:
            reporter.node(name)


def _timing(result: StepResult, seconds: float) -> dict[str, float]:
    timing = {f"timing/{node}": s for node, s in result.seconds.items()} | {"timing/step": seconds}
    tokens = result.metrics.get("response_length/total")
    return timing | ({"throughput/tokens_per_second": tokens.compute() / seconds} if tokens is not None else {})


def _predictions(result: StepResult, step: int, name: str) -> list[dict[str, Any]]:
    """One record a row of a validation: the prompt, the answer, and what it was worth."""
    columns = {name: column for proto in result.columns.values() for name, column in proto.columns.items()}
    scores = columns["token_level_scores"].sum(-1).tolist() if "token_level_scores" in columns else None
    records = []
    for row, answer in enumerate(columns["response_text"]):
        record = {"step": step, "validation": name, "uid": columns["uid"][row], "prompt": columns["raw_prompt"][row]}
        record |= {"response": answer, "ground_truth": columns["ground_truth"][row]}
        records.append(record | ({"score": scores[row]} if scores is not None else {}))
    return records
