"""Alarms of a run: rules over its metrics and rows, evaluated after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.run.alarms.alarms import Alarm
    from flowrl.run.alarms.defaults import DEFAULT
    from flowrl.run.alarms.history import History
    from flowrl.run.alarms.rule import Check, Finding, Rule
    from flowrl.run.alarms.rules import Above, Falls, Jump

__all__ = ["DEFAULT", "Above", "Alarm", "Check", "Falls", "Finding", "History", "Jump", "Rule"]

__getattr__ = lazy(
    __name__,
    {
        "DEFAULT": "defaults",
        "Above": "rules",
        "Alarm": "alarms",
        "Check": "rule",
        "Falls": "rules",
        "Finding": "rule",
        "History": "history",
        "Jump": "rules",
        "Rule": "rule",
    },
)
