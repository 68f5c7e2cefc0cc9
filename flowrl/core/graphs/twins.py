"""Twins: two nodes of one operator on the same inputs.

Both depend on the same nodes, so both read weights as they are before the same updates (see
`flowrl.core.graphs.plan`). Then they compute the same, unless each draws numbers, keeps a state, or asks what is
outside of the graph.
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
    """`second` has the operator and the inputs of `first`, which comes before it.

    Args:
        first, second: names of nodes.
        apart: why they may compute other numbers all the same; None where they compute the same.
    """

    first: str
    second: str
    apart: str | None


def twins(order: Iterable[Node]) -> list[Twin]:
    """The twins among nodes. What two that compute the same write counts as one input; what writes weights has no twin.

    Args:
        order: the nodes in the order in which they run.
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
        found.append(Twin(first.name, node.name, _apart(node.operator)))
        if found[-1].apart is None:
            same[node.name] = first.name
    return found


def _apart(operator: Operator) -> str | None:
    """Why an operator may compute other numbers in another node, on the same inputs."""
    if Key in operator.signature.injected.values():
        return "each draws numbers of its own"
    if Effect.ASKS_OUTSIDE in operator.effects:
        return "each asks what is outside of the graph"
    return "each keeps a state of its own" if operator.states else None


def fix(graph: Graph, twin: Twin) -> str:
    """The edit after which a graph computes twins once: who reads the second reads the first. A sink is returned, so
    it is dropped by name."""
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
