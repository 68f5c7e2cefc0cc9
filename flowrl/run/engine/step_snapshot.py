"""`StepSnapshot`: what a step restarts from: its batches, and with a lag, the samples of older weights.

A checkpoint has a folder with them: the batch of each input, and the columns and metrics of each node that sampled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flowrl.data.files import parse_json
from flowrl.data.metrics import GroupScores, Metric, Metrics
from flowrl.data.proto.dataproto import DataProto
from flowrl.run.engine.nodes import NodeInfo, lengths_of
from flowrl.run.engine.runner import Lengths, OutputHandle, Runner

logger = logging.getLogger(__name__)

REPORTS = "reports.json"


@dataclass(frozen=True)
class NodeOutputs:
    """The outputs of a node."""

    outputs: Mapping[str, OutputHandle]
    lengths: Lengths | None


@dataclass(frozen=True)
class StepSnapshot:
    """What a step restarts from.

    Args:
        batches: for each round, the batch of each input.
        sampled: by node, its samples, which are not recomputed.
        rounds: for each round of a region that need not run again, its outputs for the result, by node.
        skipped: the sampled gates that have skipped the update of the step.
    """

    batches: list[Mapping[str, DataProto]]
    sampled: Mapping[str, NodeOutputs] = field(default_factory=dict)
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    rounds: Sequence[Mapping[str, Mapping[str, OutputHandle]]] = ()
    skipped: frozenset[str] = frozenset()


def save_snapshots(
    snapshots: Mapping[int, StepSnapshot], lag: int, infos: Mapping[str, NodeInfo], runner: Runner, folder: Path
) -> None:
    """Write the snapshots of open steps, sampled with `lag`, to `folder`, which is created if there are any."""
    for step, one in snapshots.items():
        place = folder / str(step)
        for number, batches in enumerate(one.batches):
            for name, batch in batches.items():
                batch.save(_input(place, number, name))
        for name, node in one.sampled.items():
            info = infos[name]
            columns = {column: runner.fetch(info.node, column, node.outputs[column]) for column in info.columns}
            DataProto(columns).save(_node(place, name))
        for number, nodes in enumerate(one.rounds):
            for name, outputs in nodes.items():
                some = {c: runner.fetch(infos[name].node, c, outputs[c]) for c in infos[name].columns if c in outputs}
                DataProto(some).save(_round(place, number, name))
        metrics = {name: {key: asdict(metric) for key, metric in found.items()} for name, found in one.metrics.items()}
        inputs = [[*batches] for batches in one.batches]
        written = {"lag": lag, "inputs": inputs, "nodes": [*one.sampled], "metrics": metrics, "seconds": one.seconds}
        written["skipped"] = sorted(one.skipped)
        written["rounds"] = [[*nodes] for nodes in one.rounds]
        written["rows"] = {name: found.rows for name, found in one.metrics.items()}
        (place / REPORTS).write_text(json.dumps(written), encoding="utf-8")


def load_snapshots(folder: Path, lag: int, infos: Mapping[str, NodeInfo], runner: Runner) -> dict[int, StepSnapshot]:
    """What `save_snapshots` wrote, by step; empty if there is no such folder.

    Args:
        lag: of the resumed run. If it is smaller than before, samples may be too stale, and the same rows are
            sampled again.
    """
    snapshots: dict[int, StepSnapshot] = {}
    for place in sorted(folder.glob("*"), key=lambda place: int(place.name)):
        saved = parse_json((place / REPORTS).read_bytes())
        batches: list[Mapping[str, DataProto]] = [
            {name: DataProto.load(_input(place, number, name)) for name in names}
            for number, names in enumerate(saved["inputs"])
        ]
        if saved["lag"] != lag and not snapshots:
            logger.warning(
                "%s was written with lag=%d, and the run resumes with lag=%d. The rows that were sampled ahead are %s.",
                folder.parent,
                saved["lag"],
                lag,
                "sampled again" if saved["lag"] > lag else "trained on unchanged",
            )
        if saved["lag"] > lag:
            snapshots[int(place.name)] = StepSnapshot(batches)
            continue
        sampled = {}
        for name in saved["nodes"]:
            columns = DataProto.load(_node(place, name)).columns
            sampled[name] = NodeOutputs(runner.put(infos[name].node, columns), lengths_of(columns))
        rounds = [
            {name: runner.put(infos[name].node, DataProto.load(_round(place, number, name)).columns) for name in names}
            for number, names in enumerate(saved.get("rounds", ()))
        ]
        rows = saved.get("rows", {})
        metrics = {
            name: Metrics({k: _metric(m) for k, m in found.items()}, rows=rows.get(name))
            for name, found in saved["metrics"].items()
        }
        skipped = frozenset(saved.get("skipped", ()))
        parts = batches, sampled, metrics, saved["seconds"]
        snapshots[int(place.name)] = StepSnapshot(*parts, rounds=rounds, skipped=skipped)
    return snapshots


def _input(place: Path, number: int, name: str) -> Path:
    """The folder of an input's batch in a round."""
    return place / "inputs" / str(number) / quote(name, safe="")


def _round(place: Path, number: int, name: str) -> Path:
    """The folder of a node's columns in a round."""
    return place / "rounds" / str(number) / quote(name, safe="")


def _node(place: Path, name: str) -> Path:
    """The folder of a node's columns."""
    return place / "nodes" / quote(name, safe="")


def _metric(saved: Mapping[str, Any]) -> Metric:
    if "scores" not in saved:
        return Metric(**saved)
    return GroupScores(scores={uid: tuple(scores) for uid, scores in saved["scores"].items()})
