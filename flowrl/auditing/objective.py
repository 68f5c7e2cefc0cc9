"""The stated objective of a graph: expected scores, minus KL to a reference, plus entropy.

The scores are those of the update's own responses by the last node that writes scores; KL and entropy terms are those
of the update, KL terms also those of nodes with the effect ``"kl"`` upstream of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node, Use
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.errors import AuditError
from flowrl.operators import AdaptiveKL, Generate, KLLoss, KLShape
from flowrl.protocols.protocols import Rollout, Trainer


@dataclass(frozen=True)
class KL:
    """A KL term: its weight, its reference role, and whether it is in the loss (otherwise in the reward)."""

    coef: float
    role: str
    in_loss: bool


@dataclass(frozen=True)
class StatedObjective:
    """The objective and its nodes.

    Args:
        kl: all KL terms.
        step: the first step in which all updates run; schedules have their value in this step.
    """

    role: str
    updates: tuple[str, ...]
    generator: str
    temperature: float
    scores: tuple[Edge, ...]
    kl: tuple[KL, ...]
    entropy: float
    step: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        terms = ["expected reward" if len(self.scores) == 1 else f"the sum of {len(self.scores)} expected rewards"]
        terms += [f"{one.coef:g} · KL({self.role} || {one.role})" for one in self.kl]
        return " - ".join(terms) + (f" + {self.entropy:g} · entropy" if self.entropy else "")


def stated(graph: Graph, role: str | None) -> StatedObjective:
    """The stated objective of `graph` for one of its trained roles; None where there is one."""
    trained = {use.role: None for node in graph.nodes.values() for use in node.uses if _trains(use)}
    if role not in trained and (role is not None or len(trained) != 1):
        raise AuditError(
            f"{graph.name} trains {', '.join(trained) or 'no policy'}"
            f"{'' if role is None else f', and not {role!r}'}; expected one to audit"
            f"{': audit(graph, role=...)' if trained else ''}.",
            code="audit.unsupported-graph",
            graph=graph.name,
            found=role,
            trained=list(trained),
        )
    role = next(iter(trained)) if role is None else role
    updates = [n for n in graph.nodes.values() if any(u.role == role and _trains(u) for u in n.uses)]
    generator = _generator(graph, updates[0])
    before = {name for update in updates for name in graph.ancestors(update.name)}
    scores = _scores(graph, generator.name, before | {update.name for update in updates})
    step, notes = _first_step(graph, updates), list[str]()
    if step:
        notes.append(f"It is as in step {step + 1}, the first in which {updates[-1].name} runs.")
    for name in sorted(before):
        fixed = isinstance(op := graph[name].operator, KLShape) and not isinstance(op.coef, AdaptiveKL)
        if op.states and not fixed:
            notes.append(f"{name} keeps state, which is as it is before the first step of a run.")
    kl = [*_shaped(graph, before, step, notes)]
    entropy = 0.0
    for update in updates:
        own = getattr(update.in_step(step).operator, "kl", None)
        if isinstance(own, KLLoss):
            kl.append(KL(own.coef, _reference(graph, update, "ref_log_prob"), in_loss=True))
        entropy += getattr(update.in_step(step).operator, "entropy", 0.0)
    if not scores:
        raise AuditError(
            f"no score of what {generator.name} generates reaches {updates[0].name}, so {graph.name} has no expected "
            f"reward as objective; expected a graph that learns from scores.",
            code="audit.unsupported-graph",
            graph=graph.name,
            node=updates[0].name,
        )
    generates = generator.in_step(step).operator
    temperature = generates.temperature if isinstance(generates, Generate) else 1.0
    names = tuple(update.name for update in updates)
    return StatedObjective(
        role, names, generator.name, temperature or 1.0, scores, tuple(kl), entropy, step, tuple(notes)
    )


def _trains(use: Use) -> bool:
    return use.mode == "writes" and use.goes_through(Trainer)


def _generator(graph: Graph, update: Node) -> Node:
    """The node that generates the responses of an update."""
    for field, edge in update.inputs.items():
        if field.name == "response_mask":
            maker = graph.types[edge].axes[1].partition("@")[2]
            if maker in graph and any(use.goes_through(Rollout) for use in graph[maker].uses):
                return graph[maker]
    raise AuditError(
        f"{update.name} trains on rows that no engine of {graph.name} samples, so its gradient has no expectation; "
        f"expected rows of a Generate.",
        code="audit.unsupported-graph",
        graph=graph.name,
        node=update.name,
    )


def behind_gates(graph: Graph, edge: Edge) -> Edge:
    """The origin of a column, upstream of all gates."""
    while isinstance(graph[edge.node].operator, Gate):
        edge = graph[edge.node].inputs[PortField(ROWS, edge.output)]
    return edge


def without_gates(graph: Graph, sinks: Sequence[str]) -> Graph:
    """The subgraph of some nodes without gates, so that all rows pass."""
    nodes = {}
    for node in graph.nodes.values():
        if not isinstance(node.operator, Gate):
            seen = {field: behind_gates(graph, edge) for field, edge in node.inputs.items()}
            nodes[node.name] = replace(node, inputs=seen)
    return graph.build(graph.name, nodes, tuple(sinks))


def _scores(graph: Graph, generator: str, nodes: set[str]) -> tuple[Edge, ...]:
    """The last scores, on each path, of responses of `generator` that a node turns into something other than scores."""

    def is_score(edge: Edge) -> bool:
        typed = graph.types[edge]
        return getattr(typed.type, "kind", "") == "score" and typed.axes[1].partition("@")[2] == generator

    found: dict[Edge, None] = {}
    by_gates: dict[Edge, None] = {}
    for node in (graph[name] for name in graph.nodes if name in nodes):
        writes = [Edge(node.name, output) for output in node.signature.outputs]
        read = {behind_gates(graph, edge): None for edge in node.inputs.values() if is_score(edge)}
        if isinstance(node.operator, Gate):
            by_gates |= read
        elif not any(map(is_score, writes)):
            found |= read
    found = found or by_gates
    return tuple(e for e in found if not any(e.node in graph.ancestors(other.node) for other in found))


def _first_step(graph: Graph, updates: Sequence[Node]) -> int:
    """The first step in which all these nodes run."""
    whens = {when for update in updates for when in graph.whens(update.name)}
    steps = range(max((when.start for when in whens), default=0) + math.lcm(*(when.every for when in whens)))
    for step in steps:
        if all(when.runs(step) for when in whens):
            return step
    raise AuditError(
        f"{' and '.join(update.name for update in updates)} never run in the same step, so there is no step to audit; "
        f"expected updates with a common step: change their `when`.",
        code="audit.no-common-step",
        nodes=[update.name for update in updates],
    )


def _shaped(graph: Graph, before: set[str], step: int, notes: list[str]) -> list[KL]:
    """The KL terms of the nodes before an update."""
    found = []
    for node in (graph[name] for name in graph.nodes if name in before):
        if Effect.KL not in node.effects:
            continue
        coef = getattr(node.in_step(step).operator, "coef", None)
        coef = getattr(coef, "coef", coef)  # the start value of an adaptive one
        if not isinstance(coef, float | int):
            notes.append(f"{node.name} adds KL but has no `coef`, so its weight is unknown. It is not counted.")
            continue
        found.append(KL(float(coef), _reference(graph, node, "ref_log_prob"), in_loss=False))
    return found


def _reference(graph: Graph, node: Node, port: str) -> str:
    """The role whose log-probs a port of `node` reads."""
    edges: list[Any] = [edge for field, edge in node.inputs.items() if field.name == port]
    for edge in edges:
        source = graph[behind_gates(graph, edge).node]
        for use in source.uses:
            return use.role
    raise AuditError(
        f"{node.name} adds KL, but no role computes its {port}; expected the output of a RefLogProb.",
        code="audit.no-reference",
        node=node.name,
        port=port,
    )
