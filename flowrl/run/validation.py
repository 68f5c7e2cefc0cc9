"""`Validation`: held-out prompts for a job's engines, as an edit of its graph; `Validating` runs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from flowrl.core.edit import edit
from flowrl.core.gating import gates_of
from flowrl.core.graph import Graph
from flowrl.core.plan import Plan
from flowrl.data.keys import Key
from flowrl.data.prompts import PromptData, PromptStream
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.errors import ParameterError
from flowrl.run.flight import StepResult
from flowrl.run.steps import Steps
from flowrl.run.timeline import Span
from flowrl.spec import Spec


class Validation(Spec):
    """Every few steps, and before the first, the job's engines answer held-out prompts.

    The graph of a validation is the job's own graph up to `until`, with `changes` applied. What lets only some rows
    through (`Filter`, `Collect`) is left out, so that all held-out prompts count.

    Args:
        data: the held-out prompts.
        every: steps between two validations; there is always one after the last step.
        name: metrics are logged as ``<name>/<key>``.
        changes: ``"node.parameter"`` to value; by default one greedy answer per prompt.
        until: the node that scores.
        batch: how many prompts are answered at a time.
        goal: the mean reward at which the run ends before its last step; None lets it go on. One that is reached before
            the first step ends nothing.
    """

    data: PromptData
    every: int = Field(default=10, ge=1)
    name: str = Field(default="val", min_length=1)
    changes: Mapping[str, Any] = Field(default_factory=lambda: {"repeat.n": 1, "generate.temperature": 0.0})
    until: str = "reward"
    batch: int = Field(default=256, ge=1)
    goal: float | None = Field(default=None, allow_inf_nan=False)

    def graph(self, graph: Graph) -> Graph:
        """The graph of the validation, as an edit of `graph`: without its gates, since every prompt counts.

        Raises:
            GraphError: a change names a node or parameter that is not there.
        """
        part = graph.subgraph(self.until)
        return edit(part, drop=gates_of(part), set=self.changes)

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics, of it or of another validation, reach its goal after the first step."""
        return self.goal is not None and metrics["step"] > 0 and metrics.get(self._mean, -math.inf) >= self.goal

    def refuse_goal_without(self, metrics: Mapping[str, float]) -> None:
        """Refuse a goal for a number that the validation does not report.

        Raises:
            ParameterError: there is no mean reward among its metrics.
        """
        if self.goal is not None and self._mean not in metrics:
            raise ParameterError(
                f"Validation(goal={self.goal:g}) is held against {self._mean}, but this validation reports "
                f"{', '.join(key for key in metrics if key != 'step')}; expected a Reward in the graph up to "
                f"until={self.until!r}."
            )

    @property
    def _mean(self) -> str:
        return f"{self.name}/reward/mean"


class Validated(NamedTuple):
    """What a validation found: its numbers, a record for each row, and whether its goal is reached."""

    metrics: Mapping[str, float]
    predictions: Sequence[Mapping[str, Any]]
    reached: bool


class Validating:
    """The validations of a job that is trained.

    They draw from keys of their own, the same ones every time: curves differ by the policy alone.

    Args:
        validations: which.
        steps: of the job; its engines answer.
        tokenizer: of the engine that generates.
        seed: of the run.
    """

    def __init__(self, validations: Sequence[Validation], steps: Steps, tokenizer: ChatTokenizer, seed: int) -> None:
        graph, held_out = steps.plan.graph, Key.of(seed).derive("validation").bits
        self._all = [
            (one, steps.fork(Plan(one.graph(graph)), held_out), one.data.load(tokenizer, seed)) for one in validations
        ]

    @property
    def digests(self) -> dict[str, str]:
        """Of the prompts of each, by name; see `PromptStream.digest`."""
        return {f"prompts of the validation {one.name!r}": stream.digest() for one, _, stream in self._all}

    @property
    def spans(self) -> list[Span]:
        """What they took, under their names; they run between the steps of the training."""
        return [
            dataclasses.replace(span, name=f"{one.name}/{span.name}", step=None)
            for one, steps, _ in self._all
            for span in steps.timeline.spans
        ]

    def due(self, step: int, last: bool, on_start: Callable[[str], None]) -> Iterator[Validated]:
        """Run those that are due; all of them, where these are all steps or one of them reaches its goal.

        Args:
            step: steps done.
            last: whether these are all.
            on_start: called with the name of each.
        """
        waiting = []
        for one in self._all:
            if step % one[0].every and not last:
                waiting.append(one)
                continue
            validated = self._run(step, *one, on_start)
            last = last or validated.reached
            yield validated
        yield from (self._run(step, *one, on_start) for one in waiting if last)

    def reached(self, lines: Sequence[Mapping[str, float]]) -> bool:
        """Whether a goal is among these metrics of earlier validations."""
        return any(one.reached(line) for one, *_ in self._all for line in lines)

    def _run(
        self, step: int, one: Validation, steps: Steps, stream: PromptStream, on_start: Callable[[str], None]
    ) -> Validated:
        on_start(one.name)
        steps.during = f"in the validation {one.name!r} after step {step}"
        steps.state.clear()  # so that a validation does not depend on those before it
        total: dict[str, Any] = {}
        predictions: list[dict[str, Any]] = []
        for batch in stream.batches(one.batch):
            result = steps.step(batch, 0, keep=tuple(steps.plan.graph.nodes))
            predictions += _predictions(result, step, one.name)
            for key, metric in result.metrics.items():
                total[key] = total[key].merge(metric) if key in total else metric
        metrics = {"step": step, **{f"{one.name}/{k}": m.compute() for k, m in total.items()}}
        one.refuse_goal_without(metrics)
        return Validated(metrics, predictions, one.reached(metrics))


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
