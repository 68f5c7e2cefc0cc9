"""Which processes a node runs in, and which slots it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.data.keys import node_key
from flowrl.errors import BindError, GraphError
from flowrl.run.engine.runner import Counts, Task
from flowrl.run.placement.place import ProcessSpec


def processes_of(node: Node, processes: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Where a node runs: every rank of the role that it writes, else of the one that it reads; nowhere of these
    without a role."""
    return [process for process in processes if node.home in process.roles]


def slots_of(node: Node, processes: Sequence[ProcessSpec]) -> frozenset[int]:
    """The slots that a node takes while it runs: those of all its roles, since a sync keeps the trainer too. One that
    swaps weights under answers keeps the trainer alone."""
    roles = set(node.reads if Effect.SPANS in node.effects else node.roles)
    return frozenset(slot for process in processes if roles & set(process.roles) for slot in process.slots)


def rows_of_ranks(task: Task, ranks: int) -> list[Counts | None]:
    """The rows of each rank of an operator over the whole batch, as it deals them out itself; None is all.

    Where nobody knows how long the rows are, every rank gets all.
    """
    operator = task.node.operator
    if task.lengths is None:
        return [None] * ranks
    key = node_key(task.seed, task.step or 0, operator.name)
    dealt = operator.shares(torch.from_numpy(task.lengths.tokens), ranks, key)
    return [None] * ranks if dealt is None else [rows.numpy() for rows in dealt]


def refuse_unplaceable(plan: Plan, hosts: list[ProcessSpec]) -> None:
    """Refuse nodes that no process could run.

    Raises:
        BindError: a node uses roles of several processes, and is no sync.
        GraphError: a node goes to ranks by rows or groups, and keeps state, of which each rank would have its own; or
            it wants whole groups, and does not read which group a row is of.
    """
    for node in plan.order:
        roles = node.roles
        apart = [role for role in roles if not any({role, roles[0]} <= set(host.roles) for host in hosts)]
        if apart and not node.is_sync:
            raise BindError(
                f"{node.name} uses the roles {', '.join(map(repr, roles))}, and {apart[0]!r} lives in another "
                f"process than {roles[0]!r}; expected one, or roles that share weights: let {node.name} be two "
                f"nodes, with a column between."
            )
        ranks = max((host.ranks for host in hosts if roles and roles[0] in host.roles), default=1)
        by_batch = node.operator.granularity == "batch" or node.operator.creates_axis("batch")
        if node.operator.states and ranks > 1 and not by_batch:
            raise GraphError(
                f"{node.name} keeps {', '.join(node.operator.states)} over steps, and its role {roles[0]!r} has "
                f"{ranks} ranks, each of which would go on from the rows that it sees; give it granularity 'batch', "
                f"or bind {roles[0]} with one rank."
            )
        if node.operator.granularity == "group" and ranks > 1 and uid_field(node) is None:
            raise GraphError(
                f"{node.name} wants whole groups, and its role {roles[0]!r} has {ranks} ranks, but it does not read "
                f"which group a row is of; give it an input of the type Uid, or granularity 'batch'."
            )


def uid_field(node: Node) -> PortField | None:
    """The port field by which a node reads which group a row is of."""
    types = node.signature.fields
    uids = (field for field in node.inputs if getattr(types[field], "kind", "") == "group")
    return next((field for field in uids if getattr(types[field], "on_batch", False)), None)
