"""`StepSnapshot`: what a step restarts from: the batches that were drawn, and with a lag, what older weights sampled.

A checkpoint holds those of the steps that are under way in a folder: each has the batch of each input, the columns of
each node that sampled, and what these reported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flowrl.data.files import parse_json
from flowrl.data.metrics import GroupScores, Metric, Metrics
from flowrl.data.proto.dataproto import DataProto
from flowrl.run.engine.nodes import NodeInfo, lengths_of
from flowrl.run.engine.runner import Held, Lengths, Runner

logger = logging.getLogger(__name__)

REPORTS = "reports.json"


@dataclass(frozen=True)
class NodeOutputs:
    """What a node left.

    Args:
        outputs: by output, what a column is held by, or the batchless value.
        lengths: of the rows that it wrote, where it wrote tokens.
    """

    outputs: Mapping[str, Held]
    lengths: Lengths | None


@dataclass(frozen=True)
class StepSnapshot:
    """What a step begins with.

    Args:
        batches: by input, what was drawn for it; and the further prompts of each round.
        left: by node, what was sampled for it before.
        metrics, seconds: of the nodes that were run for that.
        state: the state cells that these have changed.
    """

    batches: list[Mapping[str, DataProto]]
    left: Mapping[str, NodeOutputs] = field(default_factory=dict)
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


def save_snapshots(
    opened: Mapping[int, StepSnapshot], lag: int, infos: Mapping[str, NodeInfo], runner: Runner, folder: Path
) -> None:
    """Write what steps that are open begin with.

    Args:
        opened: by step.
        lag: with which they were sampled for.
        infos: of all nodes.
        runner: which holds the columns.
        folder: to be made; nothing is written where no step is open.

    Raises:
        DataError: a column holds objects that JSON would not give back exactly.
    """
    for step, one in opened.items():
        place = folder / str(step)
        for number, batches in enumerate(one.batches):
            for name, batch in batches.items():
                batch.save(_input(place, number, name))
        for name, left in one.left.items():
            info = infos[name]
            columns = {column: runner.fetch(info.node, column, left.outputs[column]) for column in info.columns}
            DataProto(columns).save(_node(place, name))
        metrics = {name: {key: asdict(metric) for key, metric in found.items()} for name, found in one.metrics.items()}
        drawn = [[*batches] for batches in one.batches]
        said = {"lag": lag, "inputs": drawn, "nodes": [*one.left], "metrics": metrics, "seconds": one.seconds}
        (place / REPORTS).write_text(json.dumps(said), encoding="utf-8")


def load_snapshots(folder: Path, lag: int, infos: Mapping[str, NodeInfo], runner: Runner) -> dict[int, StepSnapshot]:
    """What `save_snapshots` wrote, by step; nothing where there is no such folder.

    Args:
        folder, infos, runner: see `save_snapshots`.
        lag: with which it goes on. Where it was larger, what was sampled may be too old now: then the same rows are
            sampled for again.

    Raises:
        DataError: it is damaged.
    """
    opened: dict[int, StepSnapshot] = {}
    for place in sorted(folder.glob("*"), key=lambda place: int(place.name)):
        said = parse_json((place / REPORTS).read_bytes())
        drawn = enumerate(said["inputs"])
        batches: list[Mapping[str, DataProto]] = [
            {name: DataProto.load(_input(place, number, name)) for name in names} for number, names in drawn
        ]
        if said["lag"] != lag and not opened:
            again = "is sampled again, for the same rows" if said["lag"] > lag else "is trained on as it is"
            logger.warning(
                "%s was written with lag=%d, and the run goes on with lag=%d; what had been sampled ahead %s.",
                folder.parent,
                said["lag"],
                lag,
                again,
            )
        if said["lag"] > lag:
            opened[int(place.name)] = StepSnapshot(batches)
            continue
        left = {}
        for name in said["nodes"]:
            columns = DataProto.load(_node(place, name)).columns
            left[name] = NodeOutputs(runner.put(infos[name].node, columns), lengths_of(columns))
        metrics = {name: Metrics({k: _metric(m) for k, m in found.items()}) for name, found in said["metrics"].items()}
        opened[int(place.name)] = StepSnapshot(batches, left, metrics, said["seconds"])
    return opened


def _input(place: Path, number: int, name: str) -> Path:
    """Where the batch of an input is, of a round."""
    return place / "inputs" / str(number) / quote(name, safe="")


def _node(place: Path, name: str) -> Path:
    """Where the columns of a node are."""
    return place / "nodes" / quote(name, safe="")


def _metric(said: Mapping[str, Any]) -> Metric:
    if "scores" not in said:
        return Metric(**said)
    return GroupScores(scores={uid: tuple(scores) for uid, scores in said["scores"].items()})
