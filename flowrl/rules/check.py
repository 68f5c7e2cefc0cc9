"""Rules: mistakes in graphs whose types are correct.

`RULES` is the table of rules. A rule is a function that yields its findings in a graph, with an id, a reason in one
line and the public issue that it was learned from. Rules see only what operators declare (roles, effects, kinds and
axes of columns, row arithmetic), so they also cover custom operators. Rules about training follow the rows that an
update reads (`flowrl.core.graphs.lineage`).

A graph may allow a violation, with a reason: ``graph.edit(allow={"FR007": "greedy is the baseline only"})``; in one
node by ``{"FR007 generate": "..."}``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.core.graphs.graph import Graph
from flowrl.errors import GraphError, ParameterError, RuleError, offer
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.protocols.scorers import RewardTrainer
from flowrl.rules import advantages, critics, episodes, losses, rows, updates, weights
from flowrl.rules.rule import RETIRED, RULES, Finding, Rule, writers

__all__ = [
    "RULES",
    "Allowance",
    "Finding",
    "Rule",
    "allowances",
    "check",
    "refuse_broken",
    "refuse_unknown_rules",
    "require",
]

logger = logging.getLogger(__name__)

MODULES = (advantages, critics, episodes, losses, rows, updates, weights)
"""The modules of rules; importing them fills the table."""


@dataclass(frozen=True)
class Allowance:
    """A rule that a graph may violate, or a rule and a node (``"FR007 generate"``), the reason as given to `allow`, and
    the findings; none if it is not needed."""

    rule: str
    reason: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if not self.findings:
            return (
                f"{self.rule} is allowed ({self.reason}), but nothing violates it. Remove the allowance: "
                f"edit(allow={{{self.rule!r}: None}})."
            )
        nodes = ", ".join(dict.fromkeys(finding.node for finding in self.findings))
        return f"{self.findings[0].rule} {nodes}: allowed ({self.reason})."


def check(graph: Graph, prompts: int | None = None) -> list[Finding]:
    """The findings of all rules, except those that the graph allows.

    Most rules concern training: a graph that writes no trained weights is checked only by those with `everywhere`.
    """
    found = _found(graph, prompts, [rule for rule in RULES if rule.id not in graph.allow])
    return [finding for finding in found if not any(_covers(key, finding) for key in graph.allow)]


def allowances(graph: Graph, prompts: int | None = None) -> list[Allowance]:
    """The rules that the graph allows, each with the findings that this covers.

    Rules that need the number of prompts are omitted if it is not known and they find nothing.
    """
    keys = [key for key in graph.allow if key.partition(" ")[2] in ("", *graph.nodes)]
    ids = {key.partition(" ")[0] for key in keys}
    found = _found(graph, prompts, [rule for rule in RULES if rule.id in ids])
    covered = {key: tuple(finding for finding in found if _covers(key, finding)) for key in keys}
    known = [key for key in keys if covered[key] or prompts is not None or key[:5] not in rows.ASK_FOR_PROMPTS]
    return [Allowance(key, graph.allow[key], covered[key]) for key in known]


def _covers(key: str, finding: Finding) -> bool:
    """Whether an allowance concerns a finding; the key is that of `allow`."""
    return key in (finding.rule, f"{finding.rule} {finding.node}")


def require(graph: Graph, prompts: int | None = None) -> None:
    """Refuse a graph that violates a rule, and warn about allowances that are not needed."""
    refuse_broken(graph, graph.name, prompts)
    for allowance in allowances(graph, prompts):
        if not allowance.findings:
            logger.warning("%s: %s", graph.name, allowance)


def refuse_broken(graph: Graph, name: str, prompts: int | None = None) -> None:
    """Refuse a graph that violates a rule; `name` is for messages, `prompts` the number per step, if known."""
    if findings := check(graph, prompts):
        count = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise RuleError(
            f"{name} violates rules and cannot start. Fix or allow {count}:\n{lines}",
            code="rule.violated",
            rules=[finding.rule for finding in findings],
            nodes=[finding.node for finding in findings],
        )


def refuse_unknown_rules(allow: Mapping[str, str | None], where: str, nodes: Iterable[str]) -> None:
    """Refuse allowances of unknown rules or nodes, or without a reason; `where` is their place, for messages."""
    ids, nodes = [rule.id for rule in RULES], [*nodes]
    for key, reason in allow.items():
        id, _, node = str(key).partition(" ")
        if id not in ids:
            known = "it is retired, so remove it." if id in RETIRED else offer(id, ids, "rules are")
            raise GraphError(f"{where} names the unknown rule {id!r}; {known}", code="rule.invalid-allowance", rule=id)
        if node and node not in nodes:
            raise GraphError(
                f"{where} allows {id} in {node!r}; {offer(node, nodes, 'the graph has')}",
                code="rule.invalid-allowance",
                rule=id,
                node=node,
            )
        if reason is not None and (not isinstance(reason, str) or not reason.strip()):
            raise GraphError(
                f"{where} allows {id} for the reason {reason!r}. Pass a text that says why: "
                f"allow={{{id!r}: 'greedy is the baseline only'}}, or None to remove the allowance.",
                code="rule.invalid-allowance",
                rule=id,
                reason=reason,
            )


def _found(graph: Graph, prompts: int | None, rules: Sequence[Rule]) -> list[Finding]:
    if prompts is not None and (isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1):
        raise ParameterError(
            f"check(prompts={prompts!r}) is not a number of prompts per step. Pass 1, 2, ..., or None if unknown.",
            code="parameter.invalid",
            prompts=prompts,
        )
    trains = any(writers(graph, protocol) for protocol in (Trainer, Critic, RewardTrainer))
    applicable = [rule for rule in rules if trains or rule.everywhere]
    return [Finding(rule.id, node, message) for rule in applicable for node, message in rule.check(graph, prompts)]
