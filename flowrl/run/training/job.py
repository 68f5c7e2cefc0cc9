"""`Job`: a graph whose roles are bound to backends."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from flowrl.core.graphs.fusing import describe as describe_fusing
from flowrl.core.graphs.fusing import fused
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lag import swaps
from flowrl.core.graphs.lineage import roles_of_tokens
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.session import Session
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.vocabulary import refuse_other_vocabularies
from flowrl.edits.edit import edit
from flowrl.errors import BindError, FlowrlError, GraphError
from flowrl.protocols.backend import refuse_unfit, refuse_unsynced
from flowrl.protocols.protocols import LiveWeightUpdate, Trainer
from flowrl.rules.check import require
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.schedule import Schedule
from flowrl.run.engine.steps import Steps
from flowrl.run.placement.place import Place, lay_out
from flowrl.spec import written

logger = logging.getLogger(__name__)

GraphT = TypeVar("GraphT", bound=Graph)


@dataclass(frozen=True)
class Job(Generic[GraphT]):
    """A bound graph: ``grpo(reward_fn).bind(actor=..., ref=..., rollout=...)``. Nothing is loaded before it runs.

    Args:
        graph: with its bindings.
        place: where it runs, on Ray; None is this process.
        optimize: compute once what the graph says twice, with the same numbers; see `flowrl.core.graphs.fusing`.

    Raises:
        BindError: `place` is no place.
    """

    graph: GraphT
    place: Place | None = None
    optimize: bool = True

    def __post_init__(self) -> None:
        if self.place is not None and not isinstance(self.place, Place):
            raise BindError(
                f"place={self.place!r} is no place; expected one such as Colocate(gpus=2) or Split(train=1, rollout=1) "
                f"of flowrl, or None for this process."
            )

    @cached_property
    def runs(self) -> GraphT:
        """The graph that runs: `graph`, or what it is where it is optimised.

        Raises:
            GraphError: weights cannot be kept in order.
        """
        return fused(self.graph) if self.optimize else self.graph

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
            GraphError: a step in which nothing would run; weights that cannot be kept in order; or a lag by which nodes
                would wait for each other.
            RuleError: a rule is broken.
        """
        unbound = [role for role in self.graph.roles() if role not in self.graph.bindings]
        if unbound:
            use = self.graph.roles()[unbound[0]][0]
            raise BindError(
                f"{self.graph.name} leaves {', '.join(map(repr, unbound))} unbound ({use.node} needs a "
                f"{use.protocol.__name__} as {unbound[0]!r}); bind it: job.edit(bind={{{unbound[0]!r}: ...}})."
            )
        self.graph.refuse_idle()
        require(self.graph, prompts)
        plan = Plan(self.runs)
        _ = plan.order
        if self.graph.lag:
            Schedule(plan, self.graph.lag).refuse_deadlock()
        syncs = {role: node.name for node in plan.syncs for role in node.writes}
        for role in self.graph.generators:
            refuse_unsynced(role, self.graph.bindings[role], syncs.get(role))
        self._refuse_unable()
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
            FlowrlError: what an operator refuses when it is tried, such as an EpisodeError; names the node.
        """
        if self.place is not None and self.place.elsewhere:
            return
        for role, backend in self.graph.bindings.items():
            try:
                backend.refuse_missing()
            except BindError as error:
                raise BindError(f"the role {role!r}: {error}") from error
        for name, node in self.graph.nodes.items():
            try:
                node.initial_operator.rehearse(lambda role: tokenizer_of(self.graph, role))
            except FlowrlError as error:
                raise type(error)(f"{name}: {error}") from error

    def no_gain(self) -> str | None:
        """Why generation that runs ahead gains nothing where this job runs; None where it may, or there is no lag."""
        if not self.graph.lag:
            return None
        if self.place is None:
            return f"lag={self.graph.lag} gains nothing in one process, where one node runs at a time"
        if not (shared := self._taking_turns()):
            return None
        return (
            f"lag={self.graph.lag} gains nothing with {written(self.place)}: {' and '.join(shared)} take turns on its "
            f"slots, so nothing is sampled while something is trained; give each its own: Split(train=..., rollout=...)"
        )

    def warn_of_no_gain(self) -> None:
        """Say where a lag gains nothing."""
        if (why := self.no_gain()) is not None:
            logger.warning("%s: %s.", self.graph.name, why)

    def _taking_turns(self) -> list[str]:
        """The first engine that is synced and shares a slot with a trained role, and that role; else nothing."""
        hosts = [] if self.place is None else lay_out(self.graph, self.place)
        slots: dict[str, set[int]] = defaultdict(set)
        for host in hosts:
            for role in host.roles:
                slots[role].update(host.slots)
        synced = [role for node in Plan(self.graph).syncs for role in node.writes]
        pairs = [[a, b] for a in synced for b in self.graph.trained if slots[a] & slots[b]]
        return pairs[0] if pairs else []

    def _refuse_unable(self) -> None:
        """Refuse an engine that could not sample by older weights than the trainer's while that goes on, or not take
        over weights while it samples.

        Raises:
            GraphError, BindError: naming it.
        """
        for sync in swaps(self.graph):
            for role in self.graph[sync].writes:
                refuse_unfit(role, self.graph.bindings[role], sync, LiveWeightUpdate)
                self.graph.bindings[role].refuse_swap(cast(Any, self.graph[sync].operator).caches)
                self._refuse_together(role, sync)
        if not self.graph.lag:
            return
        ahead = f"{self.graph.name} lets generation run {self.graph.lag} version(s) ahead"
        for role in (role for node in Plan(self.graph).syncs for role in node.writes):
            if (owner := self.graph.bindings[role].shares) in self.graph.trained:
                raise GraphError(
                    f"{ahead}, and {role!r} samples by the very weights of {owner!r}, which training changes under it; "
                    f"give it a copy: bind={{{role!r}: TorchRollout('model')}}, or edit(lag=0)."
                )
        if (turns := self._taking_turns()) and self.graph.bindings[turns[0]].loses_weights_asleep:
            raise GraphError(
                f"{ahead}, and {turns[0]!r} takes turns with {turns[1]!r} and loses its weights as it sleeps, so it "
                f"could not sample a later batch by the same ones; keep them (sleep_level=1), give it slots of its own "
                f"(Split), or edit(lag=0)."
            )

    def _refuse_together(self, role: str, sync: str) -> None:
        """Refuse ranks that compute an answer together, and so could not swap weights each between its own tokens."""
        backend = self.graph.bindings[role]
        if backend.collective and backend.ranks > 1:
            raise GraphError(
                f"{sync} changes weights under answers that are under way, and the {backend.ranks} ranks of {role!r} "
                f"compute them together, so one could not change them alone; bind {role} with one rank, or without "
                f"spans: edit(lag={self.graph.lag})."
            )

    def plan(self, prompts: int | None = None) -> str:
        """The plan, what is fused in it, and where the place puts the processes of the roles that are bound.

        Args:
            prompts: a step, where they are known.

        Raises:
            GraphError: weights cannot be kept in order.
            BindError: the place has no room for the roles.
        """
        plan = Plan(self.runs)
        lines = [str(plan), *describe_fusing(self.graph, self.optimize, prompts)]
        lines += [line for line in Plan(self.graph).twice() if line not in plan.twice()]  # one of two may be fused
        notes = [] if (why := self.no_gain()) is None else [why]
        if self.place is None:
            return "\n".join([*lines, "everything runs in one process", *notes])
        lines += [f"processes of {type(self.place).__name__}; those of one slot take turns:"]
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
        return "\n".join([*lines, *notes])

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
        if self.place is not None:
            self.place.warm_up(self.graph)
        self.refuse_missing()
        if self.place is None:
            with EngineBuilder(self.graph.bindings, seed).live() as engines:
                yield local_steps(Plan(self.runs), engines, seed)
            return
        with self.place.open(self.runs, seed) as steps:
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
    for role in graph.generators:
        if (tokenizer := tokenizer_of(graph, role)) is not None:
            return tokenizer.said_ends
    return None


def tokenizer_of(graph: Graph, role: str) -> ChatTokenizer | None:
    """The tokeniser of the model that a role starts from; None where it, or the model, is not on this machine.

    Raises:
        DataError: it does not load.
    """
    backend = graph.bindings.get(role)
    owner = graph.bindings.get(backend.shares) if backend is not None and backend.shares else backend
    folder = owner.starts_from if owner is not None else None
    return ChatTokenizer(folder) if folder and any(Path(folder).glob("tokenizer*")) else None
