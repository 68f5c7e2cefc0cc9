"""The effects of operators and losses that declare none, inferred from the columns that they read and write.

A class that overrides `effects` declares what it does; nothing is inferred for it, so ``frozenset()`` declares that it
does nothing. For other classes, a column of the user's own kind counts as the columns that it was computed from.
Dividing by a standard deviation shows in no column, so it is inferred from the source code; nothing is run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from flowrl import columns
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import generates, origin
from flowrl.core.operators.effects import Effect, HasEffects
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.symbols import Edge
from flowrl.rules.deviation import divides_by_deviation
from flowrl.rules.rule import PENALTIES, sampling_of
from flowrl.spec import parameters

OF_REFERENCE = "log-prob of the reference"
OF_ROLLOUT = "log-prob of the rollout"
OF_OLD = "log-prob of the old policy"


def effects(graph: Graph, node: Node) -> frozenset[str]:
    """What a node does: the effects that it and its losses declare, else those that its columns show."""
    found = {*node.effects}
    if Effect.ASKED in found:
        found |= _of_sampling(graph, node)
    if not _declares(node.operator):
        found |= _inferred(graph, node)
    for loss in (value for value in parameters(node.initial_operator).values() if isinstance(value, Loss)):
        if not _declares(loss):
            found |= _inferred_of_loss(graph, node, loss)
    return frozenset(found)


def over_batch(graph: Graph, node: Node) -> bool:
    """Whether a node computes over all rows; one that declares nothing and reads groups computes over these."""
    grouped = any(_kind(graph, edge) == "group" for edge in node.inputs.values()) and not _declares(node.operator)
    return node.operator.granularity == "batch" and not grouped


def sources(graph: Graph, edges: list[Edge]) -> set[Edge]:
    """The outputs that these columns come from; a column of a user's own kind counts as those it was computed from."""
    found: set[Edge] = set()
    waiting = list(edges)
    while waiting:
        edge = origin(graph, waiting.pop())
        if edge not in found:
            found.add(edge)
            if _kind(graph, edge) not in _flowrls_kinds():
                waiting += graph[edge.node].inputs.values()
    return found


def references(graph: Graph, node: Node) -> frozenset[str]:
    """The roles, or nodes without a role, that compute the log-probs of the reference that a node reads."""
    read = sources(graph, list(node.inputs.values()))
    return frozenset().union(*(_roles(graph, edge) for edge in read if _kind(graph, edge) == OF_REFERENCE))


def _inferred(graph: Graph, node: Node) -> set[str]:
    """The effects of an operator that declares none."""
    if generates(node):
        return _of_sampling(graph, node)
    written = {getattr(type, "kind", "") for type in node.signature.outputs.values()}
    read = sources(graph, list(node.inputs.values()))
    kinds = {_kind(graph, edge) for edge in read}
    found: set[str] = set()
    if written & {"advantage", "reward", "score"} and {OF_REFERENCE} < kinds and _of_policy(graph, read):
        found.add(Effect.KL)
    if "advantage" in written & kinds and {OF_ROLLOUT, OF_OLD} <= kinds:
        found.add(Effect.IMPORTANCE_CORRECTION)
    if "advantage" in written and "group" in kinds and kinds & {"advantage", "reward", "score"}:
        found.add(Effect.GROUP_BASELINE)
    if "advantage" in written and divides_by_deviation(cast(Any, type(node.operator))):
        found.add(Effect.SCALED)
    return found


def _of_sampling(graph: Graph, node: Node) -> set[str]:
    """The effects of the sampling parameters, by their names, of an operator that generates."""
    found: set[str] = set()
    for given in sampling_of(graph, node)[1]:
        if given.get("temperature") == 0 or given.get("top_k") == 1 or given.get("min_p") == 1:
            found.add(Effect.GREEDY)
        if (given.get("top_k") or 0) > 0 or (given.get("top_p") or 1) < 1 or (given.get("min_p") or 0) > 0:
            found.add(Effect.TRUNCATED)
        if any(given.get(name, free) != free for name, free in PENALTIES.items()):
            found.add(Effect.PENALIZED)
    return found


def _inferred_of_loss(graph: Graph, node: Node, loss: Loss) -> set[str]:
    """The effects of a loss that declares none."""
    ports = {field.name: edge for field, edge in node.inputs.items()}
    names = {*loss.signature.ports}
    kinds = {_kind(graph, edge) for edge in sources(graph, [edge for name, edge in ports.items() if name in names])}
    held = {Effect.REFERENCE_REGULARIZATION} if OF_REFERENCE in kinds else set()
    return held | ({Effect.IMPORTANCE_CORRECTION} if OF_ROLLOUT in kinds else set())


def _of_policy(graph: Graph, read: set[Edge]) -> bool:
    """Whether log-probs of a policy that generates are among what is read; those of a reward model do not count."""
    if any(_kind(graph, edge) == OF_ROLLOUT for edge in read):
        return True
    policies = {role for node in graph.nodes.values() if node.is_sync for role in node.reads}
    old = {role for edge in read if _kind(graph, edge) == OF_OLD for role in _roles(graph, edge)}
    return bool(old & policies if policies else old)


def _roles(graph: Graph, edge: Edge) -> frozenset[str]:
    return frozenset(graph[edge.node].reads or [edge.node])


def _kind(graph: Graph, edge: Edge) -> str:
    return str(getattr(graph.types[edge].type, "kind", ""))


def _declares(spec: HasEffects) -> bool:
    return type(spec).effects is not HasEffects.effects


@cache
def _flowrls_kinds() -> frozenset[str]:
    """The kinds of flowrl's own columns."""
    parsed = map(columns.parse, vars(columns).values())
    return frozenset(column.kind for column in parsed if column is not None)
