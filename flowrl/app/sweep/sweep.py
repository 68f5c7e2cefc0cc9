"""`Sweep`: its trials one after another, their table and their picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from flowrl.app.printing import number, print_json, print_table
from flowrl.app.run import complain, ended
from flowrl.app.sweep import runs
from flowrl.app.sweep.axes import Axis, grid
from flowrl.app.sweep.study import Study, Trial
from flowrl.data.files import write
from flowrl.draw.trials import Point, svg
from flowrl.errors import AlarmError, NodeError
from flowrl.report.terminal import Terminal
from flowrl.run.reporting.reporter import Reporter
from flowrl.run.settings.changes import with_settings
from flowrl.run.training.lock import FolderLock
from flowrl.run.training.signals import Ended
from flowrl.run.training.training import Training

PICTURE = "sweep.svg"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep: its training, what varies, and what its trials are compared by."""

    training: Training
    axes: Sequence[Axis]
    seeds: int
    metric: str
    maximize: bool
    folder: Path

    @property
    def is_best(self) -> bool:
        """Whether the value of a run is that of its best checkpoint."""
        return self.training.best is not None and self.training.best.metric == self.metric

    def described(self) -> dict[str, Any]:
        """What a sweep that continues must share."""
        axes = {axis.path: [type(axis).__name__, *axis.texts] for axis in self.axes}
        compared = {"metric": self.metric, "maximize": self.maximize, "seeds": self.seeds}
        return {"settings": axes, **compared, "training": runs.digest(self.training)}


def run(sweep: Sweep, trials: int | None, out: Console, as_json: bool) -> bool:
    """Run all trials that are not finished, and show the results; whether none failed."""
    for point in grid(sweep.axes) or [{axis.path: axis.texts[0] for axis in sweep.axes}]:
        (with_settings(sweep.training, point) if point else sweep.training).refuse_unready()
    sweep.folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(sweep.folder)
    try:
        study = Study(sweep.folder, sweep.axes, trials, sweep.maximize, sweep.training.seed, sweep.described())
        for trial in study.pending():
            if not as_json:
                out.print(f"\ntrial {trial.number} of {study.total}: {_named(trial)}", markup=False)
            _train(sweep, study, trial, [] if as_json else [Terminal(out)])
        return _show(sweep, study.trials(), out, as_json)
    except (KeyboardInterrupt, Ended) as error:
        what, code = ended(error)
        complain(f"{what}; the same command continues the sweep in {sweep.folder}.")
        raise typer.Exit(code) from None
    finally:
        lock.release()


def _train(sweep: Sweep, study: Study, trial: Trial, reporters: Sequence[Reporter]) -> None:
    """Run a trial with each seed; it fails if a node fails, or an alarm stops it."""
    values = []
    for i, folder in enumerate(runs.folders(sweep.folder, trial.number, sweep.seeds)):
        try:
            runs.train(sweep.training, trial, folder, sweep.training.seed + i, reporters)
        except (NodeError, AlarmError) as error:
            complain(f"trial {trial.number} failed in {folder}: {error}")
            study.fail(trial)
            return
        values.append(runs.value_of(folder, sweep.metric, sweep.is_best))
    study.tell(trial, statistics.fmean(values))


def _show(sweep: Sweep, trials: Sequence[Trial], out: Console, as_json: bool) -> bool:
    """Print the table, best trial first, and draw the picture; whether no trial failed."""
    ranked = sorted(trials, key=lambda one: (one.value is None, (one.value or 0.0) * (-1 if sweep.maximize else 1)))
    records = [_record(sweep, trial) for trial in ranked]
    finished = [record for record in records if record["value"] is not None]
    if finished:
        points = [Point(one["settings"], one["value"], one["values"]) for one in finished]
        picture = svg(sweep.metric, [axis.path for axis in sweep.axes], points, best=0)
        write(sweep.folder / PICTURE, picture.encode())
    if as_json:
        best = finished[0]["trial"] if finished else None
        compared = {"metric": sweep.metric, "mode": "max" if sweep.maximize else "min"}
        print_json(out, {**compared, "folder": str(sweep.folder), "best": best, "trials": records})
        return len(finished) == len(records)
    spread = ["std"] if sweep.seeds > 1 else []
    headings = ("trial", *(axis.path for axis in sweep.axes), sweep.metric, *spread, "state", "folder")
    cells = ("trial", *(f"settings.{axis.path}" for axis in sweep.axes), "value", *spread, "state", "folder")
    flat = ({**one, **{f"settings.{path}": text for path, text in one["settings"].items()}} for one in records)
    print_table(out, headings, ([number(one.get(cell)) for cell in cells] for one in flat))
    if finished:
        out.print(f"The picture is in {sweep.folder / PICTURE}", markup=False)
    return len(finished) == len(records)


def _record(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    """What is shown of a trial."""
    folders = runs.folders(sweep.folder, trial.number, sweep.seeds)
    is_done = trial.state == "finished"
    values = [runs.value_of(folder, sweep.metric, sweep.is_best) for folder in folders] if is_done else []
    return {
        "trial": trial.number,
        "settings": dict(trial.settings),
        "value": trial.value,
        "values": values,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "state": trial.state,
        "folder": str(sweep.folder / f"trial-{trial.number:03d}"),
    }


def _named(trial: Trial) -> str:
    """The settings of a trial as options."""
    return " ".join(f"{path}={text}" for path, text in trial.settings.items()) or "as it is"
