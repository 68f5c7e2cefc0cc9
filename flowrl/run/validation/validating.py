"""`Validating`: runs the validations of a training when they are due."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.core.graphs.plan import Plan
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Span
from flowrl.run.training.rollout_log import logged_columns, rollout_records
from flowrl.run.training.sources import Sources
from flowrl.run.validation.held_out import HeldOut


@dataclass(frozen=True)
class _Ready:
    """A validation, its steps, and its prompts."""

    held_out: HeldOut
    steps: Steps
    sources: Sources

    @property
    def name(self) -> str:
        return self.held_out.validation.name


class Validated(NamedTuple):
    """The result of a validation: its metrics, a record for each row, and whether it reached its goal."""

    metrics: Mapping[str, float]
    predictions: Sequence[Mapping[str, Any]]
    reached: bool


class Validating:
    """The validations of a training.

    They sample with their own random keys, the same every time, so that curves differ by the policy alone.
    """

    def __init__(self, held_out: Sequence[HeldOut], steps: Steps, tokenizer: ChatTokenizer | None, seed: int) -> None:
        own_seed = Key.of(seed).derive("validation").bits
        self._training = steps
        self._all = [
            _Ready(one, steps.fork(Plan(one.graph), own_seed), Sources(one.sources, tokenizer, seed, one.graph, ()))
            for one in held_out
        ]

    def warn_of_shared_rows(self, training: Sources) -> None:
        """Warn of validations whose prompts are trained on."""
        for one in self._all:
            one.sources.warn_of_shared_rows(one.name, training.streams)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each validation's prompts, by name; see `PromptStream.digest`."""
        return {
            f"{what} of the validation {one.name!r}": digest
            for one in self._all
            for what, digest in one.sources.digests.items()
        }

    @property
    def spans(self) -> list[Span]:
        """The timeline of each, prefixed with its name; they run between the steps of the training."""
        return [
            dataclasses.replace(span, name=f"{one.name}/{span.name}", step=None)
            for one in self._all
            for span in one.steps.timeline.spans
        ]

    def due(self, step: int, last: Callable[[], bool], on_start: Callable[[str], None]) -> Iterator[Validated]:
        """Run the validations that are due; all of them after the last step, which a validation may decide."""
        waiting = []
        for one in self._all:
            if step % one.held_out.validation.every and not last():
                waiting.append(one)
            else:
                yield self._run(step, one, on_start)
        yield from (self._run(step, one, on_start) for one in waiting if last())

    def reached(self, lines: Sequence[Mapping[str, float]]) -> bool:
        """Whether these metrics of earlier validations reach a goal."""
        return any(one.held_out.validation.reached(line) for one in self._all for line in lines)

    def _run(self, step: int, one: _Ready, on_start: Callable[[str], None]) -> Validated:
        validation, steps = one.held_out.validation, one.steps
        on_start(one.name)
        self._training.drain()
        steps.during = f"in the validation {one.name!r} after step {step}"
        steps.state.clear()  # so that a validation does not depend on those before it
        if one.held_out.syncs:
            steps.sync(one.held_out.syncs)
        total: dict[str, Any] = {}
        predictions: list[dict[str, Any]] = []
        edges = logged_columns(steps.plan.graph)
        for batch in one.sources.batches(validation.batch):
            result = steps.step(batch, 0, now=step, return_nodes=tuple(steps.plan.graph.nodes))
            predictions += [
                {"step": step, "validation": one.name, **row} for row in rollout_records(edges, result.columns)
            ]
            for key, metric in result.metrics.items():
                total[key] = total[key].merge(metric) if key in total else metric
        metrics = {"step": step, **{f"{one.name}/{k}": m.compute() for k, m in total.items()}}
        validation.refuse_goal_without(metrics)
        return Validated(metrics, predictions, validation.reached(metrics))
