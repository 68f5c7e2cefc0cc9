"""`export`: gives a tracker what it lacks of a run, from the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrl.data.files import parse_json
from flowrl.errors import ParameterError
from flowrl.run.reporting.delivery import Delivery
from flowrl.run.reporting.reported import Reported
from flowrl.run.reporting.reporter import Reporter, refuse_bad_reporters
from flowrl.run.reporting.reports import earlier, names
from flowrl.run.reporting.stored import alarms, rows
from flowrl.run.training.lock import FolderLock
from flowrl.run.training.run_folder import RunFolder


def export(folder: str | Path, reporters: Sequence[Reporter]) -> None:
    """Give reporters what they lack of a run that is over; what they raise passes through.

    They continue the run that they began when it ran, or in an earlier export.

    Raises:
        ParameterError: the folder holds no run, or one that still runs; a damaged ``run.json`` or ``reported.json``.
    """
    refuse_bad_reporters(reporters)
    path = Path(folder)
    name, steps = _described(path)
    lock = FolderLock(path)
    try:
        reported = Reported(path)
        metrics, validations = RunFolder(path).lines()
        reports = earlier(metrics, validations, rows(path), alarms(path))
        done = max((int(line["step"]) for line in metrics), default=0)
        for reporter, title in zip(reporters, names(reporters), strict=True):
            delivery = Delivery(reporter, title, reported)
            delivery.start(name, steps, path, done)
            try:
                for report in reports:
                    delivery.give(report)
            finally:
                delivery.end(None)
    finally:
        lock.release()


def _described(path: Path) -> tuple[str, int]:
    """The graph's name and the number of steps."""
    if not (path / "run.json").is_file():
        raise ParameterError(
            f"{path} holds no run. Pass the folder of one, such as runs/grpo-001.", code="run.not-found", path=path
        )
    try:
        described = parse_json((path / "run.json").read_bytes())
        return str(described["graph"]["name"]), int(described["training"]["steps"] or 0)
    except (ValueError, KeyError, TypeError) as error:
        raise ParameterError(
            f"{path / 'run.json'} was not written by a run, or is damaged ({error!r}). Restore it from a copy.",
            code="run.damaged",
            path=path,
        ) from error
