"""`TensorBoard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.report.facts import markdown, sample
from flowrl.report.names import package
from flowrl.run.engine.timeline import Summary
from flowrl.run.reporting.reporter import NOTHING, Alarm, Given

if TYPE_CHECKING:
    import pyarrow as pa


class TensorBoard:
    """Writes event files in the run's own folder; needs ``pip install flowrl[tensorboard]``.

    Args:
        rows: how many rows of a step are shown as text.

    Raises:
        ParameterError: TensorBoard is not installed.
    """

    def __init__(self, rows: int = 8) -> None:
        self._package = package("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._rows = rows

    def start(self, name: str, steps: int, folder: Path, done: int, last: Given = NOTHING) -> Given:
        # A kill may have come between an event and its note, so the newest step is purged and written again; texts are
        # not purged.
        first = last.last.get("step", 0)
        self._writer = self._package.SummaryWriter(log_dir=str(folder), purge_step=first)
        texts = {kind for kind in last.last if kind.startswith(("rows", "alarm"))}
        held = {kind: step if kind in texts else min(step, first - 1) for kind, step in last.last.items()}
        return replace(last, last=held)

    def node(self, name: str) -> None:
        """Nothing to write."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            if key not in ("step", "time"):
                self._writer.add_scalar(key, value, step, metrics.get("time"))
        self._writer.flush()

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step(step, metrics)

    def rows(self, step: int, table: pa.Table) -> None:
        self._writer.add_text("rows", markdown(sample(table, self._rows)), step)

    def alarm(self, alarm: Alarm) -> None:
        self._writer.add_text(f"alarms/{alarm.rule}", f"{alarm.message} ({alarm.address})", alarm.step)

    def end(self, summary: Summary | None) -> None:
        self._writer.close()
