"""What a graph states that it makes large: expected scores, less KL to a reference, and entropy.

It is read off the graph: the scores are those that the update's own answers get from the last node that writes scores;
KL is that of what says so of itself (the effect ``"kl"``) on the way to the update, and of the update; so is entropy.
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
    """A KL term: its weight, to which role, and whether it is in the loss (else in the reward)."""

    coef: float
    role: str
    in_loss: bool


@dataclass(frozen=True)
class StatedObjective:
    """What is stated, and where.

    Args:
        role: which is trained.
        updates: the nodes that train it.
        generator: the node that makes the answers.
        temperature: at which.
        scores: where the scores are.
        kl: all terms.
        entropy: the weight of entropy.
        step: the first in which all updates run; numbers over time are those of this step.
        notes: what is not sure, each in a sentence.
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
    """What `graph` states for one of the roles that it trains.

    Args:
        graph: see the module's docstring.
        role: which; None where there is one.

    Raises:
        AuditError: no policy is trained, or several are and none was named; it is not trained on answers of its own, or
            no score reaches the update.
    """
    trained = {use.role: None for node in graph.nodes.values() for use in node.uses if _trains(use)}
    if role not in trained and (role is not None or len(trained) != 1):
        raise AuditError(
            f"{graph.name} trains {', '.join(trained) or 'no policy'}"
            f"{'' if role is None else f', and not {role!r}'}; expected one to audit"
            f"{': audit(graph, role=...)' if trained else ''}."
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
            f"no score of what {generator.name} generates reaches {updates[0].name}, so {graph.name} states no "
            f"expected reward to hold its update against; expected one that learns from scores."
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
    """The node that makes the answers that an update trains on."""
    for field, edge in update.inputs.items():
        if field.name == "response_mask":
            maker = graph.types[edge].axes[1].partition("@")[2]
            if maker in graph and any(use.goes_through(Rollout) for use in graph[maker].uses):
                return graph[maker]
    raise AuditError(
        f"{update.name} trains on rows that no engine of {graph.name} samples, so there is no expectation to hold its "
        f"gradient against; expected rows of a Generate."
    )


def behind_gates(graph: Graph, edge: Edge) -> Edge:
    """Where a column comes from, seen through the gates that let it pass."""
    while isinstance(graph[edge.node].operator, Gate):
        edge = graph[edge.node].inputs[PortField(ROWS, edge.output)]
    return edge


def without_gates(graph: Graph, sinks: Sequence[str]) -> Graph:
    """What computes some nodes, where all rows go on."""
    nodes = {}
    for node in graph.nodes.values():
        if not isinstance(node.operator, Gate):
            seen = {field: behind_gates(graph, edge) for field, edge in node.inputs.items()}
            nodes[node.name] = replace(node, inputs=seen)
    return graph.build(graph.name, nodes, tuple(sinks))


def _scores(graph: Graph, generator: str, nodes: set[str]) -> tuple[Edge, ...]:
    """The scores of answers of `generator` that something other than scores is made of, the last ones on each way.

    A gate lets scores pass, and counts only where nothing else reads them: then they say which rows are trained on.
    """

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
        f"{' and '.join(update.name for update in updates)} never run in one step, so there is no step to audit; "
        f"expected updates that meet: see `when`."
    )


def _shaped(graph: Graph, before: set[str], step: int, notes: list[str]) -> list[KL]:
    """The KL terms of the nodes before an update."""
    found = []
    for node in (graph[name] for name in graph.nodes if name in before):
        if Effect.KL not in node.effects:
            continue
        coef = getattr(node.in_step(step).operator, "coef", None)
        coef = getattr(coef, "coef", coef)  # of one that adapts, where it starts
        if not isinstance(coef, float | int):
            notes.append(f"{node.name} says that it adds KL, but not how much: it has no `coef`. It is not counted.")
            continue
        found.append(KL(float(coef), _reference(graph, node, "ref_log_prob"), in_loss=False))
    return found


def _reference(graph: Graph, node: Node, port: str) -> str:
    """The role whose log-probs `node` reads by a port."""
    edges: list[Any] = [edge for field, edge in node.inputs.items() if field.name == port]
    for edge in edges:
        source = graph[behind_gates(graph, edge).node]
        for use in source.uses:
            return use.role
    raise AuditError(f"{node.name} adds KL, and no role scores what it reads; expected {port} of a RefLogProb.")
