"""`MLflow`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.report.facts import failed, settings
from flowrl.report.names import package
from flowrl.run.engine.timeline import Summary
from flowrl.run.reporting.reporter import NOTHING, Alarm, Given

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 100
"""The most parameters that MLflow takes at once."""
LONGEST = 500
"""Characters of a parameter that are kept."""


TAG = "flowrl.run"
"""The tag that holds the run's id in ``reported.json``: MLflow chooses its own."""


class MLflow:
    """Reports to MLflow, in a database or on a server; needs ``pip install flowrl[mlflow]``.

    Args:
        experiment: its name.
        uri: of the tracking server or database; None is MLflow's own default: ``MLFLOW_TRACKING_URI``, or the file
            ``mlflow.db`` in the current folder.

    Raises:
        ParameterError: MLflow is not installed.
    """

    def __init__(self, experiment: str = "flowrl", *, uri: str | None = None) -> None:
        package("sqlalchemy", "SQLAlchemy, in which MLflow has its database,", "mlflow")
        self._package = package("mlflow", "MLflow", "mlflow")
        self._experiment, self._uri = experiment, uri

    def start(self, name: str, steps: int, folder: Path, done: int, last: Given = NOTHING) -> Given:
        self._folder = folder
        self._client = client = self._package.MlflowClient(self._uri)
        self._checked: set[str] = set()
        experiment = client.get_experiment_by_name(self._experiment)
        of = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        found = client.search_runs([of], f"tags.`{TAG}` = '{last.run}'") if last.run else []
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return last
        tags = {TAG: last.run, "folder": str(folder.absolute())}
        self._run = client.create_run(of, tags=tags, run_name=f"{name} {folder.name}").info.run_id
        param = self._package.entities.Param
        given = [param(_name(key), str(value)[:LONGEST]) for key, value in settings(folder).items()]
        for first in range(0, len(given), BATCH):
            client.log_batch(self._run, params=given[first : first + BATCH])
        return replace(last, last={}, lost={})

    def node(self, name: str) -> None:
        """Nothing to report."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {_name(key): value for key, value in metrics.items() if "/" in key}
        if not self._is_there(step, values):
            at = int(metrics.get("time", time.time()) * 1000)
            entries = [self._package.entities.Metric(key, value, at, step) for key, value in values.items()]
            self._client.log_batch(self._run, metrics=entries)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step(step, metrics)

    def rows(self, step: int, table: pa.Table) -> None:
        columns = table.to_pydict()
        content = {"columns": [*columns], "data": [list(row) for row in zip(*columns.values(), strict=True)]}
        self._client.log_dict(self._run, content, f"rows/step-{step:06d}.json")

    def alarm(self, alarm: Alarm) -> None:
        text = f"step {alarm.step}: {alarm.message} ({alarm.address})"
        self._client.set_tag(self._run, _name(f"alarm.{alarm.rule}"), text)

    def end(self, summary: Summary | None) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed(self._folder, summary) else "FINISHED")

    def _is_there(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether a metric has this step: a kill may have come after it was sent and before that was noted. Only the
        first report after a start can be such a one."""
        new = values.keys() - self._checked
        self._checked |= values.keys()
        return any(
            one.step == step for key in sorted(new)[:1] for one in self._client.get_metric_history(self._run, key)
        )


def _name(name: str) -> str:
    """A name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
