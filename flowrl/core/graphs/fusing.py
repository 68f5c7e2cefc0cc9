"""Fusing: where what a node asks of weights is the first pass of the update that writes them, it is computed once.

A graph says what is meant, and stays as it is; what runs is `fused` of it, with the same numbers. A scorer and an
update are one where both read the same columns, the update makes one pass over all rows at once, its backend says that
this pass has the scorer's bits, and nothing that the update waits for reads what the scorer writes. Whatever else reads
that then comes behind the update; so it uses no weights itself, which would be others there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast, runtime_checkable

import networkx as nx

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import rows_of_step
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.protocols.backend import Backend

GraphT = TypeVar("GraphT", bound=Graph)


@runtime_checkable
class Fuses(Protocol):
    """An operator that writes weights, and may say what another asks of them before."""

    def fusing(self, scorer: Operator) -> Operator | str | None:
        """This operator as it also writes what `scorer` does, of its first pass (`Scores`), and does not read it.

        In its place, why that cannot be, in words that follow on its name; None where `scorer` asks something else.
        """
        ...


@runtime_checkable
class Scores(Protocol):
    """What `Fuses.fusing` gives: it also writes what the node called `scorer` did."""

    scorer: str


@dataclass(frozen=True)
class Fusing:
    """`scorer` asks weights for what `update` says of them first.

    Args:
        scorer, update: names of nodes.
        apart: why they are two all the same; None where they are one.
    """

    scorer: str
    update: str
    apart: str | None


def fusings(graph: Graph, unbound: bool = False) -> list[Fusing]:
    """What may be fused in a graph, and what may not though it looks so.

    Args:
        graph: with its bindings.
        unbound: whether a role that is not bound is taken for one whose backend says that its bits are the same.
    """
    found = []
    for update in graph.nodes.values():
        if isinstance(update.operator, Fuses):
            before = graph.ancestors(update.name)
            for scorer in (node for node in graph.nodes.values() if node.name in before):
                if (made := update.operator.fusing(scorer.operator)) is not None:
                    found.append(Fusing(scorer.name, update.name, _apart(graph, scorer, update, made, unbound)))
    return found


def fused(graph: GraphT, unbound: bool = False) -> GraphT:
    """The graph that runs: whatever can be fused in `graph` is; see `fusings`."""
    while (one := next((one for one in fusings(graph, unbound) if one.apart is None), None)) is not None:
        graph = _rewritten(graph, graph[one.scorer], graph[one.update])
    return graph


def scorers(graph: Graph) -> dict[str, str]:
    """Of a graph that was `fused`: by node that is no more, the update that writes what it did."""
    operators = ((name, node.operator) for name, node in graph.nodes.items())
    return {operator.scorer: name for name, operator in operators if isinstance(operator, Scores)}


def describe(graph: Graph, optimize: bool, prompts: int | None = None) -> list[str]:
    """For people: what is fused, what is not and why, and what that saves.

    Args:
        graph: before it is fused.
        optimize: whether it will be.
        prompts: a step, where known.
    """
    lines = []
    for one in fusings(graph):
        rows = rows_of_step(graph, one.update, prompts)
        saved = f"a forward pass over {f'{rows} rows' if rows is not None else 'the rows of a step'}"
        if one.apart is not None:
            lines.append(f"{one.scorer} is not fused into {one.update}: {one.apart}")
        elif optimize:
            lines.append(f"{one.scorer} is the first pass of {one.update}: computed once, saves {saved}")
        else:
            lines.append(f"{one.scorer} would be the first pass of {one.update}, but for optimize=False: costs {saved}")
    return lines


def _apart(graph: Graph, scorer: Node, update: Node, made: Operator | str, unbound: bool) -> str | None:
    """Why what is asked is not of this update's first pass; `made` is what the update says of that itself."""
    plan = Plan(graph)
    readers = [node.name for node in graph.nodes.values() if scorer.name in node.sources and node.name != update.name]
    waited_for = nx.ancestors(plan.network, update.name)
    if before := [name for name in readers if name in waited_for]:
        return f"{_listed(before)} it before"
    if isinstance(made, str):
        return f"{update.name} {made}"
    if scorer.name in graph.sinks:
        return f"{graph.name} returns what it writes"
    ports = [port for port, edge in update.inputs.items() if edge.node == scorer.name]
    if ports != [PortField(output) for output in scorer.signature.outputs]:
        return f"{update.name} reads {', '.join(map(str, ports)) or 'nothing'} of it"
    if set(graph.whens(scorer.name)) != set(graph.whens(update.name)):
        return f"{update.name} does not run in the same steps"
    if other := [(port, edge) for port, edge in scorer.inputs.items() if update.inputs.get(port) != edge]:
        return f"it reads {other[0][1]}, and {update.name} {update.inputs.get(other[0][0], 'no such column')}"
    [role] = update.writes
    later = plan.downstream(update.name)
    writers = [use.node for use in graph.roles()[role] if use.mode == "writes" and use.node != update.name]
    if others := [name for name in writers if name not in later]:
        return f"{others[0]} may write the weights of {role!r} before {update.name}"
    if unbound and role not in graph.bindings:
        return _unmoved(graph, plan, readers, later)
    return _unmoved(graph, plan, readers, later) or _unlike(graph.bindings.get(role), role, update)


def _unmoved(graph: Graph, plan: Plan, readers: Sequence[str], later: set[str]) -> str | None:
    """Why what reads what the scorer writes cannot come after the update, if it does not anyway."""
    for reader in (name for name in readers if name not in later):
        moved = [reader, *(node for node in graph.nodes if node in graph.descendants(reader) and node not in later)]
        if of_weights := [name for name in moved if graph[name].roles]:
            by = "" if of_weights[0] == reader else f" for {of_weights[0]}"
            return f"{reader} reads it{by}, which uses {graph[of_weights[0]].roles[0]!r} as it is before"
        if any(name in plan.region for name in moved):
            return f"{reader} reads it in rounds"
    return None


def _unlike(backend: Backend | None, role: str, update: Node) -> str | None:
    """Why the first pass of an update by a backend is not what it scores, bit for bit."""
    if backend is None:
        return f"{role!r} is not bound, so nobody knows whether both have the same bits"
    if backend.ranks > 1 and not any(port.field == "attention_mask" for port in update.inputs):
        return f"the {backend.ranks} ranks of {role!r} are each given all rows, since nobody knows how long these are"
    return backend.why_not_fusable


def _rewritten(graph: GraphT, scorer: Node, update: Node) -> GraphT:
    """The graph in which `update` writes what `scorer` does, and all who read that read it there."""
    made = cast(Operator, cast(Fuses, update.operator).fusing(scorer.operator)).in_place_of(update.operator)
    nodes = {}
    for name, node in graph.nodes.items():
        if name == scorer.name:
            continue
        if name == update.name:
            nodes[name] = Node(name, made, {p: edge for p, edge in node.inputs.items() if edge.node != scorer.name})
            continue
        inputs = {p: e._replace(node=update.name) if e.node == scorer.name else e for p, e in node.inputs.items()}
        nodes[name] = Node(name, node.operator, inputs)
    return graph.build(graph.name, nodes, graph.sinks, graph.lag, graph.bindings, graph.allow)


def _listed(names: Sequence[str]) -> str:
    """The names with their verb: one reads, several read."""
    return f"{names[0]} reads" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} read"
