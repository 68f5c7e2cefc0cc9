"""`Reports`: what a run tells all of its reporters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.run.engine.timeline import Summary
from flowrl.run.reporting.delivery import (
    Background,
    Delivery,
    Report,
    of_alarm,
    of_rows,
    of_step,
    of_validation,
)
from flowrl.run.reporting.reported import Reported
from flowrl.run.reporting.reporter import Alarm, Reporter
from flowrl.run.reporting.stored import alarms, rows

if TYPE_CHECKING:
    import pyarrow as pa


class Reports:
    """The reporters of a run.

    Args:
        resumes: whether the folder holds an earlier start of this run.

    Raises:
        ParameterError: the folder's ``reported.json`` is damaged.
    """

    def __init__(self, reporters: Sequence[Reporter], folder: Path, resumes: bool) -> None:
        reported = Reported(folder)
        if not resumes:
            reported.clear()
        deliveries = [Delivery(one, name, reported) for one, name in zip(reporters, names(reporters), strict=True)]
        self._all = [one if getattr(one.reporter, "in_loop", False) else Background(one) for one in deliveries]
        self._folder = folder
        self.summary: Summary | None = None

    @contextmanager
    def started(self, name: str, steps: int, done: int) -> Iterator[None]:
        """Start all reporters, and end each at the end of the block."""
        with ExitStack() as ends:
            try:
                for one in self._all:
                    one.start(name, steps, self._folder, done)
                    ends.callback(self._end, one)
                yield
            finally:
                for one in self._all:
                    if isinstance(one, Background):
                        one.close(self.summary)

    def earlier(self, metrics: Iterable[Mapping[str, float]], validations: Iterable[Mapping[str, float]]) -> None:
        """The steps and validations before this start, for the reporters that lack some of them."""
        if any(one.once for one in self._all):
            reports = earlier(metrics, validations, rows(self._folder), alarms(self._folder))
            for one in self._all:
                one.earlier(reports)

    def node(self, name: str) -> None:
        for one in self._all:
            one.node(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._give(of_step(step, metrics))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._give(of_validation(step, metrics))

    def rows(self, step: int, table: pa.Table) -> None:
        self._give(of_rows(step, table))

    def alarm(self, alarm: Alarm) -> None:
        self._give(of_alarm(alarm))

    def _end(self, one: Delivery | Background) -> None:
        if isinstance(one, Background):
            one.end()
        else:
            one.end(self.summary)

    def _give(self, report: Report) -> None:
        for one in self._all:
            one.give(report)


def earlier(
    metrics: Iterable[Mapping[str, float]],
    validations: Iterable[Mapping[str, float]],
    rows: Iterable[tuple[int, pa.Table]] = (),
    alarms: Iterable[Alarm] = (),
) -> list[Report]:
    """The reports of a run until now, in the order of their steps."""
    found = [of_step(int(line["step"]), line) for line in metrics]
    found += [of_rows(step, table) for step, table in rows]
    found += [of_alarm(alarm) for alarm in alarms]
    found += [of_validation(int(line["step"]), line) for line in validations]
    return sorted(found, key=lambda report: report.step)


def names(reporters: Iterable[Reporter]) -> Iterator[str]:
    """The names of reporters in ``reported.json``: their classes, numbered if there are several of one."""
    seen: Counter[str] = Counter()
    for reporter in reporters:
        name = type(reporter).__name__
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"
