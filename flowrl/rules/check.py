"""Rules: what must not be launched, although every connection fits.

`RULES` is a table. A rule is one small function that yields what it finds in a graph; each has an id, the reason in a
line, and the public issue that taught it. Rules know operators only by what these declare (roles, effects, kinds and
axes of columns, row arithmetic), so they hold for custom operators too. Those about training follow the rows that an
update reads (`flowrl.core.graphs.lineage`). Where a message says what to add (`Sync`, `Repeat`, `Value`), it names
flowrl's own operator for it, as an example that can be copied.

A graph may allow a rule to be broken, with a reason: ``graph.edit(allow={"FR007": "greedy is the baseline only"})``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.core.graphs.graph import Graph
from flowrl.errors import GraphError, ParameterError, RuleError, offer
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.rules import advantages, critics, episodes, losses, rows, updates, weights
from flowrl.rules.rule import RULES, Finding, Rule, writers

__all__ = [
    "RULES",
    "Allowance",
    "Finding",
    "Rule",
    "allowances",
    "check",
    "refuse_broken",
    "refuse_no_rules",
    "require",
]

logger = logging.getLogger(__name__)

MODULES = (advantages, critics, episodes, losses, rows, updates, weights)
"""Where rules are; to be imported is to be in the table."""


@dataclass(frozen=True)
class Allowance:
    """A rule that a graph allows to be broken.

    Args:
        rule: its id.
        reason: why, in the words of whoever allowed it.
        findings: what the rule would have said; empty where nothing needs the allowance.
    """

    rule: str
    reason: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if not self.findings:
            return (
                f"{self.rule} is allowed ({self.reason}), and nothing breaks it any more; take it back: "
                f"edit(allow={{{self.rule!r}: None}})."
            )
        nodes = ", ".join(dict.fromkeys(finding.node for finding in self.findings))
        return f"{self.rule} {nodes}: allowed ({self.reason})."


def check(graph: Graph, prompts: int | None = None) -> list[Finding]:
    """All findings of all rules that the graph does not allow to be broken.

    Most concern training: of a graph that writes no trained weights, only those that hold `Rule.everywhere` are asked.

    Raises:
        ParameterError: `prompts` is no count.
    """
    return _found(graph, prompts, [rule for rule in RULES if rule.id not in graph.allow])


def allowances(graph: Graph, prompts: int | None = None) -> list[Allowance]:
    """What the graph allows, each with what it covers.

    Where the number of prompts is not known, a rule that asks for it finds nothing, and is left out.

    Raises:
        ParameterError: `prompts` is no count.
    """
    found = _found(graph, prompts, [rule for rule in RULES if rule.id in graph.allow])
    covered = {id: tuple(finding for finding in found if finding.rule == id) for id in graph.allow}
    judged = [id for id in graph.allow if covered[id] or prompts is not None or id not in rows.ASK_FOR_PROMPTS]
    return [Allowance(id, graph.allow[id], covered[id]) for id in judged]


def require(graph: Graph, prompts: int | None = None) -> None:
    """Refuse a graph that breaks a rule; a warning tells of an allowance that nothing needs.

    Raises:
        RuleError: with every finding.
    """
    refuse_broken(graph, graph.name, prompts)
    for allowance in allowances(graph, prompts):
        if not allowance.findings:
            logger.warning("%s: %s", graph.name, allowance)


def refuse_broken(graph: Graph, said: str, prompts: int | None = None) -> None:
    """Refuse a graph that breaks a rule.

    Args:
        graph: which.
        said: what it is, for messages.
        prompts: how many a step, where known.

    Raises:
        RuleError: with every finding.
    """
    if findings := check(graph, prompts):
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise RuleError(f"{said} must not be launched; {len(findings)} finding(s):\n{lines}")


def refuse_no_rules(allow: Mapping[str, str | None], said: str) -> None:
    """Refuse allowances of rules that there are not, or without a reason.

    Args:
        allow: the reason by rule; None takes an allowance back.
        said: where, for messages.

    Raises:
        GraphError: naming the nearest rule.
    """
    ids = [rule.id for rule in RULES]
    for id, reason in allow.items():
        if id not in ids:
            raise GraphError(f"{said} names {id!r}, which is no rule; {offer(id, ids, 'rules are')}")
        if reason is not None and (not isinstance(reason, str) or not reason.strip()):
            raise GraphError(
                f"{said} allows {id} for the reason {reason!r}; expected a text that says why: "
                f"allow={{{id!r}: 'greedy is the baseline only'}}, or None to take it back."
            )


def _found(graph: Graph, prompts: int | None, rules: Sequence[Rule]) -> list[Finding]:
    if prompts is not None and (isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1):
        raise ParameterError(f"check(prompts={prompts!r}) is no number of prompts a step; expected 1, 2, ... or None.")
    trains = bool(writers(graph, Trainer) or writers(graph, Critic))
    asked = [rule for rule in rules if trains or rule.everywhere]
    return [Finding(rule.id, node, message) for rule in asked for node, message in rule.check(graph, prompts)]
