"""`Reporter`: where a run reports to besides its folder, such as the terminal or a tracker."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.errors import ParameterError, type_of
from flowrl.protocols.backend import members
from flowrl.run.engine.timeline import Summary

if TYPE_CHECKING:
    import pyarrow as pa


class Alarm(Protocol):
    """What fired after a step."""

    @property
    def step(self) -> int: ...
    @property
    def rule(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def message(self) -> str: ...


@dataclass(frozen=True)
class Given:
    """What a reporter was given of a run, in this start and the earlier ones.

    Args:
        run: the id of the run in the tracker, written before the tracker first gets it.
        last: the last step of each kind of report: of ``"step"``, ``"rows"``, ``"alarm"``, and of each validation by
            its name.
        lost: the steps before the last one that the reporter did not get, by kind.
    """

    run: str = ""
    last: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def has(self, kind: str, step: int) -> bool:
        """Whether the reporter was given this report."""
        return step <= self.last.get(kind, -1) and step not in self.lost.get(kind, ())

    def after(self, kind: str, step: int, *, lost: bool = False) -> Given:
        """This, and one more report, which the reporter got or lost."""
        missing = [one for one in self.lost.get(kind, ()) if one != step] + [step] * lost
        last = {**self.last, kind: max(step, self.last.get(kind, -1))}
        return replace(self, last=last, lost={k: v for k, v in {**self.lost, kind: missing}.items() if v})


NOTHING = Given()


class Reporter(Protocol):
    """Receives the progress of a run. `end` is called once for every `start` that returned, however the run ends.

    Every reporter has a thread, so it neither delays nor ends the run: what it raises is logged, and what it does not
    take in time is lost, counted and logged. If it has ``in_loop = True``, the run calls it and waits for it instead,
    and what it raises ends the run.

    A reporter may have the further methods of a `Tracker`.
    """

    def start(self, name: str, steps: int, folder: Path, done: int) -> object:
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


class Tracker(Reporter, Protocol):
    """A reporter whose copy of a run outlasts the process.

    Its `start` takes `last`, so it gets each report once: a resumed run does not send again what it repeats, and first
    sends what the tracker lacks of earlier steps.
    """

    def start(self, name: str, steps: int, folder: Path, done: int, last: Given = NOTHING) -> Given | None:
        """As that of a `Reporter`, with what it was given in the earlier starts.

        Returns what it has; None if that is `last`.
        """
        ...

    def rows(self, step: int, table: pa.Table) -> None:
        """The summaries of the rows of this step."""
        ...

    def alarm(self, alarm: Alarm) -> None:
        """An alarm fired."""
        ...


def takes_last(reporter: Reporter) -> bool:
    """Whether a reporter gets each report once."""
    return "last" in inspect.signature(reporter.start).parameters


def refuse_bad_reporters(reporters: Any) -> None:
    """Refuse what is not a list of reporter instances."""
    if isinstance(reporters, str) or not isinstance(reporters, Sequence):
        raise ParameterError(
            f"run({reporters!r}) got {type_of(reporters)}; expected a list of reporters, such as run([Terminal()]).",
            code="run.bad-reporter",
            found=reporters,
        )
    for reporter in reporters:
        needed = sorted(members(Reporter))
        missing = [name for name in needed if not callable(getattr(reporter, name, None))]
        if missing or isinstance(reporter, type):
            what = "is a class" if isinstance(reporter, type) else f"has no {', '.join(missing)}"
            raise ParameterError(
                f"run([{reporter!r}]): this reporter {what}; expected instances of reporters, such as "
                f"run([Terminal()]).",
                code="run.bad-reporter",
                found=reporter,
                missing=missing,
            )
