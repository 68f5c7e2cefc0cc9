"""`Host`: one process that holds the engines of one rank (or none), and runs nodes on them; a Ray actor."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
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
from flowrl.core.operators.symbols import Edge
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.data.waits import Wait
from flowrl.distributed.export import Export
from flowrl.distributed.faults.faults import Failure, named
from flowrl.distributed.hosts.rendezvous import LOOPBACK, c10d, stay_on_loopback, store_at
from flowrl.distributed.hosts.wire import Array, ColumnPart, join, pack, unpack, widths
from flowrl.distributed.hosts.worker_logs import Warned, collect_warnings
from flowrl.errors import SyncError
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Adapted, Sleeper
from flowrl.records import Receipt
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.engine.local import failure
from flowrl.run.engine.nodes import lengths_of
from flowrl.run.engine.runner import Lengths
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.probe import arithmetic
from flowrl.sync.received import Origin
from flowrl.sync.route import Seat
from flowrl.sync.stream import Ticket, send
from flowrl.sync.wanted import WeightSelection, rounded


@dataclass(frozen=True)
class HostTask:
    """An instance that a host is to run, or its part of one.

    Args:
        operator: under its node's name.
        step, seed: what keys are derived from; None is between steps, where nothing is drawn.
        when: it runs, for messages.
        state: the state cells.
        inputs: by port field, the pieces of a column, or a value.
        rows: which rows to run on; None for all.
        now: what is injected, with the share of these rows where several ranks share the batch.
        sources: where the weights of trainers that live elsewhere are to be had, by role.
        written: the output that each input is of, for messages.
    """

    operator: Operator
    step: int | None
    seed: int
    when: str
    state: Mapping[str, Any]
    inputs: Mapping[PortField, Any]
    rows: Array | None
    now: Now
    sources: Mapping[str, Export | Ticket] = field(default_factory=dict)
    written: Mapping[PortField, Edge] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What an instance left on one host: pieces of its columns (in the object store), its values, metrics and state.

    Args:
        waits: what it waited for.
        said: what it warned of.
        lengths: of the rows that it wrote, where it wrote tokens.
        received: bytes that it fetched.
        started, fetched, ended: Unix seconds: of the call, when its columns were there, and when it was done.
    """

    columns: Mapping[str, ColumnPart]
    values: Mapping[str, Any]
    metrics: Metrics
    state: Mapping[str, Any]
    waits: Sequence[Wait]
    said: Sequence[Warned]
    lengths: Lengths | None
    received: int
    started: float
    fetched: float
    ended: float


@dataclass(frozen=True)
class Sent:
    """What a host sent: bytes, and when it started and ended, in Unix seconds."""

    nbytes: int
    started: float
    ended: float


