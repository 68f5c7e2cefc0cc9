"""`Rule`: when an alarm fires, and what the run then does; `Check` makes one of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from flowrl.run.alarms.history import History
from flowrl.spec import Spec, written

Action = Literal["report", "record", "checkpoint", "stop"]
"""`report` writes the alarm, `record` also the texts and columns of the following steps until it clears,
`checkpoint` also a checkpoint, and `stop` ends the run with an `AlarmError`, after a checkpoint if it writes any."""


@dataclass(frozen=True)
class Finding:
    """What a rule found in a step.

    Args:
        message: what happened, with its numbers.
        metric: the metric that it is about.
        value: its value.
        usual: what would have been usual: a number, or text.
        node: the node that it is about; None is the one that reports the metric.
        rows: the `row_id` of the rows that it is about; None are those that make half of the metric.
        command: of ``flowrl`` that shows more, such as ``"rows {run} --step {step}"``; None shows the rows of the
            metric.
    """

    message: str
    metric: str | None = None
    value: float | None = None
    usual: float | str | None = None
    node: str | None = None
    rows: Sequence[str] | None = None
    command: str | None = None


class Rule(Spec):
    """When an alarm fires. A rule is a function of the history, so that a folder can be judged as the run was.

    Args:
        action: what the run does besides reporting the alarm; see `Action`.
    """

    schedulable: ClassVar[bool] = False

    _: KW_ONLY
    action: Action = "report"

    def check(self, history: History) -> Finding | None:
        """What is wrong in the newest step; None if nothing is."""
        raise NotImplementedError

    def __str__(self) -> str:
        return written(self)


class Check(Rule):
    """A rule that is a function of the history; it returns a `Finding`, a message, or None.

    Args:
        fn: the function, such as ``lambda history: "it is slow" if history.now("timing/step") > 60 else None``.
    """

    fn: Callable[[History], Any]

    def check(self, history: History) -> Finding | None:
        """What the function found."""
        found = self.fn(history)
        return Finding(found) if isinstance(found, str) else found

    def __str__(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))
