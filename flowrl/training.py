"""`Training`: a job, its data, and how long to run it; what it leaves is a run folder."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from pydantic import Field, model_validator

import flowrl
from flowrl.data import PromptData, PromptStream
from flowrl.engines import Rollout, Trainer
from flowrl.errors import BindError, GraphError, ParameterError
from flowrl.executor import LocalExecutor, StepResult
from flowrl.graph import Graph
from flowrl.job import Job
from flowrl.keys import Key
from flowrl.plan import Plan
from flowrl.records import PromptBatch
from flowrl.serial import encode, graph_to_dict
from flowrl.session import Session
from flowrl.spec import Spec


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


class Validation(Spec):
    """Every so many steps, and before the first, the job's engines answer held-out prompts.

    The graph of a validation is the job's own up to `until`, with `changes` made to it.

    Args:
        data: the held-out prompts.
        every: steps between two validations; the last step is always followed by one.
        name: metrics are logged as ``<name>/<key>``.
        changes: ``"node.parameter"`` to value; by default one greedy answer a prompt.
        until: the node that scores.
        batch: prompts at a time.
    """

    data: PromptData
    every: int = Field(default=10, ge=1)
    name: str = "val"
    changes: Mapping[str, Any] = Field(default_factory=lambda: {"repeat.n": 1, "generate.temperature": 0.0})
    until: str = "reward"
    batch: int = Field(default=256, ge=1)

    def graph(self, graph: Graph) -> Graph:
        """The graph of the validation, as an edit of `graph`.

        Raises:
            GraphError: a change names a node or parameter that is not there.
        """
        scoring = graph.subgraph(self.until)
        operators: dict[str, Any] = {}
        for path, value in self.changes.items():
            node, _, parameter = path.partition(".")
            if node not in scoring:
                raise GraphError(
                    f"the validation {self.name!r} changes {path!r}, but {graph.name} has only the nodes "
                    f"{', '.join(scoring.nodes)} up to {self.until!r}; say what to change: Validation(..., changes={{...}})."
                )
            operator = operators.get(node, scoring[node].operator)
            known = [field.name for field in dataclasses.fields(operator)]
            if parameter not in known:
                raise GraphError(
                    f"the validation {self.name!r} changes {path!r}, but {node} has only the parameters "
                    f"{', '.join(known)}; write changes={{'{node}.{known[0] if known else 'parameter'}': ...}}."
                )
            operators[node] = dataclasses.replace(operator, **{parameter: value}).named(node)
        return scoring.edit(replace=operators, name=self.name)


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

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [validation.name for validation in self.validations]
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
            Plan(validation.graph(graph))

    def run(self, reporters: Sequence[Reporter] = ()) -> Run:
        """Train.

        Raises:
            RuleError, BindError, GraphError, ParameterError: before any model is loaded; see `refuse_unready`.
            DataError: the prompts cannot be read; as everything below, after ``run.json`` was written, which says so.
            NodeError: a node failed; the run folder holds all that was measured until then.
        """
        self.refuse_unready()
        folder = RunFolder.create(self.folder, self.job.graph.name)
        folder.describe(self, status="running")
        try:
            run = _Loop(self, folder, reporters).run()
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            folder.describe(self, status=status, error=f"{type(error).__name__}: {error}")
            raise
        folder.describe(self, status="finished")
        return run


def _generator(graph: Graph) -> str | None:
    """The first role that the graph generates with."""
    return next(
        (r for r, uses in graph.roles().items() for u in uses if (u.protocol, u.mode) == (Rollout, "reads")), None
    )


class _Loop:
    """The state of a run while it goes."""

    def __init__(self, training: Training, folder: RunFolder, reporters: Sequence[Reporter]) -> None:
        self.training, self.folder, self.reporters = training, folder, reporters
        graph = training.job.graph
        engines = training.job.build(training.seed)
        self.session = Session(engines, training.seed)
        self.executor = LocalExecutor(Plan(graph), self.session)
        tokenizer = engines[str(_generator(graph))].tokenizer
        self.stream = training.data.load(tokenizer, training.seed)
        # Validations draw from keys of their own, the same ones every time: curves differ by the policy alone.
        held_out = Session(engines, Key.of(training.seed).derive("validation").bits)
        self.validations: list[tuple[Validation, LocalExecutor, PromptStream]] = [
            (v, LocalExecutor(Plan(v.graph(graph)), held_out), v.data.load(tokenizer, training.seed))
            for v in training.validations
        ]
        self.metrics: list[Mapping[str, float]] = []
        self.validated: list[Mapping[str, float]] = []

    def run(self) -> Run:
        with ExitStack() as ends:
            for reporter in self.reporters:
                reporter.start(self.training.job.graph.name, self.training.steps, self.folder.path)
                ends.callback(reporter.end)
            self.executor.sync()
            self._validate(0)
            for step in range(self.training.steps):
                self._step(step)
                self._validate(step + 1)
        if self.training.save_model:
            for role, engine in self.session.engines.items():
                if isinstance(engine, Trainer):
                    engine.save_pretrained(str(self.folder.path / role))
        return Run(self.folder.path, self.metrics, self.validated, self.session.engines)

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


class RunFolder:
    """The folder of a run: ``run.json`` (what ran), ``metrics.jsonl``, ``predictions.jsonl``, the trained weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(folder: str | None, name: str) -> RunFolder:
        """A new folder.

        Raises:
            ParameterError: `folder` already holds a run.
        """
        if folder is not None:
            path = Path(folder).expanduser()
            if (path / "run.json").exists():
                raise ParameterError(f"{path} already holds a run; choose another folder, or remove that one first.")
            path.mkdir(parents=True, exist_ok=True)
            return RunFolder(path)
        number = 1
        while True:
            path = Path("runs") / f"{name}-{number:03d}"
            try:
                path.mkdir(parents=True)
                return RunFolder(path)
            except FileExistsError:
                number += 1

    def describe(self, training: Training, status: str, error: str | None = None) -> None:
        """Write ``run.json``: graph, binding, data, seed and versions, and how the run stands."""
        graph = training.job.graph
        parameters = {
            f.name: encode(getattr(training, f.name), f.name, portable=False)
            for f in dataclasses.fields(training)
            if f.name != "job"
        }
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
        described = {
            "status": status,
            **({"error": error} if error is not None else {}),
            "fingerprint": graph.fingerprint(),
            "graph": graph_to_dict(graph, portable=False),
            "training": parameters,
            "versions": {"flowrl": flowrl.__version__, "python": platform.python_version(), **versions},
            "threads": torch.get_num_threads(),
        }
        partial = self.path / "run.json.partial"
        partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / "run.json")

    def append(self, file: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to a JSONL file; NaN and infinity are written as null, and what JSON does not know as text."""
        with (self.path / file).open("a", encoding="utf-8") as lines:
            for record in records:
                lines.write(json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
