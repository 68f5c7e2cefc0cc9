"""`RayRunner`: runs instances on the hosts of a job; nodes on different slots run concurrently.

The driver passes references, and fetches only columns that a result includes.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError

from flowrl.columns import ColumnType
from flowrl.core.graphs import spans
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import transfers
from flowrl.core.graphs.plan import Plan
from flowrl.data.balance import Shard
from flowrl.data.metrics import of_ranks
from flowrl.data.text.tokenizer import TOKENIZERS, ChatTokenizer
from flowrl.distributed.cluster.cluster import connected
from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.distributed.delivery import Delivery
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.faults import Failure, HostDiedError, chain, died, named, naming, result_of, stuck
from flowrl.distributed.faults.machines import naming_lost_machine
from flowrl.distributed.faults.pending_calls import GRACE_SECONDS
from flowrl.distributed.faults.scratch_folder import scratch_folder
from flowrl.distributed.hosts.host import HostTask, Report, Sent, join_pieces
from flowrl.distributed.hosts.hosts import Hosts
from flowrl.distributed.hosts.reports import joined, refuse_unequal
from flowrl.distributed.hosts.running import Running, reports, swaps
from flowrl.distributed.hosts.shards import shard
from flowrl.distributed.hosts.wire import Array, ColumnPart, pack, widths
from flowrl.distributed.hosts.worker_logs import relay_warnings
from flowrl.errors import DataError, EngineError, NodeError, SwapError
from flowrl.run.engine.runner import Lengths, Task, TaskResult, load_of, pairs
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.engine.weights import TrainedWeights
from flowrl.run.placement.place import ProcessSpec, asked_by, lay_out
from flowrl.run.placement.placement import refuse_unplaceable, rows_of_ranks, slots_of, uid_field
from flowrl.sync.group import Interrupted


@contextlib.contextmanager
def open_ray(graph: Graph, place: RayPlace, seed: int) -> Iterator[Steps]:
    """The steps of a graph on Ray, with all engines loaded; its processes end with the block."""
    plan, processes = Plan(graph), lay_out(graph, place)
    refuse_unplaceable(plan, processes)
    with contextlib.ExitStack() as stack:
        if any(TOKENIZERS in backend.imports for backend in graph.bindings.values()):
            stack.enter_context(_importing(TOKENIZERS))
        stack.enter_context(connected(place))
        stack.enter_context(watch.watched())
        snapshot_folder = stack.enter_context(scratch_folder()) if place.restart == "role" else None
        with naming("opening the job on Ray"):
            hosts = Hosts(processes, graph.bindings, place, seed, _swapping(graph))
        try:
            with naming_lost_machine(hosts.locations):
                hosts.start(processes)
                runner = RayRunner(hosts)
                yield Steps(plan, runner, seed, TrainedWeights(plan, runner, seed, snapshot_folder))
        finally:
            hosts.close()


@contextlib.contextmanager
def _importing(module: str) -> Iterator[None]:
    """Import a module in a thread during the block: the driver waits for other processes as it opens a job."""

    def work() -> None:
        with contextlib.suppress(Exception):  # the first use imports it and raises
            importlib.import_module(module)

    thread = threading.Thread(target=work, name="flowrl-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass
class Traffic:
    """Bytes of columns on the wire: put by the driver, fetched by the driver, and fetched by hosts."""

    input: int = 0
    driver: int = 0
    hosts: int = 0


class RayRunner:
    """Runs instances on the hosts of a job; a `flowrl.run.engine.runner.Runner`."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.traffic = Traffic()
        self._running: dict[Any, Running] = {}

    @property
    def timeline(self) -> Timeline:
        """The timeline of the current `Steps`."""
        return self.hosts.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline) -> None:
        self.hosts.timeline = timeline

    @property
    def swaps(self) -> bool:
        """True: hosts can update weights during generation."""
        return True

    @property
    def engines(self) -> Mapping[str, Any]:
        """Empty: no engine is in this process."""
        return {}

    def slots(self, node: Node) -> frozenset[int]:
        """The slots of all roles of a node; empty without roles, so that it runs concurrently with all others."""
        return slots_of(node, self.hosts.processes)

    def put(self, node: Node, columns: Mapping[str, Any]) -> Mapping[str, list[ColumnPart]]:
        """Put columns into the object store, each as one piece."""
        sizes: dict[str, int] = {}
        for name, column in columns.items():
            sizes |= dict(zip(column_type(node, name).axes, column.shape, strict=True))
        held: dict[str, list[ColumnPart]] = {}
        for name, column in columns.items():
            packed = pack(column)
            with naming(f"the column {name} of the input {node.name}"):
                held[name] = [ColumnPart(np.arange(len(column)), ray.put(packed), *widths(sizes), packed.nbytes)]
            self.traffic.input += packed.nbytes
        return held

    def launch(self, task: Task) -> None:
        """Start an instance on all its hosts, after the other hosts on their slots were put to sleep."""
        try:
            with naming(str(task)):
                self._start(task)
        except BaseException:
            self._give_up()
            raise

    def _start(self, task: Task) -> None:
        hosts: list[ProcessSpec | None] = [*self.hosts.ranks(task.node.home)] or [None]
        delivery = self._delivery(task)
        sources = delivery.prepare() if delivery else {}
        keep_awake = delivery.stay_awake if delivery else []
        asked = asked_by(task.node, self.hosts.processes)
        self.hosts.take_turns([host for host in (*hosts, *asked) if host is not None], str(task), keep_awake)
        running = Running(task, {}, {}, time.monotonic(), delivery, asked)
        operator = task.node.operator
        data_ranks = 1 if hosts[0] is None else hosts[0].mesh.data_ranks
        dealt = self._rows(task, data_ranks)
        for host in hosts:
            own = 0 if host is None else host.position.data_rank
            rows, now = dealt[own], task.now
            if data_ranks > 1:
                now = replace(now, shard=_shard(own, data_ranks, rows, task.lengths))
            ref = self.hosts.method(host, "run", swaps(task)).remote(
                HostTask(
                    operator,
                    task.step,
                    task.seed,
                    task.when,
                    task.facts,
                    task.state,
                    task.inputs,
                    rows,
                    now,
                    sources,
                    delivery.engine if delivery else "",
                    self.hosts.addresses(task.node, 0 if host is None else host.rank) if asked else (),
                )
            )
            running.hosts[ref], running.rows[ref] = host, rows
        if delivery:
            running.hosts |= delivery.start()
        for ref, host in running.hosts.items():
            self.hosts.pending.add(ref, host, str(task), task.node.name)
        self._running |= dict.fromkeys(running.hosts, running)

    def _give_up(self) -> None:
        """Abandon all running instances; transfers in progress fail."""
        for running in self._running.values():
            if running.delivery:
                running.delivery.close()
        self.hosts.pending.discard(self._running)
        self._running = {}

    def wait(self) -> Sequence[TaskResult]:
        """Wait for the next instances that are complete on all hosts; an error abandons all instances."""
        try:
            while not (complete := self._completed()):
                pass
            return [self._done(running) for running in complete]
        except BaseException:
            self._give_up()
            raise

    def fetch(self, node: Node, output: str, held: list[ColumnPart]) -> Any:
        """Fetch a column into the driver."""
        return self._fetch(held, column_type(node, output), f"{node.name}, whose outputs are fetched,")

    def secure(self, node: Node, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Columns that the driver owns in the object store: those that a host put there are lost if it dies."""
        if not self.hosts.place.rebuilds:
            return outputs
        types = node.signature.outputs
        columns = {
            name: self.fetch(node, name, held) for name, held in outputs.items() if isinstance(types[name], ColumnType)
        }
        return {**outputs, **self.put(node, columns)}

    def join(
        self, node: Node, makers: Mapping[str, str], parts: Sequence[Mapping[str, list[ColumnPart]]]
    ) -> dict[str, list[ColumnPart]]:
        """The pieces of all rounds, which their readers pad to one width."""
        joined: dict[str, list[ColumnPart]] = {}
        for output in makers:
            joined[output] = []
            for part in parts:
                before = sum(len(piece.rows) for piece in joined[output])
                joined[output] += [replace(piece, rows=piece.rows + before) for piece in part[output]]
        return joined

    def _delivery(self, task: Task) -> Delivery | None:
        """The weight transfer of an instance, if it is a sync."""
        if not transfers(task.node):
            return None
        changed = getattr(task.node.operator, "changed", False)
        return Delivery(self.hosts, task.node.reads[0], task.node.writes[0], str(task), swaps(task), changed)

    def _rows(self, task: Task, ranks: int) -> list[Array | None]:
        """The rows of each data rank, in ascending order; None if all run on all rows."""
        operator, fields = task.node.operator, task.node.signature.fields
        # New rows of a node are in its own order, which parts of the input would not preserve.
        if ranks == 1 or operator.creates_axis("batch"):
            return [None] * ranks
        columns = [place for place in task.inputs if getattr(fields[place], "on_batch", False)]
        if not columns:
            return [None] * ranks
        if operator.granularity == "batch":
            return rows_of_ranks(task, ranks)
        tokens, groups = task.lengths.tokens if task.lengths is not None else None, None
        if operator.granularity == "group" and (uid := uid_field(task.node)) is not None:
            expected = fields[uid]
            assert isinstance(expected, ColumnType)
            groups = list(self._fetch(task.inputs[uid], expected, str(task)))  # the only column that the driver reads
        rows = sum(len(piece.rows) for piece in task.inputs[columns[0]])
        return [*shard(operator.granularity, rows, ranks, tokens, groups)]

    def _completed(self) -> list[Running]:
        """Wait for results, and return the instances that are complete."""
        complete = []
        for ref in self.hosts.pending.next(self._running):
            running = self._running.pop(ref)
            host = running.hosts[ref]
            report: Report | Sent | Failure = result_of(ref, host, str(running.task), self.hosts.place)
            if isinstance(report, Failure):
                running, report = self._swap_under(running, report, host)
                peers = [*running.hosts.values(), *running.asked]
                raise self._blame(*self._cause(report, running, host), str(running.task), peers)
            running.reports[ref] = report
            self._enter(running, report, host, running.rows.get(ref))
            if len(running.reports) == len(running.hosts):
                complete.append(running)
        return complete

    def _enter(self, running: Running, report: Report | Sent, host: ProcessSpec | None, rows: Array | None) -> None:
        """Add the work of one host to the timeline."""
        name, place, task = running.task.node.name, named(host), running.task
        if isinstance(report, Sent):
            self.timeline.add(f"send by {name}", place, report.started, report.ended, report.nbytes, "transfer")
            return
        lengths = report.lengths or (task.lengths and task.lengths.of(rows))
        load, times = load_of(lengths), (report.started, report.ended)
        written, repeats = pairs(report.lengths), not reports(host)
        self.timeline.spans.append(
            Span(name, place, *times, report.received, "node", task.step, *load, written, repeats)
        )
        self.timeline.add_waits(name, place, task.step, report.waits)
        self.timeline.add("fetch", place, report.started, report.fetched, kind="transfer")
        self.traffic.hosts += report.received

    def _done(self, running: Running) -> TaskResult:
        """The result of an instance over all its ranks."""
        task, received, counted = running.task, running.all, running.counted
        if task.node.is_sync:
            self.hosts.unsynced_hosts.difference_update(running.hosts.values())
        if running.delivery:
            running.delivery.finish()
        refuse_unequal(received, task.node)
        relay_warnings(warning for report in received for warning in report.warnings)
        replicated = all(rows is None for rows in running.rows.values())
        parts = counted[:1] if replicated else counted
        columns = {name: [report.columns[name] for report in parts] for name in counted[0].columns}
        return TaskResult(
            task,
            {**columns, **counted[0].values},
            of_ranks([report.metrics for report in counted], replicated),
            counted[0].state,
            joined(parts),
            max(report.ended for report in received) - min(report.started for report in received),
            tuple(dict.fromkeys(name for report in received for name in report.not_finite)),
        )

    def _fetch(self, pieces: list[ColumnPart], expected: ColumnType, what: str) -> Any:
        with naming(what):
            try:
                column, nbytes = join_pieces(pieces, expected, seconds=self.hosts.place.deadline)
            except ObjectLostError as error:
                failure = Failure.of(error, f"{what}: the column {expected.name} is lost: {error}", task=what)
                raise self._blame(failure, None, what, []) from error
        self.traffic.driver += nbytes
        return column

    # ---- faults

    def _swap_under(self, running: Running, failure: Failure, host: ProcessSpec | None) -> tuple[Running, Failure]:
        """If generation failed because of a live weight update on the same host: that update, and its failure."""
        if any(isinstance(cause, SwapError) for cause in failure.causes):
            for ref, other in self._running.items():
                if other.swaps and other.hosts[ref] == host:
                    report = result_of(ref, host, str(other.task), self.hosts.place)
                    if isinstance(report, Failure):
                        return other, report
        return running, failure

    def _cause(
        self, failure: Failure, running: Running, host: ProcessSpec | None
    ) -> tuple[Failure, ProcessSpec | None]:
        """If one side of a transfer reports only that the other is gone: the failure of the other side."""
        if not _interrupted(failure):
            return failure, host
        what, place = str(running.task), self.hosts.place
        for ref, other in running.hosts.items():
            if ref in running.reports or other == host:
                continue
            remaining = running.since + place.deadline - time.monotonic()
            if not watch.wait([ref], min(GRACE_SECONDS, remaining))[0]:
                raise stuck(other, what, place, time.monotonic() - running.since)
            report: Report | Sent | Failure = result_of(ref, other, what, place)
            if isinstance(report, Failure) and not _interrupted(report):
                return report, other
        return failure, host

    def _blame(
        self, failure: Failure, host: ProcessSpec | None, what: str, peers: Iterable[ProcessSpec | None]
    ) -> Exception:
        """The error of a failure, or of a dead peer, or of the dead process that wrote a lost input."""
        suspects = [None, *self.hosts.actors] if failure.lost else [peer for peer in peers if peer != host]
        error: Exception = failure.error()
        if dead := self.hosts.dead(suspects):
            first, _, _ = failure.message.partition("\n")
            raise died(dead[0], what, self.hosts.place, first) from error
        return error

    def can_recover(self, error: NodeError) -> bool:
        """True for a dead process, which is restarted, and a dead engine, which restarts with its next sync."""
        return isinstance(error, HostDiedError) or any(isinstance(one, EngineError) for one in chain(error))

    def recover(self, error: NodeError) -> None:
        """Restart the processes of the lost role."""
        self._give_up()  # other instances may be running when the loss of a column is noticed
        if isinstance(error, HostDiedError):
            self.hosts.rebuild(error.host)

    # ---- engines

    @property
    def needs_sync(self) -> bool:
        """Whether an engine lost its weights while asleep."""
        return bool(self.hosts.unsynced_hosts)

    def version(self, role: str) -> int:
        """The version of a trained role's weights."""
        return int(self.hosts.ask(self.hosts.ranks(role), f"the version of {role}", "version", role)[0])

    def tokenizer(self, role: str) -> ChatTokenizer:
        """The tokenizer of a role that generates, loaded in the driver."""
        return ChatTokenizer(self.hosts.ask(self.hosts.ranks(role), "tokenizer", "tokenizer_folder", role)[0])

    def save(self, role: str, folder: Path) -> None:
        """Checkpoint a trained role, each rank its part."""
        self._refuse_elsewhere(role, folder.parent)
        self.hosts.ask_role(role, f"saving {role}", "save_checkpoint", role, str(folder.absolute()))

    def load(self, role: str, folder: Path) -> None:
        """Restore a trained role from what `save` wrote."""
        self.hosts.ask_role(role, f"loading {role}", "load_checkpoint", role, str(folder.absolute()))

    def save_pretrained(self, role: str, folder: Path) -> None:
        """Write a role's weights as a Hugging Face folder."""
        self.hosts.ask_role(role, f"writing {role}", "save_pretrained", role, str(folder.absolute()))

    def _refuse_elsewhere(self, role: str, folder: Path) -> None:
        """Refuse a folder that the driver does not share with all ranks of a role."""
        ranks = self.hosts.ranks(role)
        with tempfile.NamedTemporaryFile(dir=folder.absolute()) as probe:
            seen = self.hosts.ask(ranks, f"saving {role}", "sees", probe.name)
        if not all(seen):
            host = named(ranks[seen.index(False)])
            raise DataError(
                f"{host} is on a machine that does not share {folder.absolute()} with this one, so a checkpoint would "
                f"lack its part. Pass Training(folder=...) a folder that all machines share under the same path.",
                code="cluster.folder-not-shared",
                host=host,
                path=folder.absolute(),
            )


def _swapping(graph: Graph) -> list[str]:
    """The roles whose weights change while requests are in flight."""
    return [role for sync in spans.swaps(graph) for role in graph[sync].writes]


def column_type(node: Node, output: str) -> ColumnType:
    """The type of a column that a node writes."""
    expected = node.signature.outputs[output]
    assert isinstance(expected, ColumnType)
    return expected


def _shard(data_rank: int, data_ranks: int, rows: Array | None, lengths: Lengths | None) -> Shard:
    return Shard(
        data_rank,
        data_ranks,
        None if rows is None else torch.from_numpy(rows),
        None if lengths is None else torch.from_numpy(lengths.tokens),
    )


def _interrupted(failure: Failure) -> bool:
    """Whether the other side of a transfer is gone."""
    return any(isinstance(cause, Interrupted) for cause in failure.causes)
