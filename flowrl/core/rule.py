"""`Rule`: a row of the table of rules, and what the functions in it share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flowrl.core.gate import ROWS
from flowrl.core.graph import Graph, Node, Use
from flowrl.core.lineage import origin
from flowrl.core.ports import PortField
from flowrl.core.symbols import Edge

Findings = Iterator[tuple[str, str]]
Check = Callable[[Graph, int | None], Findings]


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found: its id, the node, and what to do."""

    rule: str
    node: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule} {self.node}: {self.message}"


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        id: ``FR001``, ...; never used again for another rule.
        reason: why, in a line.
        source: the public issue that taught it, as ``owner/repository#number`` on GitHub.
        check: yields ``(node, message)``; the second argument is the number of prompts a step, or None.
        everywhere: also for graphs that train nothing, such as those of validations.
    """

    id: str
    reason: str
    source: str
    check: Check
    everywhere: bool = False


ENTERED: list[Rule] = []
"""All rules, as their modules are imported; `flowrl.core.rules.RULES` has them in order."""


def rule(id: str, reason: str, source: str, everywhere: bool = False) -> Callable[[Check], Check]:
    """Enter a function into the table."""

    def enter(check: Check) -> Check:
        ENTERED.append(Rule(id, reason, source, check, everywhere))
        return check

    return enter


def writers(graph: Graph, protocol: type) -> list[tuple[Node, str]]:
    """Nodes that write a role through `protocol`, with the role."""
    uses = [(node, use) for node in graph.nodes.values() for use in node.uses if use.mode == "writes"]
    return [(node, use.role) for node, use in uses if use.goes_through(protocol)]


def read_through(nodes: Iterable[Node], protocol: type) -> set[str]:
    """Roles that these nodes read through `protocol`."""
    return {use.role for node in nodes for use in node.uses if use.mode == "reads" and use.goes_through(protocol)}


def of_kind(graph: Graph, node: Node, *kinds: str) -> list[tuple[PortField, Edge]]:
    """The ports by which a node reads columns of these kinds, and where these were written."""
    read = [(f, edge) for f, edge in node.inputs.items() if getattr(graph.types[edge].type, "kind", None) in kinds]
    return [(f, origin(graph, edge)) for f, edge in read]


def writes(node: Node, kind: str) -> bool:
    """Whether a node writes a column of this kind; what only passes through a gate, it does not."""
    outputs = node.operator.signature.outputs.items()
    return kind in {getattr(t, "kind", None) for name, t in outputs if PortField(ROWS, name) not in node.inputs}


def log_probs(nodes: Iterable[Node], kind: str) -> Iterator[Use]:
    """The roles that those of `nodes` read which write a log-prob of `kind`."""
    for node in nodes:
        if writes(node, kind):
            yield from (use for use in node.uses if use.mode == "reads")


def with_role(graph: Graph, use: Use, role: str) -> str:
    """The node's operator with another role, as it is written: ``OldLogProb(actor=Role('actor'))``."""
    return f"{type(graph[use.node].operator).__name__}({use.field}=Role({role!r}))"
