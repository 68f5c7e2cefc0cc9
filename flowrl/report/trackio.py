"""`Trackio`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.report.facts import sample, settings
from flowrl.report.names import package
from flowrl.run.engine.timeline import Summary
from flowrl.run.reporting.delivery import kind_of
from flowrl.run.reporting.reporter import NOTHING, Alarm, Given

if TYPE_CHECKING:
    import pyarrow as pa


class Trackio:
    """Reports to Trackio's database on this machine; needs ``pip install flowrl[trackio]``.

    Args:
        project: its name.
        rows: how many rows of a step are shown.

    Raises:
        ParameterError: Trackio is not installed.
    """

    def __init__(self, project: str = "flowrl", *, rows: int = 8) -> None:
        self._package = package("trackio", "Trackio", "trackio")
        self._storage = package("trackio.sqlite_storage", "Trackio", "trackio").SQLiteStorage
        self._project, self._rows = project, rows

    def start(self, name: str, steps: int, folder: Path, done: int, last: Given = NOTHING) -> Given:
        title = f"{name} {folder.name} {last.run}".strip()
        self._run = self._package.init(
            self._project,
            name=title,
            config=settings(folder),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return replace(last, last=self._held(title, last))

    def node(self, name: str) -> None:
        """Nothing to report."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: value for key, value in metrics.items() if "/" in key}, step=step)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step(step, metrics)

    def rows(self, step: int, table: pa.Table) -> None:
        shown = sample(table, self._rows)
        data = [list(row.values()) for row in shown]
        self._run.log({"rows": self._package.Table(columns=table.column_names, data=data)}, step=step)

    def alarm(self, alarm: Alarm) -> None:
        self._run.alert(alarm.rule, f"{alarm.message} ({alarm.address})", step=alarm.step)

    def end(self, summary: Summary | None) -> None:
        self._run.finish()

    def _held(self, title: str, last: Given) -> dict[str, int]:
        """The last step of each kind that the database holds: it is written twice a second."""
        held = {kind: step for kind, step in last.last.items() if kind.startswith("alarm")}
        for log in self._storage.get_logs(self._project, title):
            kind = "rows" if "rows" in log else kind_of(log)
            held[kind] = max(log["step"], held.get(kind, -1))
        return held
