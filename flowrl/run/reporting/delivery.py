"""Deliveries of a run's reports: each one once, and in a thread of the reporter."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from flowrl.run.engine.timeline import Summary
from flowrl.run.reporting.reported import Reported
from flowrl.run.reporting.reporter import NOTHING, Alarm, Given, Reporter, Tracker, takes_last

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

WAITING = 1024
"""The most reports that wait for a reporter."""
PATIENCE = 30.0
"""Seconds that the end of a run waits for a reporter."""


class Report(NamedTuple):
    """A call of a reporter; its kind and step say whether the reporter was given it."""

    method: str
    kind: str
    step: int
    arguments: tuple[Any, ...]


def kind_of(metrics: Iterable[str]) -> str:
    """The kind of the report with these metrics: ``"step"``, or the name of a validation."""
    names = [key for key in metrics if "/" in key]
    return "step" if "timing/step" in names or not names else names[0].partition("/")[0]


def of_step(step: int, metrics: Mapping[str, float]) -> Report:
    return Report("step", "step", step, (step, metrics))


def of_validation(step: int, metrics: Mapping[str, float]) -> Report:
    return Report("validation", kind_of(metrics), step, (step, metrics))


def of_rows(step: int, table: pa.Table) -> Report:
    return Report("rows", "rows", step, (step, table))


def of_alarm(alarm: Alarm) -> Report:
    return Report("alarm", f"alarm {alarm.rule}", alarm.step, (alarm,))


class Delivery:
    """Gives a reporter each report once; what the reporter raises passes through."""

    def __init__(self, reporter: Reporter, name: str, reported: Reported) -> None:
        self.reporter, self.name, self._reported = reporter, name, reported
        self.once = takes_last(reporter)
        self._before = self._given = NOTHING

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        if not self.once:
            self.reporter.start(name, steps, folder, done)
            return
        last = self._reported.of(self.name)
        found = cast(Tracker, self.reporter).start(name, steps, folder, done, last=last)
        self._before = self._given = last if found is None else found
        self._reported.enter(self.name, self._given)

    def earlier(self, reports: Sequence[Report]) -> None:
        """Give what the reporter lacks of the steps before this start."""
        if self.once:
            for report in reports:
                self.give(report)

    def node(self, name: str) -> None:
        self.reporter.node(name)

    def give(self, report: Report) -> None:
        method = getattr(self.reporter, report.method, None)  # a reporter needs neither `rows` nor `alarm`
        if method is not None and not self._before.has(report.kind, report.step):
            method(*report.arguments)
            self._enter(self._given.after(report.kind, report.step))

    def lose(self, report: Report) -> None:
        """Note a report that the reporter did not get."""
        self._enter(self._given.after(report.kind, report.step, lost=True))

    def end(self, summary: Summary | None) -> None:
        self.reporter.end(summary)

    def _enter(self, given: Given) -> None:
        if self.once:
            self._given = given
            self._reported.enter(self.name, given)


class Background:
    """A delivery in its own thread: the reporter neither delays nor ends the run."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery, self._name, self.once = delivery, delivery.name, delivery.once
        self._calls: queue.Queue[str | Sequence[Report] | None] = queue.Queue(WAITING)  # a node, reports, the end
        self._overflow: deque[Report] = deque()  # lost, because too many waited; in order
        self._losses = 0
        self._started = self._failing = self._given_up = False
        self._summary: Summary | None = None
        self._deadline = 0.0

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self._folder = folder
        arguments = (name, steps, folder, done)
        self._thread = threading.Thread(target=self._work, args=arguments, name=self._name, daemon=True)
        self._thread.start()

    def earlier(self, reports: Sequence[Report]) -> None:
        if self.once:
            self._calls.put(reports)

    def node(self, name: str) -> None:
        with suppress(queue.Full):
            self._calls.put_nowait(name)

    def give(self, report: Report) -> None:
        try:
            self._calls.put_nowait([report])
        except queue.Full:
            self._losses += 1
            if not self._overflow:
                text = "%s is too slow: %d reports wait, and it does not get those from step %d on.%s"
                logger.warning(text, self._name, WAITING, report.step, self._remedy)
            self._overflow.append(report)

    def close(self, summary: Summary | None) -> None:
        """End the reporter after the reports that wait."""
        self._summary, self._deadline = summary, time.monotonic() + PATIENCE
        try:
            self._calls.put(None, timeout=PATIENCE)
        except queue.Full:
            self._given_up = True

    def end(self) -> None:
        """Wait for the reporter, but not for long."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._given_up = True
            text = "%s did not finish within %.0f seconds after the run, and %d reports wait.%s"
            logger.warning(text, self._name, PATIENCE, self._calls.qsize(), self._remedy)
        if self._losses:
            logger.warning("%s did not get %d reports of this run.%s", self._name, self._losses, self._remedy)

    @property
    def _remedy(self) -> str:
        return f" They are in the folder: flowrl export {self._folder}" if self.once else ""

    def _work(self, *start: Any) -> None:
        """The thread."""
        self._started = self._attempt(self._delivery.start, *start)
        while (item := self._calls.get()) is not None and not self._given_up:
            if not isinstance(item, str):
                for report in item:
                    self._give(report)
            elif self._started:
                self._attempt(self._delivery.node, item)
        if self._started:
            self._note_overflow(math.inf)
            self._attempt(self._delivery.end, self._summary)

    def _give(self, report: Report) -> None:
        if self._started:
            self._note_overflow(report.step)
            if self._attempt(self._delivery.give, report):
                return
            self._delivery.lose(report)
        self._losses += 1

    def _note_overflow(self, step: float) -> None:
        """Note the lost reports before this step: later ones follow reports that still wait."""
        while self._overflow and self._overflow[0].step < step:
            self._delivery.lose(self._overflow.popleft())

    def _attempt(self, call: Callable[..., object], *arguments: Any) -> bool:
        """Whether the call did not raise; the first error in a row is logged."""
        try:
            call(*arguments)
        except Exception as error:
            if not self._failing:
                text = "%s fails, and the run continues without it (%s: %s).%s"
                logger.warning(text, self._name, type(error).__name__, error, self._remedy)
            self._failing = True
            return False
        self._failing = False
        return True
