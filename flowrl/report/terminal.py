"""`Terminal`: the progress of a run on a terminal, or as lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flowrl.errors import offer
from flowrl.run.engine.timeline import Summary

_OF_REWARDS = {"reward/mean": "reward", "kl/ref": "KL", "response_length/mean": "length"}
_OF_LOSSES = {
    **dict.fromkeys((f"actor/{loss}_accuracy" for loss in ("dpo", "ipo", "simpo", "orpo")), "accuracy"),
    "reward_model/accuracy": "accuracy",
    "actor/pg_loss": "loss",
    "reward_model/loss": "loss",
    "actor/divergence": "divergence",
    "critic/vf_loss": "critic's loss",
}


def chosen(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics to show of a graph that reports these, with their labels: of its rewards, else of its losses."""
    labels = _OF_REWARDS if "reward/mean" in metrics else _OF_LOSSES
    return {key: label for key, label in labels.items() if key in metrics}


class Terminal:
    """Progress on a terminal: the current node, some metrics and the remaining time; at the end, where the time went.

    If stderr is a terminal, it has a progress bar. Otherwise a line is printed after the first step, every tenth of the
    run, the last step and every validation, and when nothing was printed for `every` seconds.

    Args:
        console: where to print lines; None is stdout.
        every: seconds without a line after which it prints the next node that starts, and the steps done so far.
        metrics: the metrics to show. By default these depend on what the graph trains: reward, KL and length of a graph
            with rewards, else accuracies and losses.
        bar: where the progress bar is drawn if it is a terminal; None is stderr.
    """

    def __init__(
        self,
        console: Console | None = None,
        every: float = 30.0,
        *,
        metrics: Sequence[str] = (),
        bar: Console | None = None,
    ) -> None:
        self.console = console or Console(soft_wrap=True)
        self.every, self.metrics = every, tuple(metrics)
        self.bar = bar or Console(stderr=True)
        self.progress: Progress | None = None
        self.folder: Path | None = None

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self.name, self.steps, self.folder, self.done = name, steps, folder, done
        self.first, self.printed = done + 1, time.monotonic()
        resumed = f" ({done} done)" if done else ""
        self.console.print(f"{name}: {steps} steps{resumed}, writing to {folder}", highlight=False)
        if self.bar.is_terminal:
            columns = [
                TextColumn("{task.description:<16}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
            ]
            self.progress = Progress(*columns, console=self.bar, refresh_per_second=8)
            self.task = self.progress.add_task(name, total=steps, completed=done, numbers="")
            self.progress.start()

    def node(self, name: str) -> None:
        if self.progress is not None:
            self.progress.update(self.task, description=name)
        elif time.monotonic() - self.printed >= self.every:
            self._print(self.done, f"done, now {name}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.first:
            self._name_unknown(metrics)
        shown = dict.fromkeys(self.metrics) if self.metrics else chosen(metrics)
        numbers = "  ".join(f"{label or key} {metrics[key]:.3f}" for key, label in shown.items() if key in metrics)
        self.done = step
        if self.progress is not None:
            self.progress.update(self.task, completed=step, numbers=numbers)
            return
        due = step in (self.first, self.steps) or step % max(1, self.steps // 10) == 0
        if due or time.monotonic() - self.printed >= self.every:
            self._print(step, numbers)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        means = {key: value for key, value in metrics.items() if key.endswith("/mean")}
        self._print(step, "  ".join(f"{key} {value:.3f}" for key, value in (means or metrics).items()))

    def end(self, summary: Summary | None) -> None:
        if self.progress is not None:
            self.progress.update(self.task, description=self.name)
            self.progress.stop()
            self.progress = None
        if summary is not None:
            if self.done < self.steps:
                self.console.print(
                    f"{self.name} ended after step {self.done} of {self.steps}: a validation ended it",
                    highlight=False,
                )
            self.console.print(summary.table(), soft_wrap=False)

    def _print(self, step: int, what: str) -> None:
        self.printed = time.monotonic()
        self._line(f"  step {step:>4}/{self.steps}  {what}")

    def _line(self, text: str) -> None:
        above_bar = self.progress is not None and self.console.is_terminal  # the same terminal
        (self.bar if above_bar else self.console).print(text, highlight=False)

    def _name_unknown(self, metrics: Mapping[str, float]) -> None:
        for key in self.metrics:
            if key not in metrics:
                self._line(f"  step {self.first} reports no {key}; {offer(key, sorted(metrics))}")
