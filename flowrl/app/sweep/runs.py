"""The runs of a trial: a run folder for each seed, which a later start of the sweep resumes or reads."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from flowrl.app.sweep.study import Trial
from flowrl.data.files import parse_json
from flowrl.errors import ParameterError, offer
from flowrl.files.graph_io import graph_to_dict
from flowrl.files.values import encode
from flowrl.run.reporting.reporter import Reporter
from flowrl.run.settings.changes import with_settings
from flowrl.run.training.run_folder import RunFolder
from flowrl.run.training.training import Training


def default_metric(training: Training) -> str:
    """The metric of a sweep that names none: the reward of the first validation, else of the training."""
    return "/".join([*[one.name for one in training.validations[:1]], "reward/mean"])


def folders(folder: Path, trial: int, seeds: int) -> list[Path]:
    """The run folders of a trial, by seed."""
    own = folder / f"trial-{trial:03d}"
    return [own] if seeds == 1 else [own / f"seed-{i}" for i in range(seeds)]


def train(training: Training, trial: Trial, folder: Path, seed: int, reporters: Sequence[Reporter]) -> None:
    """Run a trial with a seed, unless its folder holds the finished run."""
    found = with_settings(training, trial.settings) if trial.settings else training
    if status(folder) != "finished":
        dataclasses.replace(found, seed=seed, folder=str(folder), resume="or-start").run(reporters)


def status(folder: Path) -> str | None:
    """The status of the run in a folder; None without a run."""
    file = folder / "run.json"
    return str(parse_json(file.read_bytes())["status"]) if file.is_file() else None


def value_of(folder: Path, metric: str, best: bool) -> float:
    """The last value of a metric in a run; with `best` that of its best checkpoint.

    Raises:
        ParameterError: the run did not report it.
    """
    steps, validations = RunFolder(folder).lines()
    lines = sorted([*steps, *validations], key=lambda line: line["step"])
    if best:
        described: dict[str, Any] = parse_json((folder / "run.json").read_bytes())
        if (found := described.get("best")) is not None:
            return float(found["value"])
    values = [line[metric] for line in lines if metric in line and math.isfinite(line[metric])]
    if not values:
        known = sorted({key for line in lines for key in line} - {"step", "time"})
        raise ParameterError(
            f"The run {folder} reports no finite {metric!r}; {offer(metric, known, 'it reports')} Pass another "
            f"metric: --maximize METRIC, with another --folder.",
            code="sweep.no-metric",
            path=folder,
            missing=metric,
        )
    return float(values[-1])


def digest(training: Training) -> str:
    """xxh3-128 of a training's settings, but those that a sweep sets for each run."""
    names = [f.name for f in dataclasses.fields(training) if f.name not in ("job", "folder", "resume", "accept")]
    data = {name: encode(getattr(training, name), name, portable=False) for name in names}
    data |= {name: encode(getattr(training.job, name), name, portable=False) for name in ("place", "optimize")}
    data["graph"] = graph_to_dict(training.job.graph, portable=False)
    return xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())
