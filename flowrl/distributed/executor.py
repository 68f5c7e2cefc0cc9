"""`RayExecutor`: walks a plan over processes; the driver passes references, and never touches a tensor column."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from flowrl.columns import ColumnType
from flowrl.distributed.cluster import Hosts, connected
from flowrl.distributed.host import Call, Export, Report
from flowrl.distributed.place import HostPlan, Place, lay_out
from flowrl.distributed.shards import shard
from flowrl.distributed.wire import Array, Piece, join, pack, unpack
from flowrl.engines import Rollout
from flowrl.errors import FlowrlError, NodeError, SyncError
from flowrl.executor import StepResult, merge_metrics
from flowrl.graph import Graph, Node
from flowrl.metrics import Metrics
from flowrl.plan import Plan
from flowrl.proto import DataProto
from flowrl.records import Updated
from flowrl.text import ChatTokenizer
from flowrl.tracing import Trace

logger = logging.getLogger(__name__)

_FAST = "/dev/shm"
_ATTEMPTS = 3


class HostDiedError(NodeError):
    """The process of a rank ended; `host` says whose it was (None is the general one)."""

    def __init__(self, message: str, host: HostPlan | None = None) -> None:
        super().__init__(message)
        self.host = host


@dataclass
class Traffic:
    """Bytes of columns in one step: what passed through the driver, and what hosts fetched from the object store."""

    input: int = 0
    driver: int = 0
    hosts: int = 0


@dataclass
class _Made:
    """What a node left: pieces per column, values, and what rows are split by."""

    columns: dict[str, list[Piece]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rows: int = 0


@dataclass
class _Running:
    """A node that runs now: its hosts (None is the general one) by the reference of their answer."""

    node: Node
    hosts: dict[Any, HostPlan | None]
    since: float
    reports: dict[int, Report] = field(default_factory=dict)


@contextlib.contextmanager
def open_ray(graph: Graph, place: Place, seed: int) -> Iterator[RayExecutor]:
    """A `RayExecutor` with all engines loaded; its processes end with the block, whatever happens in it.

    Raises:
        BindError: the place is too small, or no Ray cluster answers; before any model loads.
    """
    plans = lay_out(graph, place)
    with connected(place):
        hosts = Hosts(plans, graph.bindings, place, seed)
        try:
            hosts.start(plans)
            yield RayExecutor(Plan(graph), hosts, seed)
        finally:
            hosts.kill()


class RayExecutor:
    """Runs steps of a plan on the hosts of a job. Whatever does not depend on each other, and does not share a slot, runs at
    once.

    Args:
        plan: what to run.
        hosts: the processes.
        seed: root of the keys.
    """

    def __init__(self, plan: Plan, hosts: Hosts, seed: int) -> None:
        self.plan, self.hosts, self.seed = plan, hosts, seed
        self.state: dict[str, Any] = {}
        self.traffic = Traffic()
        self.trace = Trace()
        self._awake: dict[int, HostPlan] = {}

    def fork(self, plan: Plan, seed: int) -> RayExecutor:
        """Another plan on the same hosts, with keys of its own."""
        other = RayExecutor(plan, self.hosts, seed)
        other._awake, other.trace = self._awake, self.trace
        return other

    def tokenizer(self) -> ChatTokenizer:
        """The tokeniser of the engine that generates."""
        role = self.plan.graph.generators[0]
        return ChatTokenizer(self._all_ranks(role, "tokenizer_folder", role)[0])

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write the weights of a role's engine as a Hugging Face folder."""
        self._all_ranks(role, "save_pretrained", role, folder)

    def _all_ranks(self, role: str, method: str, *arguments: Any) -> list[Any]:
        ranks = [p for p in self.hosts.plans if role in p.roles]
        self._take_turns(ranks)
        return [
            self._get(ref, plan, method, -1)
            for ref, plan in [(getattr(self.hosts.actors[p], method).remote(*arguments), p) for p in ranks]
        ]

    # ---- weights

    def sync(self) -> None:
        """Carry the trainers' weights to the engines that generate: before step 0, and after a restore."""
        for node in self.plan.syncs:
            trainer = _role(node, "reads")
            version = self._all_ranks(trainer, "versions")[0][trainer]
            running = self._launch(node, dict.fromkeys(node.inputs, Updated(version)), {}, step=-1)
            while len(running.reports) < len(running.hosts):
                self._collect({ref: running for ref in running.hosts}, {}, -1)

    def _exports(self, node: Node, hosts: list[HostPlan | None]) -> dict[str, Export]:
        """Weights of the trainers that `node` reads and that do not live where it runs."""
        exports: dict[str, Export] = {}
        if not any(use.protocol is Rollout and use.mode == "writes" for use in node.operator.role_uses.values()):
            return exports
        role = _role(node, "reads")
        if all(host is not None and role in host.roles for host in hosts):
            return exports
        with self.trace.span(f"export {role}", "driver"):
            exports[role] = next(e for e in self._all_ranks(role, "export", role) if e is not None)
        return exports

    # ---- one step

    def step(
        self,
        batch: DataProto,
        step: int,
        *,
        keep: tuple[str, ...] = (),
        on_node: Callable[[str], None] = lambda name: None,
    ) -> StepResult:
        """Run every node once; see `LocalExecutor.step`.

        Where the place says ``restart="role"``, trained weights are kept as they were at the start of the step; a role that
        dies is rebuilt, all trained roles go back to that, and the step is repeated with the same keys. So no row is lost,
        and none is trained on twice.

        Raises:
            NodeError: a node raised, a rank died, or nothing was heard of it within the place's deadline; names node, role,
                rank and step.
        """
        if self.hosts.place.restart == "never" or not self.plan.graph.trained:
            return self._step(batch, step, keep, on_node)
        with tempfile.TemporaryDirectory(prefix="flowrl-step-", dir=_FAST if os.path.isdir(_FAST) else None) as folder:
            state = copy.deepcopy(self.state)
            self.save(Path(folder))
            for attempt in itertools.count(1):
                try:
                    return self._step(batch, step, keep, on_node)
                except HostDiedError as error:
                    if attempt == _ATTEMPTS:
                        raise
                    logger.warning("%s Rebuilding it and repeating step %d.", error, step)
                    self._recover(error.host)
                    self.state = copy.deepcopy(state)
                    self.load(Path(folder))
        raise AssertionError("unreachable")

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own."""
        for role in self.plan.graph.trained:
            self._all_ranks(role, "save_checkpoint", role, str(folder / role))

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync."""
        for role in self.plan.graph.trained:
            self._all_ranks(role, "load_checkpoint", role, str(folder / role))
        self.sync()

    def _recover(self, host: HostPlan | None) -> None:
        """New processes for a role of which one has died; all its ranks, since the others wait for the dead one."""
        if host is None:
            self.hosts.start_general()
            return
        ranks = [plan for plan in self.hosts.plans if plan.roles == host.roles]
        self.hosts.kill(ranks)
        self._awake = {slot: plan for slot, plan in self._awake.items() if plan not in ranks}
        self._sleep([h for h in self._awake.values() if h.slot in {plan.slot for plan in ranks}])
        self.hosts.start(ranks)

    def _step(self, batch: DataProto, step: int, keep: tuple[str, ...], on_node: Callable[[str], None]) -> StepResult:
        self.traffic = Traffic()
        made = self._feed(batch)
        waiting = list(self.plan.order)
        running: dict[Any, _Running] = {}
        done: set[str] = set(self.plan.graph.inputs)
        metrics: dict[str, Metrics] = {}
        seconds: dict[str, float] = {}
        while waiting or running:
            busy = {h.slot for r in running.values() for h in r.hosts.values() if h is not None}
            for node in list(waiting):
                hosts = self._hosts_of(node)
                slots = {h.slot for h in hosts if h is not None} | self._export_slots(node)
                if set(self.plan.network.predecessors(node.name)) <= done and not slots & busy:
                    on_node(node.name)
                    started = self._launch(node, self._inputs(node, made), made, step)
                    running |= {ref: started for ref in started.hosts}
                    waiting.remove(node)
                    busy |= slots
            try:
                collected = self._collect(running, made, step)
            except HostDiedError as error:
                self._drain(running, error.host)
                raise
            for finished in collected:
                name = finished.node.name
                done.add(name)
                reports = [finished.reports[i] for i in sorted(finished.reports)]
                seconds[name] = max(r.ended for r in reports) - min(r.started for r in reports)
                metrics[name] = Metrics()
                for report in reports:
                    metrics[name].merge(report.metrics)
                self.state |= reports[0].state
        wanted = {*keep, *self.plan.graph.sinks}
        columns = {name: self._fetch(made[name]) for name in made if name in wanted}
        values = {name: made[name].values for name in made if name in wanted}
        ordered = {node.name: metrics[node.name] for node in self.plan.order if node.name in metrics}
        return StepResult(columns, values, merge_metrics(ordered), seconds)

    def _drain(self, running: Mapping[Any, _Running], dead: HostPlan | None) -> None:
        """Let the nodes that run elsewhere come to their end; those of the dead role never would."""
        theirs = [ref for ref, run in running.items() if run.hosts[ref] is None or run.hosts[ref] != dead]
        if dead is not None:
            theirs = [ref for ref in theirs if (h := running[ref].hosts[ref]) is None or h.roles != dead.roles]
        if theirs:
            ray.wait(theirs, num_returns=len(theirs), timeout=self.hosts.place.deadline)

    def _feed(self, batch: DataProto) -> dict[str, _Made]:
        made = {}
        for name in self.plan.graph.inputs:
            one = _Made(rows=len(batch))
            for column in self.plan.graph[name].operator.signature.outputs:
                packed = pack(batch[column])
                width = batch["prompts"].shape[1] if "prompts" in batch else 0
                one.columns[column] = [Piece(np.arange(len(batch)), ray.put(packed), width, 0, packed.nbytes)]
                self.traffic.input += packed.nbytes
            made[name] = one
        self._tokens: dict[str, Array] = {}
        self._groups: dict[str, list[str]] = {}
        return made

    def _hosts_of(self, node: Node) -> list[HostPlan | None]:
        """Where a node runs: on every rank of the role that it writes, else of the one it reads, else on the general host."""
        roles = sorted(node.operator.role_uses.items(), key=lambda item: item[1].mode != "writes")
        if not roles:
            return [None]
        role = getattr(node.operator, roles[0][0]).name
        return [plan for plan in self.hosts.plans if role in plan.roles]

    def _export_slots(self, node: Node) -> set[int]:
        """The slots of a trainer whose weights a `Sync` fetches."""
        roles = {getattr(node.operator, f).name for f in node.operator.role_uses}
        return {plan.slot for plan in self.hosts.plans if roles & set(plan.roles)}

    def _inputs(self, node: Node, made: Mapping[str, _Made]) -> dict[str, Any]:
        return {
            slot: made[e.node].columns[e.output] if e.output in made[e.node].columns else made[e.node].values[e.output]
            for slot, e in node.inputs.items()
        }

    def _launch(self, node: Node, inputs: Mapping[str, Any], made: Mapping[str, _Made], step: int) -> _Running:
        hosts = self._hosts_of(node)
        exports = self._exports(node, hosts)
        self._take_turns([h for h in hosts if h is not None])
        columns = [e for e in node.inputs.values() if made and e.output in made[e.node].columns]
        rows = made[columns[0].node].rows if columns else 0
        batch_axis = self.plan.graph.types[columns[0]].axes[0] if columns else ""
        tokens = self._tokens.get(batch_axis) if made else None
        shares = shard(node.operator.granularity, rows, len(hosts), tokens, self._uids(node, made, len(hosts)))
        state = {name: value for name, value in self.state.items() if name.startswith(f"{node.name}.")}
        refs: dict[Any, HostPlan | None] = {}
        for host, share in zip(hosts, shares, strict=True):
            call = Call(node.operator, step, self.seed, state, inputs, share if len(hosts) > 1 else None, exports)
            actor = self.hosts.general if host is None else self.hosts.actors[host]
            refs[actor.run.remote(call)] = host
        return _Running(node, refs, time.monotonic())

    def _uids(self, node: Node, made: Mapping[str, _Made], ranks: int) -> list[str] | None:
        """The groups of the rows, where whole groups go to ranks: the one object column that the driver looks at."""
        if node.operator.granularity != "group" or ranks == 1:
            return None
        edge = next(
            e for s, e in node.inputs.items() if getattr(node.operator.signature.slots[s], "kind", "") == "group"
        )
        return list(self._column(made[edge.node].columns[edge.output], self.plan.graph.types[edge].type))

    def _collect(self, running: dict[Any, _Running], made: dict[str, _Made], step: int) -> list[_Running]:
        """Wait for an answer, and return the nodes that are complete.

        Raises:
            NodeError: see `step`.
        """
        deadline = min(r.since for r in running.values()) + self.hosts.place.deadline
        answered, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not answered:
            stuck = min(running.values(), key=lambda r: r.since)
            host = next(h for ref, h in stuck.hosts.items() if list(stuck.hosts).index(ref) not in stuck.reports)
            raise NodeError(
                f"{stuck.node.name} is stuck on {_named(host)} in step {step}: nothing was heard for {self.hosts.place.deadline:g} s; "
                f"give it more time by {type(self.hosts.place).__name__}(deadline=...)."
            )
        complete = []
        for ref in answered:
            node_run = running.pop(ref)
            host = node_run.hosts[ref]
            report: Report = self._get(ref, host, node_run.node.name, step)
            node_run.reports[list(node_run.hosts).index(ref)] = report
            self.trace.add(node_run.node.name, _named(host), report.started, report.ended, report.received)
            self.traffic.hosts += report.received
            if len(node_run.reports) == len(node_run.hosts):
                self._accept(node_run, made)
                complete.append(node_run)
        return complete

    def _accept(self, run: _Running, made: dict[str, _Made]) -> None:
        """Enter what all ranks of a node left."""
        node, reports = run.node, [run.reports[i] for i in sorted(run.reports)]
        parts = reports[:1] if node.operator.granularity == "batch" else reports
        one = _Made(values=dict(reports[0].values))
        for name, slot in node.operator.signature.outputs.items():
            if isinstance(slot, ColumnType):
                one.columns[name] = [report.columns[name] for report in parts]
                one.rows = sum(len(piece.rows) for piece in one.columns[name])
        if all(report.tokens is not None for report in parts) and parts and one.columns:
            rows = np.concatenate([next(iter(report.columns.values())).rows for report in parts])
            tokens = np.concatenate([report.tokens for report in parts if report.tokens is not None])
            ordered = np.empty_like(tokens)
            ordered[rows] = tokens
            axis = next(
                self.plan.graph.types[e].axes[0]
                for e in self.plan.graph.types
                if e.node == node.name and e.output in one.columns
            )
            self._tokens[axis] = ordered
        made[node.name] = one
        if receipts := [r.values["receipt"] for r in reports if "receipt" in r.values]:
            _refuse_unequal(receipts, node)

    def _fetch(self, one: _Made) -> DataProto:
        """The columns of a kept node, in the driver; counted as its traffic."""
        fetched = {}
        for name, pieces in one.columns.items():
            from flowrl.columns import lookup

            fetched[name] = self._column(pieces, lookup(name))
            self.traffic.driver += sum(piece.nbytes for piece in pieces)
        return DataProto(fetched)

    def _column(self, pieces: list[Piece], wanted: Any) -> Any:
        parts = [
            (p.rows, unpack(x), p.prompt, p.response)
            for p, x in zip(pieces, ray.get([p.ref for p in pieces]), strict=True)
        ]
        return join(parts, wanted.axes, wanted.pad, np.sort(np.concatenate([p.rows for p in pieces])))

    # ---- hosts

    def _take_turns(self, hosts: list[HostPlan]) -> None:
        """Wake `hosts`, after putting to sleep whoever is awake on their slots."""
        if not self.hosts.crowded(hosts):
            return
        self._sleep([self._awake[h.slot] for h in hosts if self._awake.get(h.slot, h) != h])
        coming = [h for h in hosts if self._awake.get(h.slot) != h]
        for host, ref in [(h, self.hosts.actors[h].wake.remote()) for h in coming]:
            self._get(ref, host, "wake", -1)
        self._awake |= {h.slot: h for h in hosts}

    def _sleep(self, hosts: list[HostPlan]) -> None:
        for host, ref in [(h, self.hosts.actors[h].sleep.remote()) for h in hosts]:
            self._get(ref, host, "sleep", -1)
            del self._awake[host.slot]

    def _get(self, ref: Any, host: HostPlan | None, node: str, step: int) -> Any:
        """An answer, or an error that says whose it was.

        Raises:
            NodeError: the process died, did not answer in time, or raised.
        """
        try:
            return ray.get(ref, timeout=self.hosts.place.deadline)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, NodeError):
                raise cause from cause.__cause__
            raise NodeError(f"{node} failed on {_named(host)}: {type(cause).__name__}: {cause}") from (
                cause if isinstance(cause, FlowrlError) else None
            )
        except RayActorError as error:
            raise HostDiedError(
                f"{node} lost {_named(host)} in step {step}: its process died ({str(error).splitlines()[0]}); look for the kernel's "
                f"out-of-memory killer, or let it be rebuilt by {type(self.hosts.place).__name__}(restart='role').",
                host,
            ) from error
        except GetTimeoutError as error:
            raise NodeError(
                f"{node} is stuck on {_named(host)}: no answer for {self.hosts.place.deadline:g} s."
            ) from error


def _role(node: Node, mode: str) -> str:
    return next(str(getattr(node.operator, f).name) for f, use in node.operator.role_uses.items() if use.mode == mode)


def _named(host: HostPlan | None) -> str:
    return "the general host" if host is None else f"{'+'.join(host.roles)} rank {host.rank}"


def _refuse_unequal(receipts: list[Any], node: Node) -> None:
    if len({(r.version, r.digest) for r in receipts}) > 1:
        raise SyncError(f"{node.name}: the ranks of the engine received different weights: {receipts}; sync again.")
