"""`MLflow`."""

from __future__ import annotations

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
        if last.run is None:
            found = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
            self._run = client.create_run(experiment, run_name=f"{name} {folder.name}").info.run_id
            entities = self._package.entities
            given = [entities.Param(key, str(value)[:LONGEST]) for key, value in settings(folder).items()]
            for first in range(0, len(given), BATCH):
                client.log_batch(self._run, params=given[first : first + BATCH])
        else:
            self._run = last.run
            client.update_run(self._run, status="RUNNING")
        return replace(last, run=self._run)

    def node(self, name: str) -> None:
        """Nothing to report."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {key: value for key, value in metrics.items() if key != "step"}
        if not self._is_there(step, values):
            now = int(time.time() * 1000)
            entries = [self._package.entities.Metric(key, value, now, step) for key, value in values.items()]
            self._client.log_batch(self._run, metrics=entries)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step(step, metrics)

    def rows(self, step: int, table: pa.Table) -> None:
        columns = table.to_pydict()
        content = {"columns": [*columns], "data": [list(row) for row in zip(*columns.values(), strict=True)]}
        self._client.log_dict(self._run, content, f"rows/step-{step:06d}.json")

    def alarm(self, alarm: Alarm) -> None:
        text = f"step {alarm.step}: {alarm.message} ({alarm.address})"
        self._client.set_tag(self._run, f"alarm.{alarm.rule}", text)

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
