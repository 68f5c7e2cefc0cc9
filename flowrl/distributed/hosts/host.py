"""`Host`: a Ray actor with the engines of one rank (or none), which runs nodes on them."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.columns import ColumnType, Own
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Call, Session
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.data.waits import Wait
from flowrl.distributed.export import Export
from flowrl.distributed.faults.faults import Failure, named
from flowrl.distributed.hosts.remote_engine import EngineAddress, EngineFacts, RequestServer
from flowrl.distributed.hosts.rendezvous import LOOPBACK, c10d, stay_on_loopback, store_at
from flowrl.distributed.hosts.wire import Array, ColumnPart, join, pack, unpack, widths
from flowrl.distributed.hosts.worker_logs import Warned, collect_warnings
from flowrl.errors import FlowrlError, SyncError
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Adapted, Request, Sleeper
from flowrl.protocols.remote import Ended
from flowrl.protocols.scorers import Follower
from flowrl.records import Receipt
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.engine.local import failure
from flowrl.run.engine.nodes import lengths_of
from flowrl.run.engine.not_finite import not_finite
from flowrl.run.engine.runner import Lengths
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.group import connect
from flowrl.sync.probe import compute_dtype
from flowrl.sync.received import Origin
from flowrl.sync.route import Location
from flowrl.sync.shadow import Shadow
from flowrl.sync.stream import Ticket, send
from flowrl.sync.weight_selection import WeightSelection, outgoing


@dataclass(frozen=True)
class HostTask:
    """An instance for a host to run, or its part of one.

    Args:
        step: of the keys; None between steps, where no random numbers are used.
        when, task: the step, and node and step as facts, for errors.
        inputs: by port field, the pieces of a column, or a value.
        rows: which rows to run on; None for all.
        now: injected into the operator, with the shard of these rows if several ranks split the batch.
        sources: by role of a trainer in another process, the source of its weights.
        receiver: the role of the engine that receives them.
        asked: the engines in other processes that the node may ask.
    """

    operator: Operator
    step: int | None
    seed: int
    when: str
    task: Mapping[str, Any]
    state: Mapping[str, Any]
    inputs: Mapping[PortField, Any]
    rows: Array | None
    now: Now
    sources: Mapping[str, Export | Ticket] = field(default_factory=dict)
    receiver: str = ""
    asked: Sequence[EngineAddress] = ()


@dataclass(frozen=True)
class Report:
    """The results of an instance on one host: pieces of its columns (in the object store), values, metrics and state.

    Args:
        lengths: of the rows that it wrote, if it wrote tokens.
        not_finite: the columns with NaN or infinity.
        started, fetched, ended: Unix seconds of the call, of the arrival of its inputs, and of its end.
    """

    columns: Mapping[str, ColumnPart]
    values: Mapping[str, Any]
    metrics: Metrics
    state: Mapping[str, Any]
    waits: Sequence[Wait]
    warnings: Sequence[Warned]
    lengths: Lengths | None
    received: int
    started: float
    fetched: float
    ended: float
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sent:
    """Weights that a host sent: bytes, and start and end in Unix seconds."""

    nbytes: int
    started: float
    ended: float


class Host:
    """The process of one `ProcessSpec`; without a plan, the general host, for nodes without a role.

    Args:
        path: the driver's import path, so that users' classes can be imported.
        folder: the driver's working directory, which becomes that of this process if it exists here: workers of a
            joined cluster start in that of ``ray start``.
        gpus: CUDA_VISIBLE_DEVICES of the process, if not the GPU that Ray assigns.
    """

    def __init__(
        self, plan: ProcessSpec | None, seed: int, path: Sequence[str], folder: str, gpus: str | None = None
    ) -> None:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before any use of a device, and after Ray set it
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # like threads below: several processes share few cores
        torch.set_num_threads(1)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]
        self.plan, self.seed, self._gpus = plan, seed, gpus
        self.engines: dict[str, Any] = {}
        self._built: EngineBuilder | None = None
        self._store: Any = None
        self._sent: dict[str, Shadow] = {}  # by the role of an engine that receives only changes
        self._held: dict[str, Shadow] = {}  # by the role of such an engine in this process
        self._servers: dict[str, RequestServer] = {}  # by role

    def load_modules(self, backends: Sequence[Backend]) -> Location:
        """Import the modules of these backends; returns where Ray placed this process."""
        for backend in backends:
            for module in backend.imports:
                importlib.import_module(module)
        context = ray.get_runtime_context()
        seen = context.get_accelerator_ids().get("GPU", []) if self._gpus is None else self._gpus.split(",")
        devices = tuple(map(str, seen)) if torch.cuda.is_available() else ()
        return Location(str(context.get_node_id()), os.getpid(), devices)

    def sees(self, file: str) -> bool:
        """Whether a file exists on this machine."""
        return os.path.exists(file)

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def rendezvous_address(self, one_node: bool, timeout: float) -> tuple[str, int]:
        """Open a rendezvous store for the ranks, on the loopback if the whole job is on this machine; returns address
        and port."""
        address = LOOPBACK if one_node else ray.util.get_node_ip_address()
        self._store = store_at(address, timeout)
        return address, self._store.port

    def download(self, bindings: Mapping[str, Any]) -> None:
        """Download the repositories of the models to this machine; those of another process there are waited for."""
        for backend in bindings.values():
            backend.local()

    def build(
        self, bindings: Mapping[str, Any], rendezvous: tuple[str, int] | None, one_node: bool, timeout: float
    ) -> None:
        """Load the engines.

        `rendezvous` is the `rendezvous_address` of several ranks, `one_node` whether all processes of the job with
        engines are on this machine. The `timeout` in seconds is that of the rendezvous and of every collective.
        """
        assert self.plan is not None
        if one_node:
            stay_on_loopback()
        if rendezvous is not None:
            patience = timedelta(seconds=timeout)
            store = c10d.TCPStore(*rendezvous, None, False, timeout=patience) if self._store is None else self._store
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=store,
                rank=self.plan.rank,
                world_size=self.plan.mesh.ranks,
                timeout=patience,
            )
        self._built = EngineBuilder(bindings, self.seed, self.plan.rank, self.plan.mesh.ranks)
        self.engines = self._built.all()

    def close(self) -> None:
        """Close the engines."""
        if self._built is not None:
            self._built.close()

    def version(self, role: str) -> int:
        """The version of a trainer's weights."""
        return int(self.engines[role].version)

    def tokenizer_folder(self, role: str) -> str:
        """The folder of the tokenizer of an engine that generates."""
        return str(self.engines[role].tokenizer.folder)

    def sleep(self) -> None:
        """Release the device until `wake`."""
        for engine in self.engines.values():
            if isinstance(engine, Sleeper):
                engine.sleep()

    def wake(self) -> None:
        """Reclaim the device."""
        for engine in self.engines.values():
            if isinstance(engine, Sleeper):
                engine.wake()

    def weight_selection(self, role: str) -> WeightSelection:
        """The weights that an engine needs from its trainer."""
        assert self._built is not None
        engine, backend = self.engines[role], self._built.bindings[role]
        dtype = torch.float32 if isinstance(engine, Follower) else compute_dtype(engine)
        return WeightSelection(backend.receives, dtype, engine.probe if backend.probes else None)

    def last_sync(self, role: str) -> str | None:
        """The last sync of which this process has a copy of an engine's weights; None without one."""
        return self._held[role].sync if role in self._held else None

    def last_sent(self, engine: str) -> str | None:
        """The last sync to an engine of which this process has a copy of what it sent; None without one."""
        return self._sent[engine].sync if engine in self._sent else None

    def export(self, role: str, selection: WeightSelection, bucket_bytes: int) -> Export:
        """Put this rank's share of a trainer's weights into the object store. Gathering is collective: call all
        ranks."""
        assert self.plan is not None
        with self._outgoing(role, selection, self.plan.mesh.shares > 1) as (origin, rounds):
            return Export.of(origin, chain.from_iterable(rounds), bucket_bytes)

    def reach(self, ticket: Ticket) -> None:
        """Raise `flowrl.sync.group.Interrupted` if this process cannot connect to the store of a ticket."""
        connect(ticket.host, ticket.port, ticket.timeout)

    def send(
        self, role: str, selection: WeightSelection, bucket_bytes: int, ticket: Ticket, what: str
    ) -> Sent | Failure:
        """Stream a trainer's weights, or this rank's share, to the hosts with the same ticket. Gathering is collective,
        as in `export`."""
        assert self.plan is not None
        started, nbytes = time.time(), 0
        try:
            with self._outgoing(role, selection, ticket.shared) as (origin, rounds):
                if any(self.plan.rank in senders for senders in ticket.senders):
                    nbytes = send(ticket, origin, rounds, bucket_bytes, self.plan.rank)
        except Exception as error:
            text = error.message if isinstance(error, FlowrlError) else error
            message = f"{what} failed on {named(self.plan)}, which sends: {type(error).__name__}: {text}"
            return Failure.of(error, message, task=what, host=named(self.plan))
        return Sent(nbytes, started, time.time())

    @contextmanager
    def _outgoing(
        self, role: str, selection: WeightSelection, shared: bool
    ) -> Iterator[tuple[Origin, Iterator[Iterator[tuple[str, Tensor]]]]]:
        """A trainer's weights, or this rank's share if it is `shared`, or their changes, in rounds; and their origin.
        Gathering is collective, so all of them are iterated even if the block raises."""
        assert self.plan is not None
        engine, since = self.engines[role], selection.since
        adapter_of = None
        if selection.part == "adapter_weights":
            if not isinstance(engine, Adapted):
                raise SyncError(
                    f"The rollout engine needs an adapter, but {role} trains all weights. Give both the same "
                    f"lora=LoRA(...), or neither.",
                    code="sync.no-adapter",
                    role=role,
                )
            adapter_of = engine.adapter_of
        probe = selection.probe
        scores = () if probe is None else probe.score(engine)
        computes_in = str(compute_dtype(engine)).removeprefix("torch.")
        tensors = getattr(engine, selection.part)()
        rounds = outgoing(tensors, selection.dtype, self.plan.position.share if shared else None)
        try:
            origin = Origin(role, engine.version, adapter_of, probe, scores, computes_in)
            if since is not None:
                shadow = self._sent.setdefault(since.engine, Shadow())
                origin = replace(origin, sync=since.sync, base=since.base)
                rounds = shadow.outgoing(rounds, since.sync, since.base)
            yield origin, rounds
        finally:
            for _ in tensors:
                pass

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write a Hugging Face folder."""
        self.engines[role].save_pretrained(folder)

    def save_checkpoint(self, role: str, folder: str) -> None:
        """Write the checkpoint of a trained engine."""
        self.engines[role].save_checkpoint(folder)

    def load_checkpoint(self, role: str, folder: str) -> None:
        """Restore a trained engine from its checkpoint."""
        self.engines[role].load_checkpoint(folder)

    def run(self, task: HostTask) -> Report | Failure:
        """Run an instance."""
        inputs: dict[PortField, Any] = {}
        try:
            with collect_warnings() as warnings:
                return self._run(task, inputs, warnings)
        except Exception as error:
            message = failure(task.operator, f"{task.when} on {named(self.plan)}", error, inputs)
            return Failure.of(error, message, **task.task, host=named(self.plan))

    def open_requests(self, role: str, asker: str) -> EngineFacts | Failure:
        """Get ready for the requests of another process to an engine that generates."""
        engine = self.engines[role]
        server = self._servers.setdefault(role, RequestServer(engine))
        try:
            server.open(asker)
            return EngineFacts(str(engine.tokenizer.folder), engine.receipt)
        except Exception as error:
            return self._refused(role, error)

    def exchange(
        self, role: str, asker: str, requests: Sequence[Request], dropped: Sequence[str]
    ) -> list[Ended] | Failure:
        """Serve requests of another process; see `RequestServer.exchange`."""
        try:
            return self._servers[role].exchange(asker, requests, dropped)
        except Exception as error:
            return self._refused(role, error)

    def _refused(self, role: str, error: Exception) -> Failure:
        text = error.message if isinstance(error, FlowrlError) else error
        message = f"The engine {role!r}, which was asked, failed on {named(self.plan)}: {type(error).__name__}: {text}"
        return Failure.of(error, message, role=role, host=named(self.plan))

    def _run(self, task: HostTask, inputs: dict[PortField, Any], warnings: Sequence[Warned]) -> Report:
        started = time.time()
        received, read = self._gather(task, inputs)
        fetched = time.time()
        with ExitStack() as stack:
            rank = 0 if self.plan is None else self.plan.rank
            held = self._held.setdefault(task.receiver, Shadow()) if task.sources else Shadow()
            stack.enter_context(held.loading())
            sources = {role: stack.enter_context(sent.open(rank, held)) for role, sent in task.sources.items()}
            handles = {address.role: address.connect() for address in task.asked}
            session = Session({**self.engines, **sources, **handles}, task.seed, task.state)
            session.begin_step(task.step or 0, task.now)
            with session.active():
                _, written = Call(task.operator, session.engine).run_in(session, inputs)
            for source in sources.values():
                written = {n: source.check(v) if isinstance(v, Receipt) else v for n, v in written.items()}
        types = task.operator.signature.outputs
        columns = {name: value for name, value in written.items() if isinstance(types[name], ColumnType)}
        return Report(
            _put(columns, task, read),
            {name: value for name, value in written.items() if name not in columns},
            session.all_metrics(),
            session.changed(),
            task.now.waits,
            warnings,
            lengths_of(columns),
            received,
            started,
            fetched,
            time.time(),
            not_finite(columns),
        )

    def _gather(self, task: HostTask, inputs: dict[PortField, Any]) -> tuple[int, Mapping[Own | None, tuple[int, int]]]:
        """Fill in the inputs: of each column the rows of this rank, from its pieces."""
        received = 0
        fields = task.operator.signature.fields
        # The largest widths, because the same rows may be in pieces of other widths in another column.
        read: dict[Own | None, tuple[int, int]] = {}
        for end, pieces in task.inputs.items():
            if isinstance(expected := fields[end], ColumnType):
                widest = (max(piece.prompt for piece in pieces), max(piece.response for piece in pieces))
                prompt, response = read.get(expected.own, (0, 0))
                read[expected.own] = max(prompt, widest[0]), max(response, widest[1])
        for end, source in task.inputs.items():
            expected = fields[end]
            if not isinstance(expected, ColumnType):
                inputs[end] = source
                continue
            rows = task.rows if expected.on_batch and end.name not in task.operator.replicated_columns else None
            inputs[end], nbytes = join_pieces(source, expected, rows, read[expected.own])
            received += nbytes
        return received, read


def join_pieces(
    pieces: list[ColumnPart],
    expected: ColumnType,
    rows: Array | None = None,
    least: tuple[int, int] = (0, 0),
    seconds: float | None = None,
) -> tuple[Any, int]:
    """Fetch some or all rows of a column from its pieces in the object store; see `join`.

    The timeout is `seconds`; a host needs none, because the driver waits for its result. Also returns the bytes of the
    rows on the wire.
    """
    everything = np.sort(np.concatenate([piece.rows for piece in pieces])) if rows is None else rows
    mine = [np.flatnonzero(np.isin(piece.rows, everything, assume_unique=True)) for piece in pieces]
    # If no row is selected, any piece has the dtype and axes.
    needed = [(piece, own) for piece, own in zip(pieces, mine, strict=True) if len(own)] or [(pieces[0], mine[0])]
    parts, nbytes = [], 0
    fetched = ray.get([piece.ref for piece, _ in needed], timeout=seconds)
    for (piece, own), packed in zip(needed, fetched, strict=True):
        taken = packed if len(own) == len(piece.rows) else packed.take(own)
        parts.append((piece.rows[own], unpack(taken), piece.prompt, piece.response))
        nbytes += taken.nbytes
    return join(parts, expected.axes, expected.pad, everything, least), nbytes


def _put(
    columns: Mapping[str, Any], task: HostTask, read: Mapping[Own | None, tuple[int, int]]
) -> dict[str, ColumnPart]:
    """Put the columns of an instance into the object store, with the widths for joining them with other pieces."""
    sizes: dict[Own | None, dict[str, int]] = {}
    outputs = task.operator.signature.outputs
    types = {name: type for name, type in outputs.items() if isinstance(type, ColumnType)}
    for name, column in columns.items():
        sizes.setdefault(types[name].own, {}).update(zip(types[name].axes, column.shape, strict=True))
    pieces = {}
    for name, column in columns.items():
        packed, own = pack(column), types[name].own
        rows = (
            task.rows if task.rows is not None and not task.operator.creates_axis("batch") else np.arange(len(column))
        )
        pieces[name] = ColumnPart(rows, ray.put(packed), *widths(sizes[own], read.get(own, (0, 0))), packed.nbytes)
    return pieces
