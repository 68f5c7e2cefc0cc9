"""`HeldOut`: a validation as it runs, with its own engines where its edit binds other backends than the job.

Such an engine gets a separate role, and is synced before each validation, not after every step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import RoleRef
from flowrl.data.sources.source import Source
from flowrl.errors import BindError
from flowrl.rules.check import refuse_broken
from flowrl.run.training.sources import by_input
from flowrl.run.validation.validation import Validation


@dataclass(frozen=True)
class HeldOut:
    """A validation as it runs."""

    validation: Validation
    graph: Graph
    bindings: Mapping[str, Any]
    syncs: tuple[Node, ...]

    @property
    def sources(self) -> dict[str, Source]:
        """The held-out data, by input of the graph."""
        return by_input(self.graph, self.validation.data, "Validation")

    def refuse_unready(self) -> None:
        """Refuse a validation that could not run: its rules, data, roles, or the order of its weights."""
        refuse_broken(self.graph, f"The validation {self.validation.name!r}")
        _ = Plan(self.graph).order, self.sources
        if unbound := [role for role in self.graph.roles() if role not in self.graph.bindings]:
            name, role = self.validation.name, unbound[0]
            raise BindError(
                f"The validation {name!r} uses the role {role!r}, which neither it nor the job binds. Bind it: "
                f"Validation(..., bind={{{role!r}: ...}}).",
                code="job.unbound-role",
                validation=name,
                role=role,
            )


def held_out(job: Graph, validations: Iterable[Validation]) -> list[HeldOut]:
    """The validations of a job's graph, as they run."""
    taken, found = set(job.roles()), []
    for validation in validations:
        graph = validation.graph(job)
        others = [role for role, backend in graph.bindings.items() if backend != job.bindings.get(role)]
        roles = {role: _free(f"{role}_of_{re.sub(r'[^0-9A-Za-z]', '_', validation.name)}", taken) for role in others}
        taken |= set(roles.values())
        nodes = {name: _in_roles(node, name, roles) for name, node in graph.nodes.items()}
        bindings = {roles.get(role, role): backend for role, backend in graph.bindings.items()}
        graph = graph.build(graph.name, nodes, graph.sinks, bindings=bindings, allow=graph.allow)
        syncs = [node for node in Plan(job).syncs if set(node.writes) & set(roles)]
        found.append(
            HeldOut(
                validation,
                graph,
                {own: bindings[own] for own in roles.values()},
                tuple(_in_roles(node, f"{node.name}_of_{_only(node, roles)}", roles) for node in syncs),
            )
        )
    return found


def with_engines(job: Graph, found: Sequence[HeldOut]) -> Graph:
    """The job's graph and the nodes that use engines of validations: what has to be built and placed."""
    nodes, sinks, bindings = dict(job.nodes), list(job.sinks), dict(job.bindings)
    for number, one in enumerate(found):
        if not one.bindings:
            continue
        names = {name: f"{name}_{number}" for name in one.graph.nodes if name not in one.graph.inputs}
        for name, new in names.items():
            node = one.graph[name]
            inputs = {field: edge._replace(node=names.get(edge.node, edge.node)) for field, edge in node.inputs.items()}
            nodes[new] = Node(new, node.operator.named(new), inputs)
        nodes |= {node.name: node for node in one.syncs}
        sinks += [*(names.get(sink, sink) for sink in one.graph.sinks), *(node.name for node in one.syncs)]
        bindings |= one.bindings
    return job.build(job.name, nodes, sinks, job.lag, bindings, job.allow) if len(nodes) > len(job.nodes) else job


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _only(node: Node, roles: Mapping[str, str]) -> str:
    """The new name of the role that a sync writes."""
    return next(roles[role] for role in node.writes if role in roles)


def _in_roles(node: Node, name: str, roles: Mapping[str, str]) -> Node:
    """The node under this name, with renamed roles."""
    moved: dict[str, Any] = {}
    for use in (use for use in node.uses if use.role in roles):
        field, of_several, key = use.field.partition(".")
        new = RoleRef(roles[use.role])
        moved[field] = {**moved.get(field, getattr(node.operator, field)), key: new} if of_several else new
    if not moved and name == node.name:
        return node
    operator = cast("Operator", dataclasses.replace(cast(Any, node.operator), **moved))
    return Node(name, operator.in_place_of(node.operator).named(name), node.inputs)
