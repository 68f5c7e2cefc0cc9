"""Rules: the mistakes that a graph is checked for before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.rules.rule import RULES, Finding, Rule, rule

__all__ = [
    "RULES",
    "Finding",
    "Rule",
    "rule",
]

__getattr__ = lazy(
    __name__,
    {
        "Finding": "rule",
        "RULES": "rule",
        "Rule": "rule",
        "rule": "rule",
    },
)
