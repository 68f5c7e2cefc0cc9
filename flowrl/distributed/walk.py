"""`Walk`: one step of a plan over the hosts of a job. Nodes that do not depend on each other run at once, on slots
of their own.

The driver passes references: it never touches a tensor column that nobody asks it for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError

from flowrl.columns import ColumnType
from flowrl.core.graph import Node
from flowrl.core.plan import Plan
from flowrl.data.dataproto import DataProto
from flowrl.data.metrics import Metrics, of_ranks
from flowrl.distributed.delivery import Delivery
from flowrl.distributed.faults import Failure, answer, at, died, named, stuck
from flowrl.distributed.host import Call, Report, Sent, join_pieces
from flowrl.distributed.hosts import GRACE_SECONDS, Hosts, is_sync, roles_of, uid_slot
from flowrl.distributed.shards import shard
from flowrl.distributed.wire import Array, Piece, pack
from flowrl.distributed.worker_logs import relay_warnings
from flowrl.errors import SyncError
from flowrl.records import Receipt
from flowrl.run.local import StepResult, columns_of_input, merge_metrics
from flowrl.run.place import ProcessSpec
from flowrl.sync.stream import Interrupted


@dataclass
class Traffic:
    """Bytes of columns in one step, as they travel: what the driver put in, what it fetched, and what hosts fetched."""

    input: int = 0
    driver: int = 0
    hosts: int = 0


@dataclass
class Made:
    """What a node left: pieces per column, and values."""

    columns: dict[str, list[Piece]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Running:
    """A node that runs now: its hosts (None is the general one) by the reference of their answer, and what they left.

    Those of a sync may be the trainer's too, while it sends its weights.
    """

    node: Node
    hosts: dict[Any, ProcessSpec | None]
    since: float
    delivery: Delivery | None
    reports: dict[Any, Report | Sent] = field(default_factory=dict)

    @property
    def all(self) -> list[Report]:
        """The reports in order of rank; complete only when the node is."""
        return [report for ref in self.hosts if isinstance(report := self.reports[ref], Report)]


class Walk:
    """One step.

    Args:
        plan: what to run.
        hosts: where.
        step, seed: what keys are derived from; None is between steps.
        state: the state cells of all operators; holds the new ones once the step is done.
    """

    def __init__(self, plan: Plan, hosts: Hosts, step: int | None, seed: int, state: Mapping[str, Any]) -> None:
        self.plan, self.hosts, self.step, self.seed = plan, hosts, step, seed
        self.state = dict(state)
        self.traffic = Traffic()
        self._made: dict[str, Made] = {}
        self._tokens: dict[str, Array] = {}  # how many each row has, by batch axis
        self._metrics: dict[str, Metrics] = {}
        self._seconds: dict[str, float] = {}

    def run(self, batch: DataProto, keep: Sequence[str], on_node: Callable[[str], None]) -> StepResult:
        """Run every node once; see `LocalExecutor.step`.

        Raises:
            HostDiedError, NodeError, GraphError.
        """
        wanted = {*keep, *self.plan.graph.sinks}
        for name in keep:
            self.plan.graph[name]
        self._feed(batch)
        waiting = list(self.plan.order)
        running: dict[Any, Running] = {}
        done: set[str] = set(self.plan.graph.inputs)
        while waiting or running:
            at_work = [host for run in running.values() for host in run.hosts.values() if host is not None]
            busy = {slot for host in at_work for slot in host.slots}
            for node in list(waiting):
                slots = self._slots(node)
                if set(self.plan.network.predecessors(node.name)) <= done and not slots & busy:
                    on_node(node.name)
                    inputs = {slot: self._input(edge.node, edge.output) for slot, edge in node.inputs.items()}
                    launched = self.launch(node, inputs)
                    running |= dict.fromkeys(launched.hosts, launched)
                    waiting.remove(node)
                    busy |= slots
            for finished in self._collect(running):
                self._accept(finished)
                done.add(finished.node.name)
                for source in finished.node.sources:  # what nobody reads any more is let go
                    if source not in wanted and all(n.name in done for n in self.plan.order if source in n.sources):
                        self._made.pop(source, None)
        kept = {name: made for name, made in self._made.items() if name in wanted}
        ordered = {node.name: self._metrics[node.name] for node in self.plan.order}
        return StepResult(
            {name: self._columns(name, made) for name, made in kept.items()},
            {name: made.values for name, made in kept.items()},
            merge_metrics(ordered),
            self._seconds,
        )

    def launch(self, node: Node, inputs: Mapping[str, Any]) -> Running:
        """Start a node on all its hosts.

        Args:
            inputs: by slot, the pieces of a column or a value.
        """
        hosts, what = self.hosts.of(node), self._what(node)
        delivery = self._delivery(node, what)
        sources = delivery.prepare() if delivery else {}
        beside = delivery.beside if delivery else []
        self.hosts.take_turns([host for host in hosts if host is not None], what, beside)
        state = {name: value for name, value in self.state.items() if name.startswith(f"{node.name}.")}
        refs: dict[Any, ProcessSpec | None] = {}
        for host, rows in zip(hosts, self._shares(node, inputs, len(hosts)), strict=True):
            call = Call(node.operator, self.step, self.seed, state, inputs, rows, sources)
            actor = self.hosts.general if host is None else self.hosts.actors[host]
            refs[actor.run.remote(call)] = host
        if delivery:
            refs |= delivery.start()
        return Running(node, refs, time.monotonic(), delivery)

    def _delivery(self, node: Node, what: str) -> Delivery | None:
        """Of the weights that a node carries, if it is a sync."""
        if not is_sync(node):
            return None
        return Delivery(self.hosts, roles_of(node, "reads")[0], roles_of(node, "writes")[0], what)

    def settle(self, run: Running) -> list[Report]:
        """Wait for one node to be complete."""
        running = dict.fromkeys(run.hosts, run)
        while running:
            self._collect(running)
        return run.all

    def _what(self, node: Node) -> str:
        return f"{node.name} {at(self.step)}"

    def _slots(self, node: Node) -> set[int]:
        """The slots that a node occupies: of all its roles, since a sync keeps the trainer too."""
        roles = {getattr(node.operator, field).name for field in node.operator.role_uses}
        return {slot for plan in self.hosts.plans if roles & set(plan.roles) for slot in plan.slots}

    def _feed(self, batch: DataProto) -> None:
        """Put the columns of the inputs into the object store."""
        for name in self.plan.graph.inputs:
            columns = columns_of_input(self.plan.graph, name, batch)
            made, sizes = Made(), dict[str, int]()
            for column, wanted in columns.items():
                sizes |= dict(zip(wanted.axes, batch[column].shape, strict=True))
            response = sizes.get("response", 0)
            prompt = sizes.get("prompt", sizes.get("sequence", response) - response)
            for column in columns:
                packed = pack(batch[column])
                piece = Piece(np.arange(len(batch)), ray.put(packed), prompt, response, packed.nbytes)
                made.columns[column] = [piece]
                self.traffic.input += packed.nbytes
            self._made[name] = made

    def _input(self, node: str, output: str) -> Any:
        made = self._made[node]
        return made.columns[output] if output in made.columns else made.values[output]

    def _shares(self, node: Node, inputs: Mapping[str, Any], ranks: int) -> list[Array | None]:
        """The rows of each rank, in ascending order; None where all run on all."""
        edges = {
            slot: edge
            for slot, edge in node.inputs.items()
            if isinstance(node.operator.signature.slots[slot], ColumnType)
        }
        # Rows that a node makes anew are in its own order, which parts of them would not be.
        granularity = "batch" if node.operator.changes_rows else node.operator.granularity
        if ranks == 1 or granularity == "batch" or not edges:
            return [None] * ranks
        slot, edge = next(iter(edges.items()))
        groups = None
        if granularity == "group" and (uid := uid_slot(node)) is not None:
            wanted = node.operator.signature.slots[uid]
            assert isinstance(wanted, ColumnType)
            groups = list(self._fetch(node, inputs[uid], wanted))  # the one column that the driver looks at
        rows = sum(len(piece.rows) for piece in inputs[slot])
        tokens = self._tokens.get(self.plan.graph.types[edge].axes[0])
        return [*shard(granularity, rows, ranks, tokens, groups)]

    def _collect(self, running: dict[Any, Running]) -> list[Running]:
        """Wait for an answer, and return the nodes that are complete.

        Raises:
            HostDiedError, NodeError: naming node, role, rank and step.
        """
        try:
            return self._completed(running)
        except BaseException:
            for run in running.values():
                if run.delivery:
                    run.delivery.close()  # so that no host waits for one that will not come
            raise

    def _completed(self, running: dict[Any, Running]) -> list[Running]:
        place = self.hosts.place
        first = min(running.values(), key=lambda run: run.since)
        left = first.since + place.deadline - time.monotonic()
        answered, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, left))
        if not answered:
            host = next(host for ref, host in first.hosts.items() if ref not in first.reports)
            raise stuck(host, self._what(first.node), place, place.deadline)
        complete = []
        for ref in answered:
            run = running.pop(ref)
            host = run.hosts[ref]
            report: Report | Sent | Failure = answer(ref, host, self._what(run.node), place)
            if isinstance(report, Failure):
                report, host = self._cause(report, run, host)
                raise self._blame(report, run.node, host, run.hosts.values())
            run.reports[ref] = report
            trace, name = self.hosts.trace, run.node.name
            if isinstance(report, Sent):
                trace.add(f"send by {name}", named(host), report.started, report.ended, report.nbytes, "transfer")
            else:
                trace.add(name, named(host), report.started, report.ended, report.received)
                trace.add("fetch", named(host), report.started, report.fetched, kind="transfer")
                self.traffic.hosts += report.received
            if len(run.reports) == len(run.hosts):
                if is_sync(run.node):
                    self.hosts.forgetful.difference_update(run.hosts.values())
                if run.delivery:
                    run.delivery.finish()
                complete.append(run)
        return complete

    def _cause(self, failure: Failure, run: Running, host: ProcessSpec | None) -> tuple[Failure, ProcessSpec | None]:
        """Where one side of a transfer says no more than that the other is gone: what that one says.

        Raises:
            HostDiedError, NodeError: it died, or is silent.
        """
        if not _interrupted(failure):
            return failure, host
        for ref, other in run.hosts.items():
            if ref in run.reports or other == host:
                continue
            left = run.since + self.hosts.place.deadline - time.monotonic()
            if not ray.wait([ref], timeout=max(0.0, min(GRACE_SECONDS, left)))[0]:
                raise stuck(other, self._what(run.node), self.hosts.place, time.monotonic() - run.since)
            report: Report | Sent | Failure = answer(ref, other, self._what(run.node), self.hosts.place)
            if isinstance(report, Failure) and not _interrupted(report):
                return report, other
        return failure, host

    def _blame(
        self, failure: Failure, node: Node, host: ProcessSpec | None, peers: Iterable[ProcessSpec | None]
    ) -> Exception:
        """A node that raised may have done so since another process died: a peer, or one that wrote what it reads."""
        suspects = [None, *self.hosts.actors] if failure.lost else [peer for peer in peers if peer != host]
        error: Exception = failure.error()
        if dead := self.hosts.dead(suspects):
            first, _, _ = failure.message.partition("\n")
            raise died(dead[0], self._what(node), self.hosts.place, first) from error
        return error

    def _accept(self, run: Running) -> None:
        """Enter what all ranks of a node left."""
        node, reports = run.node, run.all
        refuse_unequal(reports, node)
        relay_warnings(said for report in reports for said in report.said)
        whole = node.operator.granularity == "batch" or node.operator.changes_rows
        parts = reports[:1] if whole else reports
        made = Made(values=dict(reports[0].values))
        for name in reports[0].columns:
            made.columns[name] = [report.columns[name] for report in parts]
        if reports[0].tokens is not None:
            rows = np.concatenate([next(iter(report.columns.values())).rows for report in parts])
            tokens = np.concatenate([report.tokens for report in parts if report.tokens is not None])
            axis = next(
                self.plan.graph.types[edge].axes[0]
                for edge in self.plan.graph.types
                if edge.node == node.name and edge.output in made.columns
            )
            self._tokens[axis] = np.empty_like(tokens)
            self._tokens[axis][rows] = tokens
        self._made[node.name] = made
        self._seconds[node.name] = max(r.ended for r in reports) - min(r.started for r in reports)
        self._metrics[node.name] = of_ranks([report.metrics for report in reports], whole)
        self.state |= reports[0].state

    def _columns(self, name: str, made: Made) -> DataProto:
        """The columns of a node that is kept, in the driver."""
        node, fetched = self.plan.graph[name], {}
        for column, pieces in made.columns.items():
            wanted = node.operator.signature.outputs[column]
            assert isinstance(wanted, ColumnType)
            fetched[column] = self._fetch(node, pieces, wanted)
        return DataProto(fetched)

    def _fetch(self, node: Node, pieces: list[Piece], wanted: ColumnType) -> Any:
        """A column in the driver; counted as its traffic."""
        self.traffic.driver += sum(piece.nbytes for piece in pieces)
        try:
            return join_pieces(pieces, wanted)
        except ObjectLostError as error:
            failure = Failure.of(error, f"{self._what(node)}: the column {wanted.name} is lost: {error}")
            raise self._blame(failure, node, None, []) from error


def _interrupted(failure: Failure) -> bool:
    """Whether it comes of another side that is gone."""
    return any(isinstance(cause, Interrupted) for cause in failure.causes)


def refuse_unequal(reports: Sequence[Report], node: Node) -> None:
    """Refuse receipts of which the ranks of one engine got different ones.

    Raises:
        SyncError: they differ in version or digest.
    """
    receipts = [value for report in reports for value in report.values.values() if isinstance(value, Receipt)]
    if len({(receipt.version, receipt.digest) for receipt in receipts}) > 1:
        raise SyncError(f"{node.name}: the ranks of the engine received different weights: {receipts}; sync again.")
