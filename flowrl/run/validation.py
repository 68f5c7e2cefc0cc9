"""`Validation`: held-out prompts for a job's engines, as an edit of its graph; `Validating` runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from flowrl.core.edit import edit
from flowrl.core.graph import Graph
from flowrl.core.plan import Plan
from flowrl.data.keys import Key
from flowrl.data.prompts import PromptData
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.run.steps import StepResult, Steps
from flowrl.run.timeline import Span
from flowrl.spec import Spec


class Validation(Spec):
    """Every few steps, and before the first, the job's engines answer held-out prompts.

    The graph of a validation is the job's own graph up to `until`, with `changes` applied.

    Args:
        data: the held-out prompts.
        every: steps between two validations; there is always one after the last step.
        name: metrics are logged as ``<name>/<key>``.
        changes: ``"node.parameter"`` to value; by default one greedy answer per prompt.
        until: the node that scores.
        batch: how many prompts are answered at a time.
    """

    data: PromptData
    every: int = Field(default=10, ge=1)
    name: str = Field(default="val", min_length=1)
    changes: Mapping[str, Any] = Field(default_factory=lambda: {"repeat.n": 1, "generate.temperature": 0.0})
    until: str = "reward"
    batch: int = Field(default=256, ge=1)

    def graph(self, graph: Graph) -> Graph:
        """The graph of the validation, as an edit of `graph`.

        Raises:
            GraphError: a change names a node or parameter that is not there.
        """
        return edit(graph.subgraph(self.until), set=self.changes, name=self.name)


class Validated(NamedTuple):
    """What a validation found: its numbers, and a record for each row."""

    metrics: Mapping[str, float]
    predictions: Sequence[Mapping[str, Any]]


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
        """What they took, under their names."""
        return [
            dataclasses.replace(span, name=f"{one.name}/{span.name}")
            for one, steps, _ in self._all
            for span in steps.timeline.spans
        ]

    def due(self, step: int, last: bool, on_start: Callable[[str], None]) -> Iterator[Validated]:
        """Run those that are due.

        Args:
            step: steps done.
            last: whether these are all.
            on_start: called with the name of each.
        """
        for one, steps, stream in self._all:
            if step % one.every and not last:
                continue
            on_start(one.name)
            steps.state.clear()  # so that a validation does not depend on those before it
            total: dict[str, Any] = {}
            predictions: list[dict[str, Any]] = []
            for batch in stream.batches(one.batch):
                result = steps.step(batch, 0, keep=tuple(steps.plan.graph.nodes))
                predictions += _predictions(result, step, one.name)
                for key, metric in result.metrics.items():
                    total[key] = total[key].merge(metric) if key in total else metric
            yield Validated({"step": step, **{f"{one.name}/{k}": m.compute() for k, m in total.items()}}, predictions)


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
