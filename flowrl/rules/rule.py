"""`Rule`: a row of the table of rules, and what the functions in it share."""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flowrl.core.graphs.gate import ROWS
from flowrl.core.graphs.graph import Graph, Node, Use
from flowrl.core.graphs.lineage import origin, own_line
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.errors import DefinitionError
from flowrl.protocols.protocols import Trainer

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
        source: the public issue that taught it, as ``owner/repository#number`` on GitHub; may be empty.
        check: yields ``(node, message)``; the second argument is the number of prompts a step, or None.
        everywhere: also for graphs that train nothing, such as those of validations.
    """

    id: str
    reason: str
    source: str
    check: Check
    everywhere: bool = False


RULES: list[Rule] = []
"""All rules whose modules were imported, including users' rules, by their ids."""

RETIRED = {
    "FR035": "Episodes share no state. flowrl no longer searches the source code of environments for shared state.",
    "FR036": "Coroutines do not block. flowrl no longer searches the source code of environments for blocking calls.",
    "FR040": "Row versions under `spans=True`. `graph.lag` is the only setting for spans; no node can contradict it.",
}
"""Ids of rules that no longer exist, which are never used again, each with what it was and why it is gone."""


def rule(id: str, reason: str, source: str = "", everywhere: bool = False) -> Callable[[Check], Check]:
    """Enter a function into the table; every graph is asked from then on.

    Args:
        id, reason, source, everywhere: as those of `Rule`.

    Raises:
        DefinitionError: another rule has this id. The same function, run anew in a notebook, takes its own place.
    """

    def enter(check: Check) -> Check:
        for other in [other for other in RULES if other.id == id]:
            if _written(other.check) != _written(check):
                raise DefinitionError(
                    f"the rule {id} of {_written(check)} has an id that is taken, by that of {_written(other.check)}; "
                    f"expected one of its own, such as LAB001."
                )
            RULES.remove(other)
        bisect.insort(RULES, Rule(id, reason, source, check, everywhere), key=lambda rule: rule.id)
        return check

    return enter


def _written(check: Check) -> str:
    """Where a rule is written: file and function."""
    return f"{inspect.getfile(check)}:{check.__qualname__}"


def writers(graph: Graph, protocol: type) -> list[tuple[Node, str]]:
    """Nodes that write a role through `protocol`, with the role."""
    uses = [(node, use) for node in graph.nodes.values() for use in node.uses if use.mode == "writes"]
    return [(node, use.role) for node, use in uses if use.goes_through(protocol)]


def policy_lines(graph: Graph) -> list[Node]:
    """The nodes on the way to updates of policies, each once."""
    return list({n.name: n for node, _ in writers(graph, Trainer) for n in own_line(graph, node.name)}.values())


def read_through(nodes: Iterable[Node], protocol: type) -> set[str]:
    """Roles that these nodes read through `protocol`."""
    return {use.role for node in nodes for use in node.uses if use.mode == "reads" and use.goes_through(protocol)}


def of_kind(graph: Graph, node: Node, *kinds: str) -> list[tuple[PortField, Edge]]:
    """The ports by which a node reads columns of these kinds, and where these were written."""
    read = [(f, edge) for f, edge in node.inputs.items() if getattr(graph.types[edge].type, "kind", None) in kinds]
    return [(f, origin(graph, edge)) for f, edge in read]


def writes(node: Node, kind: str) -> bool:
    """Whether a node writes a column of this kind; what only passes through a gate, it does not."""
    outputs = node.signature.outputs.items()
    return kind in {getattr(t, "kind", None) for name, t in outputs if PortField(ROWS, name) not in node.inputs}


def log_probs(nodes: Iterable[Node], kind: str) -> Iterator[Use]:
    """The roles that those of `nodes` read which write a log-prob of `kind`."""
    for node in nodes:
        if writes(node, kind):
            yield from (use for use in node.uses if use.mode == "reads")


def set_role(use: Use, role: str) -> str:
    """The edit that gives a node another role: ``edit(set={'old_log_prob.actor': Role('actor')})``."""
    return f"edit(set={{'{use.node}.{use.field}': Role({role!r})}})"
