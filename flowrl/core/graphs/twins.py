"""Twins: two nodes with the same operator and the same inputs.

Both read weights as of before the same updates (see `flowrl.core.graphs.plan`), so they compute the same, unless each
samples random numbers, has a state, or calls code outside of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.symbols import Edge
from flowrl.data.keys import Key


@dataclass(frozen=True)
class Twin:
    """`second` has the operator and the inputs of `first`, before it; `why_not` is why their numbers may differ."""

    first: str
    second: str
    why_not: str | None


def twins(order: Iterable[Node]) -> list[Twin]:
    """The twins among nodes, given in the order in which they run.

    Outputs of twins that compute the same count as one input. A node that writes weights has no twin.
    """
    found: list[Twin] = []
    seen: list[tuple[Node, dict[str, Edge]]] = []
    same: dict[str, str] = {}  # by node, the one before it that computes the same
    for node in order:
        if node.writes or not node.inputs:
            continue
        inputs = {str(at): Edge(same.get(edge.node, edge.node), edge.output) for at, edge in node.inputs.items()}
        alike = (a for a, b in seen if b == inputs and a.operator == node.operator and a.when == node.when)
        if (first := next(alike, None)) is None:
            seen.append((node, inputs))
            continue
        found.append(Twin(first.name, node.name, _why_not(node.operator)))
        if found[-1].why_not is None:
            same[node.name] = first.name
    return found


def _why_not(operator: Operator) -> str | None:
    """Why an operator may compute different numbers in another node with the same inputs."""
    if Key in operator.signature.injected.values():
        return "each samples its own random numbers"
    if Effect.EXTERNAL in operator.effects:
        return "each calls code outside of the graph"
    return "each has its own state" if operator.states else None


def fix(graph: Graph, twin: Twin) -> str:
    """The edit that removes the second twin: its readers read the first. A sink has to be dropped by name."""
    wire = {
        f"{reader.name}.{at}": f"{twin.first}.{edge.output}"
        for reader in graph.nodes.values()
        for at, edge in reader.inputs.items()
        if edge.node == twin.second
    }
    verbs: dict[str, object] = {"wire": wire} if wire else {}
    if twin.second in graph.sinks:
        verbs["drop"] = [twin.second]
    return f"edit({', '.join(f'{verb}={value!r}' for verb, value in verbs.items())})"
