"""Which processes a node runs in, and which slots it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.lineage import transfers
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.data.keys import node_key
from flowrl.errors import BindError, GraphError
from flowrl.run.engine.runner import Counts, Task
from flowrl.run.placement.place import ProcessSpec


def processes_of(node: Node, processes: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """The processes that run a node: all ranks of the role that it writes, else of the one that it reads; none without
    a role."""
    return [process for process in processes if node.home in process.roles]


def slots_of(node: Node, processes: Sequence[ProcessSpec]) -> frozenset[int]:
    """The slots that a node occupies: those of all its roles, since a sync also occupies the trainer. A sync during
    generation occupies only the trainer."""
    roles = set(node.reads if Effect.SPANS in node.effects else node.roles)
    return frozenset(slot for process in processes if roles & set(process.roles) for slot in process.slots)


def rows_of_ranks(task: Task, ranks: int) -> list[Counts | None]:
    """The rows of each data rank of an operator over the whole batch, as its `shards` splits them.

    None is all rows, for every rank if the lengths of the rows are unknown.
    """
    operator = task.node.operator
    if task.lengths is None:
        return [None] * ranks
    key = node_key(task.seed, task.step or 0, operator.name)
    dealt = operator.shards(torch.from_numpy(task.lengths.tokens), ranks, key)
    return [None] * ranks if dealt is None else [rows.numpy() for rows in dealt]


def refuse_unplaceable(plan: Plan, hosts: list[ProcessSpec]) -> None:
    """Refuse nodes that no process could run."""
    for node in plan.order:
        roles = node.roles
        separate = [role for role in roles if not any({role, roles[0]} <= set(host.roles) for host in hosts)]
        if separate and not transfers(node):
            raise BindError(
                f"{node.name} uses the roles {', '.join(map(repr, roles))}, but {separate[0]!r} runs in another "
                f"process than {roles[0]!r}. Split {node.name} into two nodes with a column between them, or use roles "
                f"that share weights.",
                code="place.separate-roles",
                node=node.name,
                roles=roles,
            )
        ranks = max((host.mesh.data_ranks for host in hosts if roles and roles[0] in host.roles), default=1)
        by_batch = node.operator.granularity == "batch" or node.operator.creates_axis("batch")
        if node.operator.states and ranks > 1 and not by_batch:
            raise GraphError(
                f"{node.name} keeps the state {', '.join(node.operator.states)} across steps, but each of the {ranks} "
                f"ranks of its role {roles[0]!r} would update its own copy from its own rows. Set granularity = "
                f"'batch', or bind {roles[0]} with one rank.",
                code="place.ranks",
                node=node.name,
                role=roles[0],
                ranks=ranks,
                states=list(node.operator.states),
            )
        if node.operator.granularity == "group" and ranks > 1 and uid_field(node) is None:
            raise GraphError(
                f"{node.name} needs whole groups and its role {roles[0]!r} has {ranks} ranks, but it has no port for "
                f"the group of a row. Add an input of the type Uid, or set granularity = 'batch'.",
                code="place.ranks",
                node=node.name,
                role=roles[0],
                ranks=ranks,
            )


def uid_field(node: Node) -> PortField | None:
    """The port field that tells a node the group of each row."""
    types = node.signature.fields
    uids = (field for field in node.inputs if getattr(types[field], "kind", "") == "group")
    return next((field for field in uids if getattr(types[field], "on_batch", False)), None)
