"""Rules: the mistakes that a graph is checked for before it runs."""

from flowrl.rules.rule import RULES, Finding, Rule, rule

__all__ = ["RULES", "Finding", "Rule", "rule"]
