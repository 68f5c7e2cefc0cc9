"""What each tracker holds, read independently of the reporters: by run, the steps of each metric."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Held = dict[str, dict[str, list[int]]]
"""By run: by metric, its steps in the order in which they were written."""

METRICS = ("reward/mean", "kl/ref", "val/reward/mean")


def tensorboard(folder: Path) -> Held:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found = {key: [event.step for event in events.Scalars(key)] for key in METRICS}
    texts = {"rows": "rows/text_summary", "alarms": "alarms/KL/text_summary"}
    written = {key: tag for key, tag in texts.items() if tag in events.Tags()["tensors"]}
    return {"": found | {key: [event.step for event in events.Tensors(tag)] for key, tag in written.items()}}


def mlflow(uri: str, experiment: str) -> Held:
    from mlflow import MlflowClient

    client, found = MlflowClient(uri), {}
    for run in client.search_runs([client.get_experiment_by_name(experiment).experiment_id]):
        name = run.info.run_id
        found[name] = {key: [metric.step for metric in client.get_metric_history(name, key)] for key in METRICS}
        files = [Path(file.path).stem for file in client.list_artifacts(name, "rows")]
        found[name]["rows"] = [int(file.removeprefix("step-")) for file in sorted(files)]
        if "alarm.KL" in run.data.tags:
            found[name]["alarms"] = [_step(run.data.tags["alarm.KL"])]
    return found


def trackio(project: str) -> Held:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    found = {}
    for run in Api().runs(project):
        found[run.id] = _steps(SQLiteStorage.get_logs(project, run.name))
        if alerts := run.alerts():
            found[run.id]["alarms"] = [alert["step"] for alert in alerts]
    return found


def wandb(folder: Path) -> Held:
    """Of all offline runs in a run folder; W&B syncs those of one id to one run."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        found[path.stem.removeprefix("run-")] += _history(path)
    return {run: _steps(rows) for run, rows in found.items()}


def _steps(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        for key in {*METRICS, "rows", "alarms"} & row.keys():
            found[key].append(row["step"])
    return dict(found)


def _step(text: str) -> int:
    """The step at the start of an alarm's text."""
    return int(text.removeprefix("step ").partition(":")[0])


def _history(path: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for record in _records(path.read_bytes()):
        message = Record()
        message.ParseFromString(record)
        if message.WhichOneof("record_type") == "alert":
            rows.append({"alarms": message.alert.title, "step": _step(message.alert.text)})
        if message.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in message.history.item}
            rows.append({key.partition(".")[0]: value for key, value in row.items()})
    return rows


def _records(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after W&B's header: blocks of 32 KiB, in which a record may be in parts."""
    at, record, block = 7, b"", 1 << 15
    while at + 7 <= len(log):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", log[at : at + 7])
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
