"""`StepResult`: the results of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from flowrl.data.metrics import Metrics
from flowrl.data.proto.dataproto import DataProto

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """The results of a step.

    Args:
        columns: the columns of the returned nodes that ran in this step, by node.
        metrics: all reported metrics; a key that two nodes report is prefixed with the node.
        scores: by node that reported scores of groups, the scores by `uid`, over all rounds.
        filled: with a lag, how many batches were sampled but not yet trained on when training on this one started.
        reported_by: by metric, the node that reported it.
        round_sizes: by returned node that ran in several rounds, the rows of each round.
        skipped: the gates that skipped the update of the step.
    """

    columns: Mapping[str, DataProto]
    values: Mapping[str, Mapping[str, Any]]
    metrics: Metrics
    seconds: Mapping[str, float]
    scores: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    filled: int | None = None
    reported_by: Mapping[str, str] = field(default_factory=dict)
    round_sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    skipped: Sequence[str] = ()

    def under(self, names: Mapping[str, str]) -> StepResult:
        """The same result with columns of some nodes added under other names (``{name: node}``)."""
        columns = {name: self.columns[node] for name, node in names.items() if node in self.columns}
        return replace(self, columns={**self.columns, **columns}) if columns else self

    def timing(self, makespan: float) -> dict[str, float]:
        """Timing metrics; `makespan` is the duration of the step in seconds."""
        timing = {f"timing/{node}": s for node, s in self.seconds.items()} | {"timing/step": makespan}
        if totals := self._reported("response_length/total"):
            timing["throughput/tokens_per_second"] = sum(totals) / makespan
        if waited := self._reported("timing/waiting"):
            timing["timing/waiting_share"] = sum(waited) / makespan
        if self.filled is not None:
            timing["queue/filled"] = float(self.filled)
        return timing

    def _reported(self, key: str) -> list[float]:
        """All values reported under a key."""
        return [float(m.compute()) for name, m in self.metrics.items() if f"/{name}".endswith(f"/{key}")]


def merge_metrics(reported: Mapping[str, Metrics]) -> Metrics:
    """The metrics of all nodes; a key that two nodes report is prefixed with the node."""
    rows = _by_key({node: metrics.rows for node, metrics in reported.items()})
    columns = _by_key({node: metrics.columns for node, metrics in reported.items()})
    return Metrics(_by_key(reported), rows=rows, columns=columns)


def reporting_nodes(reported: Mapping[str, Metrics]) -> dict[str, str]:
    """By key of `merge_metrics`, the node that reports it."""
    return _by_key({node: dict.fromkeys(metrics, node) for node, metrics in reported.items()})


def _by_key(reported: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """The values of all nodes; a key of two nodes is prefixed with the node."""
    times = Counter(key for values in reported.values() for key in values)
    return {
        f"{node}/{key}" if times[key] > 1 else key: value
        for node, values in reported.items()
        for key, value in values.items()
    }
