"""`OpenStep`: the state of a step in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.data.metrics import Metrics
from flowrl.data.now import ONLY, Round
from flowrl.data.proto.dataproto import DataProto
from flowrl.run.engine.not_finite import NotFiniteOutputs
from flowrl.run.engine.runner import Lengths, OutputHandle, TaskResult
from flowrl.run.engine.step_snapshot import NodeOutputs


@dataclass
class OpenStep:
    """A step in flight.

    Args:
        batches: for each round, the batch of each input.
        waits: by node that has not started, how many dependencies are not done.
        readers: by node, how many readers have not read it.
        earlier_rounds: for each finished round, outputs of nodes for the result.
        metrics, seconds: of the nodes that have run, over all rounds.
        finished: the nodes that are done, or do not run in this step.
        sampled: by node, the outputs that a restart of the step keeps.
        rounds: for each round of a region that is done, outputs for the result that a restart keeps; with a lag only.
        skipped: the gates that have skipped the update of the step.
        not_finite: the outputs with NaN or infinity, which an error names.
    """

    batches: list[Mapping[str, DataProto]]
    round: Round = ONLY
    waits: dict[str, int] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, Mapping[str, OutputHandle]] = field(default_factory=dict)
    earlier_rounds: list[Mapping[str, Mapping[str, OutputHandle]]] = field(default_factory=list)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    round_results: list[TaskResult] = field(default_factory=list)
    sampled: dict[str, NodeOutputs] = field(default_factory=dict)
    rounds: Sequence[Mapping[str, Mapping[str, OutputHandle]]] = ()
    state: dict[str, Any] = field(default_factory=dict)
    filled: int | None = None
    skipped: set[str] = field(default_factory=set)
    not_finite: NotFiniteOutputs = field(default_factory=NotFiniteOutputs)

    def report(self, done: TaskResult) -> None:
        """Add the metrics and duration of an instance."""
        name = done.task.node.name
        merged = Metrics(self.metrics.get(name))
        merged.merge(done.metrics)
        self.metrics[name] = merged
        self.seconds[name] = self.seconds.get(name, 0.0) + done.seconds
