"""The seconds of each node of a job, predicted before it ever ran: by formula, stated hardware and fitted constants."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import rows_of_step, transfers
from flowrl.core.graphs.plan import Plan
from flowrl.errors import ParameterError
from flowrl.protocols.backend import Backend
from flowrl.protocols.footprint import MICRO_BATCH
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.placement.placement import processes_of
from flowrl.run.prediction.arithmetic import HALF, Shape, shape_of
from flowrl.run.prediction.cost import Load
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.hardware import Hardware
from flowrl.run.prediction.measured.work import Work
from flowrl.run.prediction.memory import Footprints, RowLimits, call_of, hosts_of
from flowrl.run.prediction.timing import (
    BANDWIDTH,
    FITTED,
    LAUNCHES,
    SCORE,
    Lengths,
    Rollout,
    Speed,
    Trainer,
    generated_seconds,
    synced_seconds,
    trained_seconds,
    update_of,
)
from flowrl.run.training.job import Job

Kind = Literal["generate", "score", "update", "sync"]

MACHINE = 8
"""Devices of a machine, which links connect; stated."""

OWN_CODE = "its own code"
"""Why a node that runs no model has no predicted time."""


class StageTime(NamedTuple):
    """A node: its stage, its seconds in a step, and where they come from.

    Args:
        float32: whether it is predicted to compute in float32; published runs that were compared did not.
    """

    node: str
    kind: Kind
    seconds: float
    source: str
    float32: bool = False


@dataclass(frozen=True)
class Times:
    """The predicted times of a step.

    Args:
        seconds: of a step: its nodes one after another, or with a lag the busiest slot.
        unknown: nodes that are not predicted, with the reason.
    """

    stages: Sequence[StageTime]
    seconds: float
    unknown: Mapping[str, str]
    lag: int

    def of(self, kind: Kind) -> float:
        """The seconds of all nodes of a stage."""
        return sum(one.seconds for one in self.stages if one.kind == kind)


def times_of(
    job: Job[Any], hardware: Hardware, limits: RowLimits, mean: float, prompts: int, costs: Costs | None = None
) -> Times:
    """The predicted times of a job; reads the configurations of its models, and no weights.

    Args:
        mean: tokens of a row, prompt and response; prompts are counted as short of their limit as rows are of theirs.
        costs: measured ones, which replace the prediction of the nodes that they know.

    Raises:
        ParameterError: `hardware` states no speeds, or `mean` is over the limit.
    """
    if hardware.speed is None:
        raise ParameterError(
            f"Times need the speed of {hardware}. State it: 'Hardware(memory=80, flops=989, bandwidth=3350)', in "
            f"TFLOP/s and GB/s.",
            code="memory.no-speed",
            found=hardware,
        )
    most = limits.prompt + limits.response
    if not 0 < mean <= most:
        raise ParameterError(
            f"Rows of {mean:g} tokens on average and at most {most} cannot be. Pass a mean up to the most: "
            f"--lengths mean={max(most // 2, 1)},max={most}.",
            code="memory.mean-length",
            found=mean,
            limit=most,
        )
    asked = _Asked(job, hardware, hardware.speed, limits, Lengths(mean, most), prompts)
    stages: list[StageTime] = []
    unknown: dict[str, str] = {}
    for node in Plan(job.runs).order:
        found = (costs and asked.measured(node, costs)) or asked.predicted(node)
        if isinstance(found, StageTime):
            stages.append(found)
        elif found:
            unknown[node.name] = found
    lag = job.runs.lag.versions
    return Times(stages, asked.step(stages, lag), unknown, lag)


class _Asked:
    """A job on its hardware."""

    def __init__(
        self, job: Job[Any], hardware: Hardware, speed: Speed, limits: RowLimits, lengths: Lengths, prompts: int
    ) -> None:
        self._graph: Graph = job.runs
        self._hosts = hosts_of(job)
        self._in_process = job.place is None
        self._hardware, self._speed, self._lengths, self._prompts = hardware, speed, lengths, prompts
        self._prompt = limits.prompt * lengths.mean / max(lengths.longest, 1)
        self._response = limits.response
        self._footprints = Footprints(job, hardware, limits, prompts)

    def measured(self, node: Node, costs: Costs) -> StageTime | None:
        """A node by its measured cost; None if it has none, or no role."""
        if node.name not in costs.nodes or (kind := self._kind(node)) is None:
            return None
        rows = rows_of_step(self._graph, node.name, self._prompts) or 0
        ranks = max(len(processes_of(node, self._hosts)), 1)
        each = -(-rows // ranks)
        load = Load(each, round(each * self._lengths.mean), round(each * self._lengths.longest), self._response)
        load = Work.of(node).load(load, rows)
        return StageTime(node.name, kind, costs.seconds(node.name, ranks, load), f"measured in {costs.source}")

    def predicted(self, node: Node) -> StageTime | str | None:
        """A node by the formula of its stage, or why there is none; None for a node that takes no time of a model."""
        kind = self._kind(node)
        if node.is_input:
            return None
        if kind is None:
            return None if transfers(node) else OWN_CODE
        role = next(iter(node.reads if kind == "sync" else node.writes or node.roles))
        backend = self._owner(role)
        if getattr(backend, "starts_from", None) is None:
            return f"{role} names no model folder"
        shape = shape_of_backend(backend)
        if shape is None:
            return f"{role} is no Llama, Qwen or DeepSeek, by its config.json"
        rows = rows_of_step(self._graph, node.name, self._prompts)
        if kind == "sync":
            return self._sync(node, shape)
        if (speed := self._hardware.speed_float32 if _float32(backend) else self._speed) is None:
            return f"{role} computes in float32, and --hardware states no flops_float32="
        if rows is None:
            return "its number of rows is not known"
        if kind == "generate":
            return self._generate(node, shape, role, rows, speed)
        return self._train(node, shape, backend, kind, rows, speed)

    def _kind(self, node: Node) -> Kind | None:
        calls = {call_of(self._graph, role, node, self._in_process) for role in node.roles}
        if transfers(node):
            return None if self._in_process or not calls & {"send", "receive"} else "sync"
        return next((kind for kind in ("update", "generate", "score") if kind in calls), None)

    def _owner(self, role: str) -> Backend:
        backend: Backend = self._graph.bindings[role]
        return backend if backend.shares is None else self._graph.bindings[backend.shares]

    def _sync(self, node: Node, shape: Shape) -> StageTime:
        slots = {slot for host in self._hosts for slot in host.slots if set(host.roles) & set(node.roles)}
        near = max(slots) // MACHINE == min(slots) // MACHINE
        adapter = self._graph.bindings[node.writes[0]].receives == "adapter_weights"
        each = 2 * HALF if self._graph.bindings[node.writes[0]].synced_dtype == "float32" else HALF
        sent = self._footprints.footprint(node.reads[0], node).sent if adapter else each * shape.weights
        seconds = synced_seconds(sent, self._speed, FITTED, near)
        path, stated = ("link", self._hardware.link) if near else ("network", self._hardware.network)
        source = f"{sent / 1e9:.3g} GB over {FITTED.sync:.3g} of the {path}'s {stated:g} GB/s"
        return StageTime(node.name, "sync", seconds, source)

    def _train(self, node: Node, shape: Shape, backend: Any, kind: Kind, rows: int, speed: Speed) -> StageTime:
        mesh, float32 = backend.geometry, _float32(backend)
        repeats = getattr(node.operator, "ppo_epochs", 1) if kind == "update" else 1
        steps = repeats * -(-rows // (getattr(node.operator, "mini_batch", None) or rows)) if kind == "update" else 1
        rows *= repeats
        budget = getattr(backend, "max_tokens", None) or MICRO_BATCH[self._hardware.device]
        micro_batches = max(rows * self._lengths.mean / mesh.data_ranks / (budget * mesh.context), 1.0)
        waits = mesh.pipeline - 1  # a stage waits so many micro-batches of each mini-batch (arXiv:2104.04473, 2.2.1)
        idle = waits / (max(micro_batches / steps, 1.0) + waits)
        trainer = Trainer(
            mesh.ranks, mesh.fsdp, mesh.tensor, micro_batches, MACHINE, idle, mesh.pipeline, expert=mesh.expert
        )
        lora = getattr(backend, "lora", None) is not None
        passes = update_of(backend.gradient_checkpointing, lora, float32) if kind == "update" else SCORE
        seconds = trained_seconds(shape, speed, FITTED, self._lengths, rows, trainer, passes)
        source = (
            f"{passes.weights:g} passes over {rows * self._lengths.mean:.3g} tokens and {shape.active:.3g} weights on "
            f"{mesh.ranks} GPUs at {FITTED.compute:.3g} of {_tera(speed, float32)}"
        )
        source += f", of which stages wait {idle:.0%}" if idle else ""
        return StageTime(node.name, kind, seconds, source, float32)

    def _generate(self, node: Node, shape: Shape, role: str, rows: int, speed: Speed) -> StageTime:
        mine: Any = self._graph.bindings[role]
        wide, engines = mine.slots_per_rank, mine.ranks
        float32 = _float32(self._owner(role))
        limit = getattr(mine, "max_num_seqs", None) or getattr(mine, "max_rows", None) or rows
        cache = self._footprints.footprint(role, node).awake.get("KV cache")
        if cache is not None:
            each = max(shape.cache_bytes, 1) * (2 if float32 else 1)
            limit = min(limit, max(int(cache * wide / (self._lengths.mean * each)), 1))
        rollout = Rollout(engines, wide, limit)
        seconds = generated_seconds(shape, speed, FITTED, self._lengths, self._prompt, rows, rollout)
        layer = FITTED.layer if shape.experts else LAUNCHES
        source = (
            f"{rows} rows in {engines} engines of {limit} at a time, at {BANDWIDTH:.3g} of "
            f"{self._hardware.bandwidth:g} GB/s and {layer * 1e3:.3g} ms a layer"
        )
        return StageTime(node.name, "generate", seconds, source, float32)

    def step(self, stages: Iterable[StageTime], lag: int) -> float:
        """The seconds of a step."""
        if not lag:
            return sum(one.seconds for one in stages)
        busy: dict[int, float] = {}
        for one in stages:
            node = self._graph[one.node]
            running: list[ProcessSpec] = [host for host in self._hosts if set(host.roles) & set(node.roles)]
            for slot in {slot for host in running for slot in host.slots}:
                busy[slot] = busy.get(slot, 0.0) + one.seconds
        return max(busy.values(), default=0.0)


def by_reason(unknown: Mapping[str, str]) -> str:
    """Nodes without a predicted time, and why, as one text."""
    nodes = {why: [node for node, other in unknown.items() if other == why] for why in unknown.values()}
    return "; ".join(f"{', '.join(some)} ({why})" for why, some in nodes.items())


def _float32(backend: Any) -> bool:
    """Whether a backend computes in float32, the dtype of one that names none."""
    return getattr(backend, "dtype", "auto") in (None, "float32")


def _tera(speed: Speed, float32: bool) -> str:
    """Operations a second with their unit."""
    return f"{speed.flops / 1e12:g} TFLOP/s{' of float32' if float32 else ''}"


def config_of_backend(backend: Any) -> dict[str, Any]:
    """The ``config.json`` of a backend's model."""
    found: dict[str, Any] = json.loads((Path(backend.starts_from) / "config.json").read_text(encoding="utf-8"))
    return found


def shape_of_backend(backend: Any) -> Shape | None:
    """The shape of a backend's model; None if it names no folder, or its configuration has other names."""
    if getattr(backend, "starts_from", None) is None:
        return None
    try:
        return shape_of(config_of_backend(backend))
    except KeyError:
        return None
