"""`Lag`: by how far generation may run ahead, and whether weights change under answers that are under way.

A graph says the first by its `lag`. The second is said by its nodes: a `Sync` with ``caches`` swaps weights under
answers, and an update with ``spans`` reads which version sampled each token. `edit(lag=Lag(...))` sets both.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import origin
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.errors import GraphError, ParameterError
from flowrl.protocols.protocols import Caches
from flowrl.spec import Spec, parameters


class Lag(Spec):
    """How far generation may run ahead: ``edit(lag=Lag(2, spans=True))``; ``edit(lag=2)`` is ``edit(lag=Lag(2))``.

    Args:
        versions: by so many it may run ahead of what is trained; 0 is on-policy.
        spans: a sync does not wait for answers of later steps that are under way: they go on with the new weights from
            one token to the next, and every token bears the version that sampled it (`token_version`).
        caches: what then becomes of the keys and values that were computed of such answers with the old weights.
            ``"recompute"`` computes them anew, so that each token is drawn by one version of the policy, as its version
            says. ``"reuse"`` saves that, and draws by new weights over old keys and values, which is the policy of no
            version.

    Raises:
        ParameterError: spans without running ahead, or `caches` without spans.
    """

    timeless = True

    versions: int = Field(ge=0, strict=True)
    spans: bool = False
    caches: Caches = "recompute"

    def __post_init__(self) -> None:
        if self.spans and not self.versions:
            raise ParameterError("Lag(0, spans=True) has nothing under way as weights change; expected Lag(1, ...).")
        if self.caches == "reuse" and not self.spans:
            raise ParameterError("caches='reuse' is of answers under which weights change; expected spans=True, too.")


def swaps(graph: Graph) -> list[str]:
    """The nodes of a graph that swap weights under answers that are under way."""
    return [node.name for node in graph.nodes.values() if Effect.SPANS in node.effects]


def changed_by(graph: Graph, lag: Lag) -> dict[str, Any]:
    """What `edit(set=...)` is to say, so that weights change under answers in a graph, or no longer do.

    Raises:
        GraphError: it has no node that could swap them.
    """
    caches = lag.caches if lag.spans else None
    found: dict[str, tuple[Node, Any]] = {
        f"{node.name}.caches": (node, caches) for node in graph.nodes.values() if _swaps(node)
    }
    if lag.spans and not found:
        raise GraphError(
            f"{lag!r} lets weights change under answers that are under way, and {graph.name} has no node that could "
            f"change them so; expected a Sync, or edit(lag={lag.versions})."
        )
    for node in graph.nodes.values():
        if "spans" in parameters(node.operator) and token_versions(graph, node):
            found[f"{node.name}.spans"] = node, lag.spans
    return {
        path: value for path, (node, value) in found.items() if getattr(node.operator, path.rpartition(".")[2]) != value
    }


def _swaps(node: Node) -> bool:
    return node.is_sync and "caches" in parameters(node.operator)


def row_versions(graph: Graph, node: Node) -> dict[PortField, Edge]:
    """The ports by which a node reads which version of the policy sampled each row, and where that was written."""
    found = {}
    for field, edge in node.inputs.items():
        if getattr(graph.types[edge].type, "name", None) == "policy_version":
            found[field] = origin(graph, edge)
    return found


def token_versions(graph: Graph, node: Node) -> bool:
    """Whether what wrote the versions of the rows that a node reads writes those of their tokens, too."""
    written = (graph[edge.node].operator.signature.outputs for edge in row_versions(graph, node).values())
    return any("token_version" in outputs for outputs in written)
