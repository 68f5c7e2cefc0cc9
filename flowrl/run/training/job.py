"""`Job`: a graph with a backend bound to each role."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from flowrl.core.graphs.fusing import describe as describe_fusing
from flowrl.core.graphs.fusing import fused
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import transfers, vocabularies
from flowrl.core.graphs.plan import Plan
from flowrl.core.graphs.spans import spanned, swaps
from flowrl.core.operators.session import Session
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.vocabulary import refuse_other_vocabularies
from flowrl.draw.notebook import job_html
from flowrl.edits.edit import edit
from flowrl.errors import BindError, FlowrlError, GraphError, HubError
from flowrl.files.graph_io import refuse_not_imported
from flowrl.hub.repositories import Commits
from flowrl.protocols.backend import refuse_unfit, refuse_unsynced
from flowrl.protocols.protocols import LiveWeightUpdate, Trainer
from flowrl.rules.check import require
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.engine.execution_graph import ExecutionGraph
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.steps import Steps
from flowrl.run.placement.place import Place, ProcessSpec, lay_out, together
from flowrl.run.training.prompt_lengths import folder_of
from flowrl.spec import written

logger = logging.getLogger(__name__)

GraphT = TypeVar("GraphT", bound=Graph)


@dataclass(frozen=True)
class Job(Generic[GraphT]):
    """A bound graph: ``grpo(reward_fn).bind(actor=..., ref=..., rollout=...)``. It loads nothing before it runs.

    Args:
        graph: with its bindings.
        place: where it runs, on Ray; None is this process.
        optimize: compute duplicate nodes once, with the same numbers; see `flowrl.core.graphs.fusing`.

    Raises:
        BindError: `place` is not a place.
    """

    graph: GraphT
    place: Place | None = None
    optimize: bool = True

    def __post_init__(self) -> None:
        if self.place is not None and not isinstance(self.place, Place):
            raise BindError(
                f"place={self.place!r} is not a place; expected one such as Colocate(gpus=2) or "
                f"Split(train=1, rollout=1) of flowrl, or None for this process.",
                code="job.no-place",
                found=self.place,
            )

    if not TYPE_CHECKING:  # else every attribute would pass for one of a job

        def __getattr__(self, name: str) -> NoReturn:
            hint = "Train it by Training(job, data, steps=..., prompts=...).run()."
            if hasattr(self.__dict__.get("graph"), name):
                hint = f"Its graph has: job.graph.{name}."
            raise AttributeError(f"A Job has no attribute {name!r}. {hint}", name=name, obj=self)

    @cached_property
    def runs(self) -> GraphT:
        """The graph that runs: `graph` with its lag applied, optimized if `optimize`.

        Raises:
            GraphError: the order of updates and syncs is ambiguous.
        """
        graph = spanned(self.graph)
        return fused(graph) if self.optimize else graph

    def _repr_html_(self) -> str:
        place = {} if self.place is None else {"place": str(self.place)}
        return job_html(self.graph, f"{self.graph.name}, bound", place)

    def edit(self, *misplaced: Any, **verbs: Any) -> Job[GraphT]:
        """`Graph.edit` of the job's graph; ``edit(bind={"rollout": ...})`` replaces only an engine."""
        return replace(self, graph=edit(self.graph, *misplaced, **verbs))

    def refuse_unready(self, prompts: int | None = None) -> None:
        """Check everything that can be checked before a model loads.

        Raises:
            BindError: a role is not bound, two roles that share tokens have different vocabularies, or no node syncs
                an engine that generates and is not frozen.
            GraphError: the graph was loaded without imports; a step in which no node would run; an ambiguous order of
                updates and syncs; or a lag with which nodes would wait for each other.
            RuleError: the graph breaks a rule.
        """
        refuse_not_imported(self.graph)
        unbound = [role for role in self.graph.roles() if role not in self.graph.bindings]
        if unbound:
            use = self.graph.roles()[unbound[0]][0]
            raise BindError(
                f"{self.graph.name} leaves {', '.join(map(repr, unbound))} unbound ({use.node} needs a "
                f"{use.protocol.__name__} as {unbound[0]!r}). Bind it: job.edit(bind={{{unbound[0]!r}: ...}}).",
                code="job.unbound-role",
                graph=self.graph.name,
                role=unbound[0],
                node=use.node,
                expected=use.protocol.__name__,
            )
        self.graph.refuse_idle()
        require(self.graph, prompts)
        plan = Plan(self.runs)
        _ = plan.order
        if lag := self.graph.lag.versions:
            ExecutionGraph(plan, lag).refuse_deadlock()
        syncs = {role: node.name for node in plan.syncs for role in node.writes}
        for role in self.graph.generators:
            refuse_unsynced(role, self.graph.bindings[role], syncs.get(role))
        self._refuse_untrained()
        self._refuse_unable()
        models = sorted(self.graph.bindings.items(), key=lambda bound: Trainer not in bound[1].serves)
        for encoder, roles in vocabularies(self.graph).items():
            folder = getattr(self.graph[encoder].initial_operator, "model", None) if encoder else None
            own = {} if folder is None else {encoder: folder}
            refuse_other_vocabularies(own | {r: b.starts_from for r, b in models if b.starts_from and r in roles})
        many = [role for role, backend in self.graph.bindings.items() if backend.geometry.ranks > 1]
        if self.place is not None:
            lay_out(self.graph, self.place)
        elif many:
            backend = self.graph.bindings[many[0]]
            ranks = backend.geometry.ranks
            raise BindError(
                f"The role {many[0]!r} has {ranks} ranks, but without a place the job runs in one process. Pass a "
                f"place: graph.bind(..., place=Colocate(gpus={ranks * backend.slots_per_rank})).",
                code="job.no-place",
                role=many[0],
                ranks=ranks,
            )

    def refuse_missing(self) -> None:
        """Check that the engines find their files on this machine, unless the place may put them on others.

        Raises:
            BindError: a model's folder is missing; names the role.
            FlowrlError: what an operator refuses in its rehearsal, such as an EpisodeError; names the node.
        """
        if self.place is not None and self.place.elsewhere:
            return
        for role, backend in self.graph.bindings.items():
            with naming_role(role, BindError):
                backend.refuse_missing()
        for name, node in self.graph.nodes.items():
            try:
                node.initial_operator.rehearse(lambda role: tokenizer_of(self.graph, role))
            except FlowrlError as error:
                facts = {**error.facts, "node": name}
                raise type(error)(f"{name}: {error.message}", code=error.code, **facts) from error

    def pinned(self, commits: Commits | None = None) -> Job[GraphT]:
        """The job with the repositories of its models resolved to commits, by default those of now; their configuration
        and tokenizers are then on this machine.

        Raises:
            HubError: a repository cannot be resolved or lacks files; names the role.
        """
        found, commits = {}, commits or Commits()
        for role, backend in self.graph.bindings.items():
            with naming_role(role, HubError):
                found[role] = backend.pinned(commits)
        return self if found == dict(self.graph.bindings) else replace(self, graph=self.graph.bound(found))

    def no_gain(self) -> str | None:
        """Why a lag gains nothing at this job's place; None if it may gain, or there is no lag."""
        if not (lag := self.graph.lag.versions):
            return None
        if self.place is None:
            return f"lag={lag} gains nothing in one process, where one node runs at a time"
        if not (shared := self._taking_turns()):
            return None
        return (
            f"lag={lag} gains nothing with {written(self.place)}: {' and '.join(shared)} take turns on its "
            f"slots, so sampling and training never overlap; give each its own slots: Split(train=..., rollout=...)"
        )

    def warn_of_no_gain(self) -> None:
        """Warn if a lag gains nothing."""
        if (why := self.no_gain()) is not None:
            logger.warning("%s: %s.", self.graph.name, why)

    def _taking_turns(self) -> list[str]:
        """The first synced role that shares a slot with a trained one, and that one; else empty."""
        hosts = [] if self.place is None else lay_out(self.graph, self.place)
        slots: dict[str, set[int]] = defaultdict(set)
        for host in hosts:
            for role in host.roles:
                slots[role].update(host.slots)
        synced = [role for node in Plan(self.graph).syncs for role in node.writes]
        pairs = [[a, b] for a in synced for b in self.graph.trained if slots[a] & slots[b]]
        return pairs[0] if pairs else []

    def _refuse_untrained(self) -> None:
        """Refuse a trainer that only scores, which would hold an optimizer for nothing."""
        sources = {role for node in self.graph.nodes.values() if node.is_sync for role in node.reads}
        for role, uses in self.graph.roles().items():
            backend, scored = self.graph.bindings[role], all(use.mode == "reads" for use in uses)
            if Trainer in backend.serves and scored and role not in sources:
                name = type(backend).__name__
                raise BindError(
                    f"The role {role!r} is bound to {name}, but no node trains it ({uses[0].node} only reads its "
                    f"scores). Bind a backend that only scores: {role}=TorchScorer({backend.starts_from!r}).",
                    code="job.never-trained",
                    role=role,
                    node=uses[0].node,
                    backend=name,
                )

    def _refuse_unable(self) -> None:
        """Refuse an engine that cannot sample with older weights during training, or take weights while it samples."""
        for sync in swaps(self.graph):
            for role in self.graph[sync].writes:
                refuse_unfit(role, self.graph.bindings[role], sync, LiveWeightUpdate)
                self.graph.bindings[role].refuse_swap(self.graph.lag.caches)
                self._refuse_together(role, sync)
        for node in (node for node in self.graph.nodes.values() if transfers(node) and not node.is_sync):
            self.graph.bindings[node.writes[0]].refuse_follow()
        if not (lag := self.graph.lag.versions):
            return
        ahead = f"{self.graph.name} lets generation run {lag} version(s) ahead"
        for role in (role for node in Plan(self.graph).syncs for role in node.writes):
            if (owner := self.graph.bindings[role].shares) in self.graph.trained:
                raise GraphError(
                    f"{ahead}, but {role!r} shares the weights of {owner!r}, which training changes. Bind a copy "
                    f"(bind={{{role!r}: TorchRollout('model')}}), or use edit(lag=0).",
                    code="lag.unsupported",
                    role=role,
                    owner=owner,
                    lag=self.graph.lag,
                )
        if (turns := self._taking_turns()) and self.graph.bindings[turns[0]].loses_weights_asleep:
            raise GraphError(
                f"{ahead}, but {turns[0]!r} takes turns with {turns[1]!r} and loses its weights when it sleeps, so it "
                f"could not sample a later batch with the same weights. Keep them in memory (sleep_level=1), give it "
                f"its own slots (Split), or use edit(lag=0).",
                code="lag.unsupported",
                role=turns[0],
                owner=turns[1],
                lag=self.graph.lag,
            )

    def _refuse_together(self, role: str, sync: str) -> None:
        """Refuse `spans` for ranks that compute each response together."""
        backend = self.graph.bindings[role]
        if backend.collective and (ranks := backend.geometry.ranks) > 1:
            raise GraphError(
                f"{sync} updates weights during generation, but the {ranks} ranks of {role!r} compute each "
                f"response together, so no rank can update alone. Bind {role} with one rank, or leave spans out: "
                f"edit(lag={self.graph.lag.versions}).",
                code="lag.unsupported",
                node=sync,
                role=role,
                ranks=ranks,
            )

    def plan(self, prompts: int | None = None) -> str:
        """The plan as text: order, fused nodes, and the slots of the processes at the place.

        Raises:
            GraphError: the order of updates and syncs is ambiguous.
            BindError: the place has too few slots.
        """
        plan = Plan(self.runs)
        lines = [str(plan), *describe_fusing(self.graph, self.optimize, prompts)]
        lines += [line for line in Plan(self.graph).twice() if line not in plan.twice()]  # one of two may be fused
        notes = [] if (why := self.no_gain()) is None else [why]
        if self.place is None:
            return "\n".join([*lines, "everything runs in one process", *self._copies(plan, ()), *notes])
        lines += [f"processes of {type(self.place).__name__}; those of one slot take turns:"]
        hosts = lay_out(self.graph, self.place)
        each = self.place.per_machine
        for slot in range(self.place.slots):
            at = f"slot {slot}" if each is None else f"machine {slot // each}, slot {slot}"
            lines.append(f"  {at}: {', '.join(host.name for host in hosts if slot in host.slots) or 'free'}")
        lines += [
            f"  {host.name} is one process over the slots {', '.join(map(str, host.slots))}"
            for host in hosts
            if len(host.slots) > 1
        ]
        lines += [
            f"  {node.name} keeps {' and '.join(host.name for host in sharing)} awake together on slot {slot}"
            for node, slot, sharing in together(self.graph, hosts)
        ]
        if any(node.home is None for node in plan.order):
            lines.append("  no slot: general")
        return "\n".join([*lines, *self._copies(plan, hosts), *notes])

    def _copies(self, plan: Plan, hosts: Sequence[ProcessSpec]) -> Iterator[str]:
        """As text: the copies of weights that syncs of changes keep."""
        for node in plan.syncs:
            trainer, engine = node.reads[0], node.writes[0]
            backend = self.graph.bindings[engine]
            if not getattr(node.operator, "changed", False) or backend.receives == "adapter_weights":
                continue
            if not hosts or any({trainer, engine} <= {*host.roles} for host in hosts):
                yield f"{node.name} copies all weights: {trainer} and {engine} are in one process"
                continue
            size = "" if (nbytes := backend.synced_bytes) is None else f", {nbytes / 2**30:.3g} GiB each"
            ranks = sum(trainer in host.roles for host in hosts)
            senders = f"rank 0 of {trainer}" if ranks == 1 else f"the {ranks} ranks of {trainer} together,"
            yield (
                f"{node.name} sends changes: {senders} and each rank of {engine} keep a copy of the weights in CPU "
                f"memory{size}"
            )

    def build(self, seed: int = 0) -> dict[str, Any]:
        """Load the live engines in this process, by role."""
        return EngineBuilder(self.pinned().graph.bindings, seed).all()

    @contextmanager
    def open(self, seed: int = 0) -> Iterator[Steps]:
        """The job with all engines loaded, in this process or at its place, until the end of the block.

        Raises:
            HubError: a repository cannot be resolved or downloaded; see `pinned`.
            RuleError, BindError, GraphError: before any model is loaded; see `refuse_unready` and `refuse_missing`.
        """
        self.refuse_unready()
        if (pinned := self.pinned()) is not self:
            with pinned.open(seed) as steps:
                yield steps
            return
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
        """Run operators eagerly in the block, on this job's live engines, which are in sync at its start.

        They are in this process, whatever the job's place, so that a debugger sees them, and closed at the end.
        """
        replace(self, place=None).refuse_unready()
        with EngineBuilder(self.pinned().graph.bindings, seed).live() as engines:
            session = Session(engines, seed)
            local_steps(Plan(self.graph), engines, seed).sync()
            with session.active():
                yield session


@contextmanager
def naming_role(role: str, kind: type[FlowrlError]) -> Iterator[None]:
    """Name the role in an error of this kind in the block."""
    try:
        yield
    except kind as error:
        facts = {**error.facts, "role": role}
        raise kind(f"Role {role!r}: {error.message}", code=error.code, **facts) from error


def ends_of_responses(graph: Graph) -> str | None:
    """The tokens that end a response, and the file that lists them, as text; None if the model or its tokenizer is not
    on this machine."""
    for role in graph.generators:
        if (tokenizer := tokenizer_of(graph, role)) is not None:
            return tokenizer.ends_text
    return None


def tokenizer_of(graph: Graph, role: str) -> ChatTokenizer | None:
    """The tokenizer of the model that a role starts from; None if it, or the model, is not on this machine."""
    folder = folder_of(graph, role)
    return ChatTokenizer(folder) if folder and any(Path(folder).glob("tokenizer*")) else None
