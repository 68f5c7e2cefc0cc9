"""`StepResult`: what one step left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.data.metrics import Metric, Metrics
from flowrl.data.proto.dataproto import DataProto


@dataclass(frozen=True)
class StepResult:
    """What one step left.

    Args:
        columns: the columns of the nodes that were asked for, by node; of those that ran in this step.
        values: their batchless values, by node.
        metrics: every number that was reported; a key that two nodes report is prefixed by the node.
        scores: of each node that told how groups scored, the scores by `uid`, over all rounds.
        seconds: how long each node took.
        filled: with a lag, how many batches were sampled and not yet trained on as this one was taken up to train.
    """

    columns: Mapping[str, DataProto]
    values: Mapping[str, Mapping[str, Any]]
    metrics: Metrics
    seconds: Mapping[str, float]
    scores: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    filled: int | None = None

    def under(self, names: Mapping[str, str]) -> StepResult:
        """The same, where columns of some nodes also stand under other names: by name, the node."""
        columns = {name: self.columns[node] for name, node in names.items() if node in self.columns}
        return replace(self, columns={**self.columns, **columns}) if columns else self

    def timing(self, makespan: float) -> dict[str, float]:
        """What it took, as metrics; `makespan` is how many seconds the step took as a whole."""
        timing = {f"timing/{node}": s for node, s in self.seconds.items()} | {"timing/step": makespan}
        if totals := self._reported("response_length/total"):
            timing["throughput/tokens_per_second"] = sum(totals) / makespan
        if waited := self._reported("timing/waiting"):
            timing["timing/waiting_share"] = sum(waited) / makespan
        if self.filled is not None:
            timing["queue/filled"] = float(self.filled)
        return timing

    def _reported(self, key: str) -> list[float]:
        """What the nodes reported under a key."""
        return [float(m.compute()) for name, m in self.metrics.items() if f"/{name}".endswith(f"/{key}")]


def merge_metrics(reported: Mapping[str, Metrics]) -> Metrics:
    """All nodes' metrics; a key that two nodes report is prefixed by the node."""
    merged: dict[str, Metric] = {}
    times = Counter(key for metrics in reported.values() for key in metrics)
    for node, metrics in reported.items():
        for key, metric in metrics.items():
            merged[f"{node}/{key}" if times[key] > 1 else key] = metric
    return Metrics(merged)
