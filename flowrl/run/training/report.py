"""Reporters: destinations of a run's metrics other than its folder: the terminal and TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flowrl.errors import ParameterError, type_of
from flowrl.protocols.backend import members
from flowrl.run.engine.timeline import Summary

_SHOWN = {"reward/mean": "reward", "kl/ref": "KL", "response_length/mean": "length"}


class Reporter(Protocol):
    """Receives the progress of a run. `end` is called once for every `start` that returned, however the run ends."""

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        """The run begins: the graph's name, the number of steps, the run folder, and the steps done before."""
        ...

    def node(self, name: str) -> None:
        """This node, or this validation, starts."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """This many steps are done; the metrics are those of the last one."""
        ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a validation after this many steps."""
        ...

    def end(self, summary: Summary | None) -> None:
        """The run is over: where its time went; None if it failed or had no steps to run."""
        ...


class Terminal:
    """Progress on a terminal: current node, reward, KL, length and remaining time; at the end, where the time went.

    If the output is a file or a pipe, it prints a line after the first step, every tenth of the run, the last step and
    every validation, and when it has printed nothing for `every` seconds.

    Args:
        console: where to print.
        every: seconds without a line after which it prints the next node that starts, and the steps done so far.
    """

    def __init__(self, console: Console | None = None, every: float = 30.0) -> None:
        self.console = console or Console(soft_wrap=True)
        self.every = every
        self.progress: Progress | None = None
        self.folder: Path | None = None

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self.name, self.steps, self.folder, self.done = name, steps, folder, done
        self.first, self.printed = done + 1, time.monotonic()
        resumed = f" ({done} done)" if done else ""
        self.console.print(f"{name}: {steps} steps{resumed}, writing to {folder}", highlight=False)
        if self.console.is_terminal:
            columns = [
                TextColumn("{task.description:<16}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
            ]
            self.progress = Progress(*columns, console=self.console, refresh_per_second=8)
            self.task = self.progress.add_task(name, total=steps, completed=done, numbers="")
            self.progress.start()

    def node(self, name: str) -> None:
        if self.progress is not None:
            self.progress.update(self.task, description=name)
        elif time.monotonic() - self.printed >= self.every:
            self._print(self.done, f"done, now {name}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = "  ".join(f"{label} {metrics[key]:.3f}" for key, label in _SHOWN.items() if key in metrics)
        self.done = step
        if self.progress is not None:
            self.progress.update(self.task, completed=step, numbers=numbers)
            return
        due = step in (self.first, self.steps) or step % max(1, self.steps // 10) == 0
        if due or time.monotonic() - self.printed >= self.every:
            self._print(step, numbers)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        means = "  ".join(f"{key} {value:.3f}" for key, value in metrics.items() if key.endswith("/mean"))
        self._print(step, means)

    def end(self, summary: Summary | None) -> None:
        if self.progress is not None:
            self.progress.update(self.task, description=self.name)
            self.progress.stop()
            self.progress = None
        if summary is not None:
            if self.done < self.steps:
                self.console.print(
                    f"{self.name} ended after step {self.done} of {self.steps}: a validation reached the goal",
                    highlight=False,
                )
            self.console.print(summary.table(), soft_wrap=False)

    def _print(self, step: int, what: str) -> None:
        self.printed = time.monotonic()
        self.console.print(f"  step {step:>4}/{self.steps}  {what}", highlight=False)


class TensorBoard:
    """Writes every metric to TensorBoard, in the run's own folder; needs ``pip install flowrl[tensorboard]``.

    A resumed run hides what was written after the step from which it resumes.

    Raises:
        ParameterError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ParameterError(
                "TensorBoard is not installed. Run: pip install 'flowrl[tensorboard]'.", code="package.not-installed"
            ) from error
        self._writer_class: Any = SummaryWriter

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self.writer = self._writer_class(log_dir=str(folder), purge_step=done + 1 if done else 0)

    def node(self, name: str) -> None:
        """Nothing to write."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            if key != "step":
                self.writer.add_scalar(key, value, step)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step(step, metrics)

    def end(self, summary: Summary | None) -> None:
        self.writer.close()


def refuse_bad_reporters(reporters: Any) -> None:
    """Refuse what is not a list of reporter instances."""
    if isinstance(reporters, str) or not isinstance(reporters, Sequence):
        raise ParameterError(
            f"run({reporters!r}) got {type_of(reporters)}; expected a list of reporters, such as run([Terminal()]).",
            code="run.bad-reporter",
            found=reporters,
        )
    for reporter in reporters:
        missing = [name for name in sorted(members(Reporter)) if not callable(getattr(reporter, name, None))]
        if missing or isinstance(reporter, type):
            what = "is a class" if isinstance(reporter, type) else f"has no {', '.join(missing)}"
            raise ParameterError(
                f"run([{reporter!r}]): this reporter {what}; expected instances of reporters, such as "
                f"run([Terminal()]).",
                code="run.bad-reporter",
                found=reporter,
                missing=missing,
            )
