"""`WandB`: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.data.files import remove
from flowrl.report.facts import failed, sample, settings
from flowrl.report.names import package
from flowrl.run.engine.timeline import Summary
from flowrl.run.reporting.reporter import NOTHING, Alarm, Given

if TYPE_CHECKING:
    import pyarrow as pa


class WandB:
    """Reports to Weights & Biases; needs ``pip install flowrl[wandb]``.

    An offline run that resumes is written again from its first step, so that its folder has one run to sync.

    Args:
        project: None is W&B's own default, such as ``WANDB_PROJECT``.
        mode: None is W&B's own default, such as ``WANDB_MODE``.
        rows: how many rows of a step are shown.

    Raises:
        ParameterError: W&B is not installed.
    """

    def __init__(
        self, project: str | None = None, *, mode: Literal["online", "offline"] | None = None, rows: int = 8
    ) -> None:
        self._package = package("wandb", "Weights & Biases", "wandb")
        self._project, self._mode, self._rows = project, mode, rows
        self._table: Any = None

    def start(self, name: str, steps: int, folder: Path, done: int, last: Given = NOTHING) -> Given:
        self._folder = folder
        run = self._run = self._package.init(
            project=self._project,
            name=f"{name} {folder.name}",
            id=last.run or None,
            resume="allow",
            mode=self._mode,
            dir=str(folder),
            config=settings(folder),
            settings=self._package.Settings(console="off"),
        )
        run.define_metric("*", step_metric="step")
        if run.offline:
            written = Path(run.dir).resolve().parent
            for earlier in written.parent.glob(f"offline-run-*-{run.id}"):
                if earlier != written:
                    remove(earlier)
            return Given(last.run)
        held = run.summary.get("step", -1) if run.resumed else -1  # what was sent in time before a kill
        return replace(last, last={kind: min(step, held) for kind, step in last.last.items()})

    def node(self, name: str) -> None:
        """Nothing to report."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step(step, metrics)

    def rows(self, step: int, table: pa.Table) -> None:
        if self._table is None:
            self._table = self._package.Table(columns=table.column_names, log_mode="INCREMENTAL")
        for row in sample(table, self._rows):
            self._table.add_data(*row.values())
        self._run.log({"rows": self._table, "step": step})

    def alarm(self, alarm: Alarm) -> None:
        self._run.alert(title=alarm.rule, text=f"step {alarm.step}: {alarm.message} ({alarm.address})")

    def end(self, summary: Summary | None) -> None:
        self._run.finish(exit_code=int(failed(self._folder, summary)))
