"""`Job`: a graph whose roles are bound to backends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from flowrl.core.backend import refuse_unsynced
from flowrl.core.edit import edit
from flowrl.core.graph import Graph
from flowrl.core.lineage import roles_of_tokens
from flowrl.core.plan import Plan
from flowrl.core.protocols import Trainer
from flowrl.core.rules import require
from flowrl.core.session import Session
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.data.vocabulary import refuse_other_vocabularies
from flowrl.errors import BindError, GraphError
from flowrl.run.build import EngineBuilder
from flowrl.run.local import local_steps
from flowrl.run.place import Place, lay_out
from flowrl.run.steps import Steps

GraphT = TypeVar("GraphT", bound=Graph)


@dataclass(frozen=True)
class Job(Generic[GraphT]):
    """A bound graph: ``grpo(reward_fn).bind(actor=..., ref=..., rollout=...)``. Nothing is loaded before it runs.

    Args:
        graph: with its bindings.
        place: where it runs, on Ray; None is this process.

    Raises:
        BindError: `place` is no place.
    """

    graph: GraphT
    place: Place | None = None

    def __post_init__(self) -> None:
        if self.place is not None and not isinstance(self.place, Place):
            raise BindError(
                f"place={self.place!r} is no place; expected one such as Colocate(gpus=2) or Split(train=1, rollout=1) "
                f"of flowrl, or None for this process."
            )

    def edit(self, *misplaced: Any, **verbs: Any) -> Job[GraphT]:
        """`Graph.edit` on the job's graph; ``edit(bind={"rollout": ...})`` swaps an engine and nothing else."""
        return replace(self, graph=edit(self.graph, *misplaced, **verbs))

    def refuse_unready(self, prompts: int | None = None) -> None:
        """Everything that can be refused before a model loads.

        Args:
            prompts: prompts a step, where they are known.

        Raises:
            BindError: a role is not bound, the models of two that share tokens have other vocabularies, or nothing
                carries weights to an engine that generates and is not frozen.
            GraphError: a lag, which no executor can run yet; a step in which nothing would run; or weights that cannot
                be kept in order.
            RuleError: a rule is broken.
        """
        unbound = [role for role in self.graph.roles() if role not in self.graph.bindings]
        if unbound:
            use = self.graph.roles()[unbound[0]][0]
            raise BindError(
                f"{self.graph.name} leaves {', '.join(map(repr, unbound))} unbound ({use.node} needs a "
                f"{use.protocol.__name__} as {unbound[0]!r}); bind it: job.edit(bind={{{unbound[0]!r}: ...}})."
            )
        if self.graph.lag:
            raise GraphError(
                f"{self.graph.name} lets generation run {self.graph.lag} version(s) ahead, and no executor can do that "
                f"yet; run it on-policy: job.edit(lag=0)."
            )
        self.graph.refuse_idle()
        require(self.graph, prompts)
        _ = Plan(self.graph).order
        syncs = {role: node.name for node in Plan(self.graph).syncs for role in node.writes}
        for role in self.graph.generators:
            refuse_unsynced(role, self.graph.bindings[role], syncs.get(role))
        models = sorted(self.graph.bindings.items(), key=lambda bound: Trainer not in bound[1].serves)
        of_tokens = roles_of_tokens(self.graph)
        refuse_other_vocabularies({role: b.starts_from for role, b in models if b.starts_from and role in of_tokens})
        many = [role for role, backend in self.graph.bindings.items() if backend.ranks > 1]
        if self.place is not None:
            lay_out(self.graph, self.place)
        elif many:
            backend = self.graph.bindings[many[0]]
            raise BindError(
                f"the role {many[0]!r} wants {backend.ranks} ranks, which one process cannot be; say where they run: "
                f"graph.bind(..., place=Colocate(gpus={backend.ranks * backend.slots_per_rank}))."
            )

    def refuse_missing(self) -> None:
        """Refuse what the engines would not find on this machine, unless they may be on others.

        Raises:
            BindError: a model's folder is missing; names the role.
        """
        if self.place is not None and self.place.elsewhere:
            return
        for role, backend in self.graph.bindings.items():
            try:
                backend.refuse_missing()
            except BindError as error:
                raise BindError(f"the role {role!r}: {error}") from error

    def plan(self) -> str:
        """The plan, and where the place puts the processes of the roles that are bound.

        Raises:
            GraphError: weights cannot be kept in order.
            BindError: the place has no room for the roles.
        """
        plan = Plan(self.graph)
        if self.place is None:
            return f"{plan}\neverything runs in one process"
        lines = [str(plan), f"processes of {type(self.place).__name__}; those of one slot take turns:"]
        hosts = lay_out(self.graph, self.place)
        for slot in range(self.place.slots):
            lines.append(f"  slot {slot}: {', '.join(host.name for host in hosts if slot in host.slots) or 'free'}")
        lines += [
            f"  {host.name} is one process over the slots {', '.join(map(str, host.slots))}"
            for host in hosts
            if len(host.slots) > 1
        ]
        if any(node.home is None for node in plan.order):
            lines.append("  no slot: general")
        return "\n".join(lines)

    def build(self, seed: int = 0) -> dict[str, Any]:
        """Load the live engines in this process, by role."""
        return EngineBuilder(self.graph.bindings, seed).all()

    @contextmanager
    def open(self, seed: int = 0) -> Iterator[Steps]:
        """The job with all engines loaded, in this process or at its place; what it starts ends with the block.

        Raises:
            RuleError, BindError, GraphError: before any model is loaded; see `refuse_unready` and `refuse_missing`.
        """
        self.refuse_unready()
        self.refuse_missing()
        if self.place is None:
            with EngineBuilder(self.graph.bindings, seed).live() as engines:
                yield local_steps(Plan(self.graph), engines, seed)
            return
        with self.place.open(self.graph, seed) as steps:
            yield steps

    @contextmanager
    def eager(self, seed: int = 0) -> Iterator[Session]:
        """Operators that are called inside the block run on this job's live engines, which are in sync at its start.

        The engines are in this process, wherever the job's place is, so that a debugger sees them; they end with the
        block.
        """
        replace(self, place=None).refuse_unready()
        with EngineBuilder(self.graph.bindings, seed).live() as engines:
            session = Session(engines, seed)
            local_steps(Plan(self.graph), engines, seed).sync()
            with session.active():
                yield session


def ends_of_responses(graph: Graph) -> str | None:
    """What ends a response, and what says so, in words; None where the model that answers, or its tokeniser, is not on
    this machine.

    Raises:
        DataError: the tokeniser does not load.
    """
    backends = [graph.bindings[role] for role in graph.generators if role in graph.bindings]
    owners = [graph.bindings.get(backend.shares) if backend.shares else backend for backend in backends]
    folders = [owner.starts_from for owner in owners if owner is not None and owner.starts_from]
    there = folders and any(Path(folders[0]).glob("tokenizer*"))
    return ChatTokenizer(folders[0]).said_ends if there else None
