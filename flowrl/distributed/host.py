"""`Host`: one process that holds the engines of one rank (or none), and runs nodes on them; a Ray actor."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.digest import combine, tensor_digest
from flowrl.distributed.place import HostPlan
from flowrl.distributed.wire import Array, Piece, join, pack, unpack
from flowrl.errors import FlowrlError, NodeError
from flowrl.job import Engines
from flowrl.metrics import Metrics
from flowrl.operator import Operator
from flowrl.session import Session

BUCKET_BYTES = 256 << 20
"""Weights leave a trainer in buckets of about this size: the extra memory of an export beyond the weights themselves."""


@dataclass(frozen=True)
class Export:
    """Weights on their way: what stands in for a trainer where its weights are received."""

    role: str
    version: int
    digest: str
    nbytes: int
    buckets: tuple[Any, ...]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, bucket by bucket, as they were sent."""
        for bucket in self.buckets:
            for name, dtype, shape, raw in ray.get(bucket):
                yield name, torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).reshape(shape)


@dataclass(frozen=True)
class Call:
    """A node to run.

    Args:
        operator: under its node's name.
        step, seed: what keys are derived from.
        state: the node's state cells.
        inputs: per slot its pieces, or its value.
        rows: which rows to run on; None for all.
        exports: trainers that live elsewhere, by role.
    """

    operator: Operator
    step: int
    seed: int
    state: Mapping[str, Any]
    inputs: Mapping[str, Any]
    rows: Array | None
    exports: Mapping[str, Export] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a node left: pieces of its columns (in the object store), its values, metrics, state, and times.

    `tokens` is how many tokens each row has, where the node made sequences: what rows are balanced by.
    """

    columns: Mapping[str, Piece]
    values: Mapping[str, Any]
    metrics: Metrics
    state: Mapping[str, Any]
    tokens: Array | None
    received: int
    started: float
    ended: float


class Host:
    """The process of one `HostPlan`; without a plan it is a general host, for nodes that use no role.

    Args:
        plan: roles, rank and slot.
        bindings: the backends of the plan's roles.
        seed: of the run.
    """

    def __init__(self, plan: HostPlan | None, bindings: Mapping[str, Any], seed: int) -> None:
        torch.set_num_threads(1)
        self.plan, self.bindings, self.seed = plan, bindings, seed
        self.engines: dict[str, Any] = {}

    def address(self) -> str:
        """Where rank 0 can be met: a host and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def pid(self) -> int:
        return os.getpid()

    def build(self, address: str | None) -> None:
        """Load the engines; with several ranks, meet the others first."""
        assert self.plan is not None
        if self.plan.ranks > 1:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, init_method=address, rank=self.plan.rank, world_size=self.plan.ranks)
        built = Engines(self.bindings, self.seed, self.plan.rank, self.plan.ranks)
        self.engines = built.all()

    def versions(self) -> dict[str, int]:
        """The version of every engine that has one."""
        return {role: engine.version for role, engine in self.engines.items() if hasattr(engine, "version")}

    def tokenizer_folder(self, role: str) -> str:
        """Where the tokeniser of an engine that generates was loaded from."""
        return str(self.engines[role].tokenizer.folder)

    def sleep(self) -> None:
        """Give the device's memory back until `wake`."""
        for engine in self.engines.values():
            if hasattr(engine, "sleep"):
                engine.sleep()

    def wake(self) -> None:
        for engine in self.engines.values():
            if hasattr(engine, "wake"):
                engine.wake()

    def run(self, call: Call) -> Report:
        """Run a node.

        Raises:
            NodeError: naming node, role, rank and step.
        """
        started = time.time()
        name = call.operator.name
        session = Session({**self.engines, **call.exports}, call.seed, call.state)
        session.begin_step(call.step)
        try:
            inputs, received, sizes = self._gather(call)
            with session.active():
                written = call.operator.signature.unpack(call.operator.run(inputs))
        except Exception as error:
            where = f" on {self.plan.name}" if self.plan is not None else ""
            raise NodeError(f"{name} failed{where} in step {call.step}: {type(error).__name__}: {error}") from (
                error if isinstance(error, FlowrlError) else None
            )
        types = call.operator.signature.outputs
        columns = {n: value for n, value in written.items() if isinstance(types[n], ColumnType)}
        for n, column in columns.items():
            wanted = types[n]
            assert isinstance(wanted, ColumnType)
            sizes |= dict(zip(wanted.axes, column.shape, strict=True))
        return Report(
            {n: self._put(column, call, sizes) for n, column in columns.items()},
            {n: value for n, value in written.items() if n not in columns},
            session.metrics.get(name, Metrics()),
            session.state,
            _tokens(columns),
            received,
            started,
            time.time(),
        )

    def _gather(self, call: Call) -> tuple[dict[str, Any], int, dict[str, int]]:
        """The node's inputs: pieces fetched, joined, and cut to the rows of this rank."""
        inputs: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        received = 0
        for slot, source in call.inputs.items():
            wanted = call.operator.signature.slots[slot]
            if not isinstance(wanted, ColumnType):
                inputs[slot] = source
                continue
            rows = call.rows if call.rows is not None else np.sort(np.concatenate([piece.rows for piece in source]))
            needed = [
                p for p in source if len(p.rows) == 0 or np.isin(p.rows, rows, assume_unique=True).any()
            ] or source[:1]
            received += sum(piece.nbytes for piece in needed)
            parts = [
                (piece.rows, unpack(packed), piece.prompt, piece.response)
                for piece, packed in zip(needed, ray.get([p.ref for p in needed]), strict=True)
            ]
            inputs[slot] = join(parts, wanted.axes, wanted.pad, rows)
            sizes |= dict(zip(wanted.axes, inputs[slot].shape, strict=True))
        return inputs, received, sizes

    def _put(self, column: Any, call: Call, sizes: Mapping[str, int]) -> Piece:
        packed = pack(column)
        fresh = call.rows is None or call.operator.changes_rows
        rows = np.arange(len(column)) if fresh else call.rows
        assert rows is not None
        response = sizes.get("response", 0)
        prompt = sizes["prompt"] if "prompt" in sizes else sizes.get("sequence", response) - response
        return Piece(rows, ray.put(packed), prompt, response, packed.nbytes)

    def export(self, role: str) -> Export | None:
        """The weights of a trainer, in buckets in the object store; every rank must be called, rank 0 answers."""
        engine = self.engines[role]
        assert self.plan is not None
        buckets: list[Any] = []
        bucket: list[Any] = []
        digests: dict[str, str] = {}
        size = total = 0
        for name, tensor in engine.weights():
            if self.plan.rank:
                continue  # gathering is collective; only rank 0 sends
            raw = tensor.detach().cpu().contiguous()
            digests[name] = tensor_digest(name, raw)
            array = raw.reshape(-1).view(torch.uint8).numpy().copy()
            bucket.append((name, str(raw.dtype).removeprefix("torch."), tuple(raw.shape), array))
            size, total = size + array.nbytes, total + array.nbytes
            if size >= BUCKET_BYTES:
                buckets.append(ray.put(bucket))
                bucket, size = [], 0
        if self.plan.rank:
            return None
        if bucket:
            buckets.append(ray.put(bucket))
        return Export(role, engine.version, combine(digests), total, tuple(buckets))

    def save_pretrained(self, role: str, folder: str) -> None:
        self.engines[role].save_pretrained(folder)

    def save_checkpoint(self, role: str, folder: str) -> None:
        self.engines[role].save_checkpoint(folder)

    def load_checkpoint(self, role: str, folder: str) -> None:
        self.engines[role].load_checkpoint(folder)

    def stop(self) -> None:
        """Leave the group of ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _tokens(columns: Mapping[str, Any]) -> Array | None:
    mask = columns.get("attention_mask", columns.get("prompt_mask"))
    if mask is None:
        return None
    counted: Array = mask.sum(-1).to(torch.int32).numpy()
    return counted
