"""`Alarms`: evaluates rules after each step; an alarm fires once until it clears."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.errors import AlarmError
from flowrl.run.alarms.history import History
from flowrl.run.alarms.row_rules import NAMED
from flowrl.run.alarms.rule import Action, Finding, Rule
from flowrl.run.alarms.shares import shares

ALARMS = "alarms.jsonl"


@dataclass(frozen=True)
class Alarm:
    """An alarm that fired, as a record of ``alarms.jsonl``.

    Args:
        time: Unix seconds.
        rule: that fired.
        address: of the step or node; see `flowrl.look.address`.
        value: of the metric.
        usual: what would have been usual.
        command: shows the rows.
        rows: the `row_id` of some rows that it is about.
    """

    step: int
    time: float
    rule: str
    address: str
    metric: str | None
    value: float | None
    usual: float | str | None
    message: str
    command: str | None
    rows: Sequence[str]

    def __str__(self) -> str:
        see = f" See: {self.command}" if self.command else ""
        return f"{self.address}: {self.message}.{see}"


Fired = tuple[Alarm, Action]


@dataclass
class Alarms:
    """The rules of a run, and those whose alarm is on.

    Args:
        rules: see `Rule`.
        run: the folder of the run, for addresses and commands.

    Attributes:
        on: the numbers of the rules that found something in the newest step.
        steps: the steps whose alarms fired.
    """

    rules: Sequence[Rule]
    run: str
    on: set[int] = field(default_factory=set, init=False)
    steps: set[int] = field(default_factory=set, init=False)

    def resume(self, history: History, steps: Iterable[int]) -> None:
        """Find which alarms are on after the newest step, and take the steps of the earlier ones."""
        self.steps |= set(steps)
        self.on = {number for number, _ in self._found(history)} if history.steps else set()

    def after(self, history: History) -> Iterator[Fired]:
        """The alarms that fire in the newest step, each with its action; those that were on before do not."""
        found = dict(self._found(history))
        fresh, self.on = found.keys() - self.on, set(found)
        for number in sorted(fresh):
            self.steps.add(history.step)
            yield self._alarm(self.rules[number], found[number], history), self.rules[number].action

    def does(self, action: Action) -> bool:
        """Whether an alarm with this action is on."""
        return any(self.rules[number].action == action for number in self.on)

    def _found(self, history: History) -> Iterator[tuple[int, Finding]]:
        for number, rule in enumerate(self.rules):
            try:
                finding = rule.check(history)
            except Exception as error:  # a rule of the user must not end the run; this is reported as an alarm
                finding = Finding(f"the rule fails: {type(error).__name__}: {error}", rows=())
            if finding is not None:
                yield number, finding

    def _alarm(self, rule: Rule, finding: Finding, history: History) -> Alarm:
        metric, rows, command = finding.metric, finding.rows, finding.command
        if rows is None and metric is not None and history.rows is not None:
            rows = _half(history, metric)
            if rows and command is None:
                command = f"blame {{run}} {metric} --step {{step}}"
        if command is None and rows is None:
            command = "rows {run} --step {step}"
        node = finding.node or history.reported_by.get(metric or "")
        return Alarm(
            step=history.step,
            time=time.time(),
            rule=str(rule),
            address=f"{self.run}@{history.step}{f'/{node}' if node else ''}",
            metric=metric,
            value=finding.value,
            usual=finding.usual,
            message=finding.message,
            command=None if command is None else f"flowrl {command.format(run=self.run, step=history.step)}",
            rows=list(rows or ())[:NAMED],
        )


def _half(history: History, metric: str) -> list[str]:
    """The ids of the rows that make half of a metric's rise, or of the metric."""
    assert history.rows is not None
    before, ids = history.before(metric), history.column("row_id")
    found = shares(history.rows, metric, before[-1] if before else None) or shares(history.rows, metric)
    return [ids[row] for row in found.half()] if found is not None and ids else []


def judge(rules: Sequence[Rule], run: str, histories: Iterable[History]) -> list[Alarm]:
    """The alarms that rules fire in the steps of a run, in order."""
    alarms = Alarms(rules, run)
    return [alarm for history in histories for alarm, _ in alarms.after(history)]


def refuse_to_continue(fired: Sequence[Fired], folder: Path) -> None:
    """End the run if an alarm stops it."""
    for alarm in (alarm for alarm, action in fired if action == "stop"):
        raise AlarmError(
            f"An alarm stopped the run after step {alarm.step}: {alarm.message} (rule {alarm.rule}). Look at the rows "
            f"in {folder}, then resume the run with another setting, or without action='stop' in the rule.",
            code="run.stopped-by-alarm",
            path=folder,
            step=alarm.step,
            rule=alarm.rule,
        )
