"""`Evaluation`: a model answers prompts, a reward function scores the responses, and nothing is trained."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from flowrl import references as functions
from flowrl.core.graphs.algorithm import Algorithm
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.symbols import Edge
from flowrl.data.files import noting, write
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.prompts import PromptData
from flowrl.errors import DataError
from flowrl.evaluation.estimates import Estimate, Response, as_metrics, estimates
from flowrl.files.graph_io import fingerprint, graph_to_dict
from flowrl.files.values import encode
from flowrl.hub.repositories import Commits
from flowrl.operators import Generate, Repeat, Reward
from flowrl.protocols.backend import Backend
from flowrl.records import PromptBatch
from flowrl.references import named_source_hash, source_hash
from flowrl.rewards import RewardFunction
from flowrl.run.engine.steps import Steps
from flowrl.run.placement.place import Place
from flowrl.run.training.identity import identity_of
from flowrl.run.training.job import Job
from flowrl.run.training.provenance import provenance
from flowrl.run.training.rollout_log import logged_columns, rollout_records
from flowrl.run.training.run_folder import RunFolder, jsonable, recorded_commits
from flowrl.run.training.signals import ended_in_order
from flowrl.run.training.sources import Sources
from flowrl.spec import Spec

PREDICTIONS = "predictions.jsonl"
NAME = "eval"
"""The name of the evaluation among the validations of its folder."""
_PROMPTS = "batch"
Record = Mapping[str, Any]
OnBatch = Callable[[int, int], None]
"""Called with the numbers of prompts that are done, and of all."""


class Evaluated(NamedTuple):
    """The result of an evaluation.

    Args:
        folder: holds the rows in ``predictions.jsonl``; ``flowrl rows`` and `flowrl.open` read it.
        prompts: how many.
        estimates: ``avg@<n>``, ``pass@<k>`` and ``maj@<k>``.
        truncated: the share of responses that were cut off at ``max_new_tokens``.
    """

    folder: Path
    prompts: int
    estimates: Mapping[str, Estimate]
    truncated: float

    def __str__(self) -> str:
        width = max(map(len, self.estimates))
        lines = [f"{self.folder}: {self.prompts} prompts, {self.truncated:.1%} of responses truncated"]
        return "\n".join([*lines, *(f"  {name:<{width}}  {one}" for name, one in self.estimates.items())])


class Evaluation(Spec):
    """A model answers prompts and a reward function scores the responses: ``Evaluation(engine, data, reward).run()``.

    The same engine, data, settings and seed give the same responses. A folder with a part of the same evaluation is
    continued: the responses that are there are not sampled again.

    Args:
        engine: holds the weights, such as ``TorchRollout("model", frozen=True)`` or ``VLLM("model", frozen=True)``.
        data: the prompts.
        reward: scores a response: a `Reward`, or its function.
        generate: how responses are sampled; by default greedily.
        n: responses per prompt.
        k: of pass@k and maj@k, each at most `n`.
        answer: a function from a response to the answer that it votes for in maj@k, or a reference to one; None for no
            vote. By default `RewardFunction.answer`, and without one the whole response.
        limit: evaluate only so many prompts, the first; None is all.
        batch: prompts per batch, after which their rows are written.
        seed: of the sampling.
        place: where the engine runs, on Ray; None is this process.
        folder: output folder; None is ``runs/evaluate-<number>``.

    Raises:
        ParameterError: a `k` above `n`; several responses of greedy sampling, which would be equal.
    """

    schedulable = False
    references: ClassVar[frozenset[str]] = frozenset({"answer"})

    engine: Backend
    data: PromptData
    reward: Reward
    generate: Generate = Generate(temperature=0.0)
    n: int = Field(default=1, ge=1)
    k: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    answer: Callable[[str], Any] | str | None = None
    limit: int | None = Field(default=None, ge=1)
    batch: int = Field(default=256, ge=1)
    seed: int = 0
    place: Place | None = None
    folder: str | None = Field(default=None, min_length=1)

    @field_validator("reward", mode="before")
    @classmethod
    def _reward_of_function(cls, reward: Any) -> Any:
        return reward if isinstance(reward, Reward) else Reward(reward)

    @model_validator(mode="after")
    def _refuse_unfit(self) -> Self:
        if self.k and max(self.k) > self.n:
            raise ValueError(
                f"k={max(self.k)} needs {max(self.k)} responses per prompt; pass n={max(self.k)}, or -n {max(self.k)}"
            )
        if self.n > 1 and Effect.GREEDY in self.generate.effects:
            raise ValueError(
                f"n={self.n} greedy responses are equal; pass generate=Generate(temperature=1.0), or --temperature 1"
            )
        if isinstance(self.answer, str):
            functions.check(self.answer)
        return self

    @property
    def job(self) -> Job[Graph]:
        """The graph of the evaluation, with its engine."""
        graph = Algorithm(evaluate, {}, Graph)(self.n, self.generate, self.reward)
        return Job(graph.bound({"rollout": self.engine}), self.place)

    def run(self, on_batch: OnBatch = lambda done, prompts: None) -> Evaluated:
        """Sample and score what the folder lacks, and estimate the metrics.

        Raises:
            RuleError, BindError, GraphError, ParameterError: before the model is loaded, such as an engine that is not
                frozen.
            HubError: before the model is loaded, if a repository cannot be resolved or lacks files.
            DataError: data is missing; or the folder holds another evaluation or a run.
            NodeError: sampling or scoring failed; the rows until then are in the folder.
        """
        self.job.refuse_unready()
        commits = Commits(recorded_commits(self.folder))
        pinned = dataclasses.replace(self, engine=self.engine.pinned(commits), data=self.data.pinned(commits))
        pinned.data.refuse_missing()
        described = pinned.describe() | ({"commits": record} if (record := commits.record()) else {})
        name = self.job.graph.name
        with closing(RunFolder.create(self.folder, name, "or-start")) as folder, ended_in_order():
            before = folder.before or {}
            _refuse_other(folder, described["identity"])
            kept = {key: before[key] for key in ("id", "started") if key in before}
            described |= provenance(None, None) | kept
            try:
                folder.describe({"status": "running", **described})
                rows = pinned._rows(folder, on_batch)
                found = _evaluated(folder.path, rows, self.k)
                line = {"step": 0, **as_metrics(found.estimates, NAME), f"{NAME}/truncated": found.truncated}
                line[f"{NAME}/reward/mean"] = found.estimates[f"avg@{self.n}"].mean
                write(folder.path / "metrics.jsonl", b"")
                folder.append("metrics.jsonl", [line])
                folder.describe({"status": "finished", "ended": time.time()})
            except BaseException as error:
                status = "failed" if isinstance(error, Exception) else "interrupted"
                with noting(error):
                    text = f"{type(error).__name__}: {error}"
                    folder.describe({"status": status, "ended": time.time(), "error": text})
                raise
        return found

    def describe(self) -> dict[str, Any]:
        """The evaluation as JSON-able data: graph with engine, data and settings.

        Raises:
            GraphError: a parameter is neither a plain value nor a spec.
        """
        graph, of_graph = self.job.graph, ("engine", "reward", "generate", "n")
        fields = [field.name for field in dataclasses.fields(self) if field.name not in of_graph]
        return {
            "fingerprint": fingerprint(graph),
            "identity": self.identity(),
            "graph": graph_to_dict(graph, portable=False),
            "evaluation": {name: encode(getattr(self, name), name, portable=False) for name in fields},
        }

    def identity(self) -> dict[str, Any]:
        """What a folder's rows depend on: all but the engine, the place, and what is computed from the rows.

        Raises:
            DataError, BindError: data or weights cannot be read.
        """
        found = identity_of(self.job.graph, {_PROMPTS: self.data}, self.seed, self.limit or 0)
        own = self.answer
        hashed = None if own is None else named_source_hash(own) if isinstance(own, str) else source_hash(own)
        return {**found, "limit": self.limit, "answer": hashed}

    def _rows(self, folder: RunFolder, on_batch: OnBatch) -> list[Record]:
        """The rows of all prompts: those in the folder, and the others, which are sampled."""
        folder.rewind(0)  # an interrupted write may have left half a line
        rows = {str(row["row_id"]): row for row in folder.records(PREDICTIONS)}
        if folder.before is not None and folder.before["status"] == "finished":
            return list(rows.values())
        with self.job.open(self.seed) as opened:
            steps = opened.fork(Plan(self.job.runs), self.seed)
            sources = Sources({_PROMPTS: self.data}, steps.tokenizer(), self.seed, steps.plan.graph, ())
            size = sources.streams[_PROMPTS].size
            assert size is not None  # of `PromptData`
            total = min(size, self.limit or size)
            for start, batch in self._batches(sources, total):
                if missing := [i for i, uid in enumerate(batch["uid"]) if not self._is_done(uid, rows)]:
                    found = self._sampled(steps, batch[missing])
                    new = [row for row in found if row["row_id"] not in rows]
                    folder.append(PREDICTIONS, new)
                    rows |= {row["row_id"]: row for row in new}
                on_batch(start + len(batch), total)
        return list(rows.values())

    def _batches(self, sources: Sources, total: int) -> Iterator[tuple[int, DataProto]]:
        """The number of prompts before a batch, and the batch, up to `total` prompts."""
        for number, batch in enumerate(sources.batches(self.batch)):
            start = number * self.batch
            if start >= total:
                return
            yield start, batch[_PROMPTS][: total - start]

    def _is_done(self, uid: str, rows: Mapping[str, Record]) -> bool:
        """Whether there are rows of all responses to a prompt."""
        return all(f"{uid}#{number}" in rows for number in range(self.n))

    def _sampled(self, steps: Steps, batch: DataProto) -> list[Record]:
        """The rows of a batch. Each is sampled by its own key, so it does not depend on the others."""
        result = steps.step(batch, 0, return_nodes=tuple(steps.plan.graph.nodes))
        edges = logged_columns(steps.plan.graph) | {"data_source": Edge("repeat", "data_source")}
        mask = result.columns["generate"]["response_mask"]
        found = []
        for row, tokens in zip(rollout_records(edges, result.columns), mask.sum(-1).tolist(), strict=True):
            truncated = tokens >= self.generate.max_new_tokens
            answer = self._answer(row["data_source"], row["response"])
            more = {"response_tokens": tokens, "truncated": truncated, "answer": answer}
            found.append({"step": 0, "validation": NAME, **row, **more})
        return [dict(jsonable(row)) for row in found]

    def _answer(self, data_source: str, response: str) -> Any:
        """The answer that a response votes for."""
        if self.answer is not None:
            return (functions.resolve(self.answer) if isinstance(self.answer, str) else self.answer)(response)
        fn = self.reward.fn
        return fn.answer(data_source, response) if isinstance(fn, RewardFunction) else response.strip() or None


def evaluate(batch: PromptBatch, n: int, generate: Generate, reward: Reward) -> Any:
    """The graph of an evaluation: repeat, generate, score."""
    prompts = Repeat(n)(batch)
    rollout = generate.named("generate")(prompts)
    return reward.named("reward")(rollout, prompts)


def _evaluated(folder: Path, rows: Sequence[Record], k: Sequence[int]) -> Evaluated:
    """The metrics of the rows of an evaluation."""
    groups: dict[str, list[Response]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(Response(row["score"], _vote(row["answer"])))
    truncated = sum(row["truncated"] for row in rows) / len(rows)
    return Evaluated(folder, len(groups), estimates(groups.values(), k), truncated)


def _vote(answer: Any) -> Hashable | None:
    """An answer as a vote; of one that cannot be a key, its text."""
    return answer if answer is None or isinstance(answer, str | int | float | bool) else repr(answer)


def _refuse_other(folder: RunFolder, identity: Mapping[str, Any]) -> None:
    """Refuse a folder with a run, or with an evaluation of something else."""
    if folder.before is None:
        return
    before, now = folder.before["identity"], jsonable(identity)
    changed = [key for key in now if before.get(key) != now[key]]
    if "evaluation" in folder.before and not changed:
        return
    what = f"an evaluation with another {changed[0]}" if "evaluation" in folder.before else "a run"
    raise DataError(
        f"{folder.path} holds {what}. Choose another folder (Evaluation(folder=...), --folder).",
        code="resume.other-run",
        path=folder.path,
        changed=changed,
    )
