"""Fusing: compute the log-probs of a scorer in the first forward pass of the update that trains the same weights.

The graph itself does not change; `fused` of it runs, with the same numbers. A scorer and an update are fused if both
read the same columns, the update makes one pass over all rows at once, its backend declares that this pass has the
scorer's bits, and no ancestor of the update reads the scorer's output. Other readers of that output then run after the
update, so they must not use weights, which would have changed.
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
from flowrl.core.operators.symbols import Edge
from flowrl.protocols.backend import Backend

GraphT = TypeVar("GraphT", bound=Graph)


@runtime_checkable
class FusableUpdate(Protocol):
    """An operator that writes weights, and may compute what a scorer computes with them before."""

    def fusing(self, scorer: Operator) -> Operator | str | None:
        """This operator as a `FusedUpdate`: it writes the output of `scorer` from its first pass and does not read it.

        Returns the reason, as a phrase after its name, if that is impossible; None if `scorer` computes something else.
        """
        ...


@runtime_checkable
class FusedUpdate(Protocol):
    """The operator that `FusableUpdate.fusing` returns: it also writes the output of the node `scorer`."""

    scorer: str

    @property
    def unfused(self) -> Operator:
        """The operator of the graph before fusing."""
        ...


@dataclass(frozen=True)
class Fusing:
    """`scorer` computes what the first pass of `update` computes; `why_not` is the reason if they are not fused."""

    scorer: str
    update: str
    why_not: str | None


def fusings(graph: Graph, unbound: bool = False) -> list[Fusing]:
    """The candidates for fusing in a graph; `unbound` assumes same bits for a role without a backend."""
    found = []
    for update in graph.nodes.values():
        if isinstance(update.operator, FusableUpdate):
            before = graph.ancestors(update.name)
            for scorer in (node for node in graph.nodes.values() if node.name in before):
                if (made := update.operator.fusing(scorer.operator)) is not None:
                    found.append(Fusing(scorer.name, update.name, _why_not(graph, scorer, update, made, unbound)))
    return found


def fused(graph: GraphT, unbound: bool = False) -> GraphT:
    """The graph that runs: `graph` with everything fused that can be; see `fusings`."""
    while (one := next((one for one in fusings(graph, unbound) if one.why_not is None), None)) is not None:
        graph = _rewritten(graph, graph[one.scorer], graph[one.update])
    return graph


def scorers(graph: Graph) -> dict[str, str]:
    """In a `fused` graph: the update that writes the output of each removed node, by that node's name."""
    operators = ((name, node.operator) for name, node in graph.nodes.items())
    return {operator.scorer: name for name, operator in operators if isinstance(operator, FusedUpdate)}


def as_in_graph(operator: Operator, edge: Edge) -> Edge:
    """An output of an operator of a `fused` graph, by its name in the graph before fusing."""
    if isinstance(operator, FusedUpdate) and edge.output not in operator.unfused.signature.outputs:
        return Edge(operator.scorer, edge.output)
    return edge


def describe(graph: Graph, optimize: bool, prompts: int | None = None) -> list[str]:
    """As text: what is fused, what is not and why, and what that saves. `graph` is the one before fusing."""
    lines = []
    for one in fusings(graph):
        rows = rows_of_step(graph, one.update, prompts)
        saved = f"a forward pass over {f'{rows} rows' if rows is not None else 'the rows of a step'}"
        if one.why_not is not None:
            lines.append(f"{one.scorer} is not fused into {one.update}: {one.why_not}")
        elif optimize:
            lines.append(f"{one.scorer} is the first pass of {one.update}: computed once, saves {saved}")
        else:
            lines.append(f"{one.scorer} would be fused into {one.update}, but optimize=False: costs {saved}")
    return lines


def _why_not(graph: Graph, scorer: Node, update: Node, made: Operator | str, unbound: bool) -> str | None:
    """Why a scorer is not fused into an update; `made` is what `FusableUpdate.fusing` returned."""
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
        return _why_not_movable(graph, readers, later)
    return _why_not_movable(graph, readers, later) or _why_not_same_bits(graph.bindings.get(role), role, update)


def _why_not_movable(graph: Graph, readers: Sequence[str], later: set[str]) -> str | None:
    """Why a reader of the scorer's output cannot run after the update."""
    for reader in (name for name in readers if name not in later):
        moved = [reader, *(node for node in graph.nodes if node in graph.descendants(reader) and node not in later)]
        if of_weights := [name for name in moved if graph[name].roles]:
            by = "" if of_weights[0] == reader else f" for {of_weights[0]}"
            return (
                f"{reader} reads it{by}, which uses the weights of {graph[of_weights[0]].roles[0]!r} before the update"
            )
    return None


def _why_not_same_bits(backend: Backend | None, role: str, update: Node) -> str | None:
    """Why the first pass of an update may differ from the backend's scores in some bits."""
    if backend is None:
        return f"{role!r} is not bound, so it is unknown whether both have the same bits"
    ranks = backend.geometry.data_ranks
    if ranks > 1 and not any(port.field == "attention_mask" for port in update.inputs):
        return f"each of the {ranks} ranks of {role!r} gets all rows, since their lengths are unknown"
    return backend.why_not_fusable


def _rewritten(graph: GraphT, scorer: Node, update: Node) -> GraphT:
    """The graph in which `update` writes the output of `scorer`, and all readers of that output read it there."""
    made = cast(Operator, cast(FusableUpdate, update.operator).fusing(scorer.operator)).in_place_of(update.operator)
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
    """The names with their verb: one "reads", several "read"."""
    return f"{names[0]} reads" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} read"