class Host:
    """The process of one `ProcessSpec`; without a plan it is the general host, for nodes that use no role.

    Args:
        plan: roles, rank and slots.
        seed: of the run.
        path: where the driver imports from: whoever uses a class of their own in a graph has it there.
        folder: the driver's working directory, which is this process's too where there is one of that name: a worker
            of a cluster that was joined has that of ``ray start``.
        gpus: which the process is to see, if not the one that Ray shows it.
    """

    def __init__(
        self, plan: ProcessSpec | None, seed: int, path: Sequence[str], folder: str, gpus: str | None = None
    ) -> None:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before anything asks for a device; Ray has set it before this
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as with threads: there are several processes, and few cores
        torch.set_num_threads(1)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]
        self.plan, self.seed, self._gpus = plan, seed, gpus
        self.engines: dict[str, Any] = {}
        self._built: EngineBuilder | None = None
        self._store: Any = None

    def settle(self, backends: Sequence[Backend]) -> Seat:
        """Get ready to load these; where this process is, as Ray knows it."""
        for backend in backends:
            for module in backend.imports:
                importlib.import_module(module)
        context = ray.get_runtime_context()
        seen = context.get_accelerator_ids().get("GPU", []) if self._gpus is None else self._gpus.split(",")
        devices = tuple(map(str, seen)) if torch.cuda.is_available() else ()
        return Seat(str(context.get_node_id()), os.getpid(), devices)

    def sees(self, file: str) -> bool:
        """Whether this machine has a file."""
        return os.path.exists(file)

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def meeting_point(self, alone: bool, timeout: float) -> tuple[str, int]:
        """Open a store where the ranks can meet: at the loopback, if the job is on this machine alone; its address and
        port."""
        address = LOOPBACK if alone else ray.util.get_node_ip_address()
        self._store = store_at(address, timeout)
        return address, self._store.port

    def build(self, bindings: Mapping[str, Any], meeting: tuple[str, int] | None, alone: bool, timeout: float) -> None:
        """Load the engines.

        Args:
            bindings: the backends of the plan's roles.
            meeting: where several ranks meet, see `meeting_point`.
            alone: whether all of the job's processes with engines are on this machine.
            timeout: seconds that they wait for each other, then and in every collective.
        """
        assert self.plan is not None
        if alone:
            stay_on_loopback()
        if meeting is not None:
            patience = timedelta(seconds=timeout)
            store = c10d.TCPStore(*meeting, None, False, timeout=patience) if self._store is None else self._store
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=store,
                rank=self.plan.rank,
                world_size=self.plan.ranks,
                timeout=patience,
            )
        self._built = EngineBuilder(bindings, self.seed, self.plan.rank, self.plan.ranks)
        self.engines = self._built.all()

    def close(self) -> None:
        """End the engines."""
        if self._built is not None:
            self._built.close()

    def version(self, role: str) -> int:
        """The version of a trainer's weights."""
        return int(self.engines[role].version)

    def tokenizer_folder(self, role: str) -> str:
        """Where the tokeniser of an engine that generates was loaded from."""
        return str(self.engines[role].tokenizer.folder)

    def sleep(self) -> None:
        """Give the device's memory back until `wake`."""
        for engine in self.engines.values():
            if isinstance(engine, Sleeper):
                engine.sleep()

    def wake(self) -> None:
        """Take the device back."""
        for engine in self.engines.values():
            if isinstance(engine, Sleeper):
                engine.wake()

    def wanted(self, role: str) -> WeightSelection:
        """What an engine that generates wants of its trainer."""
        assert self._built is not None
        engine, backend = self.engines[role], self._built.bindings[role]
        return WeightSelection(backend.receives, arithmetic(engine), engine.probe if backend.probes else None)

    def export(self, role: str, wanted: WeightSelection, bucket_bytes: int) -> Export | None:
        """Put a trainer's weights into the object store. Gathering them is collective: every rank must be called, and
        rank 0 answers.

        Args:
            role: the trainer's.
            wanted: by the engine.
            bucket_bytes: see `Export.of`.

        Raises:
            SyncError: an adapter is wanted, and the trainer has none.
        """
        assert self.plan is not None
        with self._leaving(role, wanted) as (origin, tensors):
            return Export.of(origin, tensors, bucket_bytes) if self.plan.rank == 0 else None

    def send(self, role: str, wanted: WeightSelection, bucket_bytes: int, ticket: Ticket, what: str) -> Sent | Failure:
        """Carry a trainer's weights to the hosts that hold the same ticket; otherwise as `export`.

        Args:
            role, wanted: see `export`.
            bucket_bytes: see `flowrl.sync.stream.send`.
            ticket: where the others are met.
            what: the sync and its step, for the error.
        """
        assert self.plan is not None
        started, nbytes = time.time(), 0
        try:
            with self._leaving(role, wanted) as (origin, tensors):
                if self.plan.rank in ticket.senders:
                    nbytes = send(ticket, origin, tensors, bucket_bytes, self.plan.rank)
        except Exception as error:
            message = f"{what} failed on {named(self.plan)}, which sends: {type(error).__name__}: {error}"
            return Failure.of(error, message)
        return Sent(nbytes, started, time.time())

    @contextmanager
    def _leaving(self, role: str, wanted: WeightSelection) -> Iterator[tuple[Origin, Iterator[tuple[str, Tensor]]]]:
        """A trainer's weights, and what is known of them. Gathering them is collective, so they are gone through to
        their end whatever happens in the block."""
        engine = self.engines[role]
        adapter_of = None
        if wanted.part == "adapter_weights":
            if not isinstance(engine, Adapted):
                raise SyncError(
                    f"the engine that generates takes an adapter alone, and {role} trains all weights; give both the "
                    f"same lora=LoRA(...), or neither."
                )
            adapter_of = engine.adapter_of
        probe = wanted.probe
        scores = () if probe is None else probe.score(engine)
        computes_in = str(arithmetic(engine)).removeprefix("torch.")
        tensors = getattr(engine, wanted.part)()
        try:
            origin = Origin(role, engine.version, adapter_of, probe, scores, computes_in)
            yield origin, rounded(tensors, wanted.dtype)
        finally:
            for _ in tensors:
                pass

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write a Hugging Face folder."""
        self.engines[role].save_pretrained(folder)

    def save_checkpoint(self, role: str, folder: str) -> None:
        """Write what a trained engine needs to go on."""
        self.engines[role].save_checkpoint(folder)

    def load_checkpoint(self, role: str, folder: str) -> None:
        """Go on from what was written."""
        self.engines[role].load_checkpoint(folder)

    def run(self, task: HostTask) -> Report | Failure:
        """Run an instance."""
        inputs: dict[PortField, Any] = {}
        try:
            with collect_warnings() as said:
                return self._run(task, inputs, said)
        except Exception as error:
            message = failure(task.operator, f"{task.when} on {named(self.plan)}", error, inputs, task.written)
            return Failure.of(error, message)

    def _run(self, task: HostTask, inputs: dict[PortField, Any], said: Sequence[Warned]) -> Report:
        started = time.time()
        received, read = self._gather(task, inputs)
        fetched = time.time()
        with ExitStack() as stack:
            rank = 0 if self.plan is None else self.plan.rank
            sources = {role: stack.enter_context(sent.open(rank)) for role, sent in task.sources.items()}
            session = Session({**self.engines, **sources}, task.seed, task.state)
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
            said,
            lengths_of(columns),
            received,
            started,
            fetched,
            time.time(),
        )

    def _gather(self, task: HostTask, inputs: dict[PortField, Any]) -> tuple[int, Mapping[Own | None, tuple[int, int]]]:
        """Enter the inputs: of every column the rows of this rank, out of the pieces that hold them.

        Returns:
            the bytes that were taken, and how wide prompts and responses are; those of each port with axes of its own.
        """
        received = 0
        fields = task.operator.signature.fields
        # As wide as the widest, since the same rows may be in pieces of other widths in another column.
        read: dict[Own | None, tuple[int, int]] = {}
        for end, held in task.inputs.items():
            if isinstance(wanted := fields[end], ColumnType):
                widest = (max(piece.prompt for piece in held), max(piece.response for piece in held))
                prompt, response = read.get(wanted.own, (0, 0))
                read[wanted.own] = max(prompt, widest[0]), max(response, widest[1])
        for end, source in task.inputs.items():
            wanted = fields[end]
            if not isinstance(wanted, ColumnType):
                inputs[end] = source
                continue
            rows = task.rows if wanted.on_batch and end.name not in task.operator.replicated_columns else None
            inputs[end], nbytes = join_pieces(source, wanted, rows, read[wanted.own])
            received += nbytes
        return received, read


def join_pieces(
    pieces: list[ColumnPart],
    wanted: ColumnType,
    rows: Array | None = None,
    least: tuple[int, int] = (0, 0),
    seconds: float | None = None,
) -> tuple[Any, int]:
    """The column of which these are pieces, out of the object store: these rows of it, or all; see `join`.

    It is waited for so many seconds; without them for ever, which is for a host, whose answer the driver waits for.

    Returns:
        the column, and the bytes that were taken for it: those of its rows, as they travel.
    """
    everything = np.sort(np.concatenate([piece.rows for piece in pieces])) if rows is None else rows
    mine = [np.flatnonzero(np.isin(piece.rows, everything, assume_unique=True)) for piece in pieces]
    # Where no row is wanted, any piece says what a column of none looks like.
    needed = [(piece, own) for piece, own in zip(pieces, mine, strict=True) if len(own)] or [(pieces[0], mine[0])]
    parts, nbytes = [], 0
    held = ray.get([piece.ref for piece, _ in needed], timeout=seconds)
    for (piece, own), packed in zip(needed, held, strict=True):
        taken = packed if len(own) == len(piece.rows) else packed.take(own)
        parts.append((piece.rows[own], unpack(taken), piece.prompt, piece.response))
        nbytes += taken.nbytes
    return join(parts, wanted.axes, wanted.pad, everything, least), nbytes


def _put(
    columns: Mapping[str, Any], task: HostTask, read: Mapping[Own | None, tuple[int, int]]
) -> dict[str, ColumnPart]:
    """Put what an instance wrote into the object store, with the widths by which its pieces meet those of others."""
    sizes: dict[Own | None, dict[str, int]] = {}
    types = {name: wanted for name, wanted in task.operator.signature.outputs.items() if isinstance(wanted, ColumnType)}
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
