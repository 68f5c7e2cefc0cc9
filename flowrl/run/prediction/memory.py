"""The memory of each slot of a job, predicted before it runs: by node, the processes that are alive and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import rows_of_step, transfers
from flowrl.core.graphs.plan import Plan
from flowrl.errors import ParameterError
from flowrl.protocols.backend import Backend
from flowrl.protocols.footprint import Call, Demand, Footprint, Parts, stated
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import Synced
from flowrl.run.placement.place import ProcessSpec, fit_together, lay_out
from flowrl.run.placement.placement import processes_of
from flowrl.run.prediction.hardware import Hardware
from flowrl.run.training.job import Job
from flowrl.spec import parameters
from flowrl.sync.route import Location, choose


class RowLimits(NamedTuple):
    """The most tokens of a prompt and of a response."""

    prompt: int
    response: int


class Alive(NamedTuple):
    """What a process takes on a slot during a node: its `parts` in bytes, and whether it is asleep.

    Args:
        process: its roles, such as ``"actor+ref"``.
    """

    process: str
    parts: Parts
    asleep: bool

    @property
    def bytes(self) -> int:
        """The sum of its parts."""
        return sum(self.parts.values())


class Stage(NamedTuple):
    """A slot during a node."""

    node: str
    slot: int
    alive: tuple[Alive, ...]

    @property
    def bytes(self) -> int:
        """What all processes take."""
        return sum(one.bytes for one in self.alive)


@dataclass(frozen=True)
class Memory:
    """The predicted memory of a job.

    Args:
        hardware: of every slot.
        stages: of each node and slot.
        unknown: roles whose backend predicts nothing and states no ``memory=``; they count as 0.
    """

    hardware: Hardware
    limits: RowLimits
    stages: Sequence[Stage]
    unknown: Sequence[str] = ()

    @cached_property
    def peaks(self) -> Mapping[int, Stage]:
        """By slot, the stage that takes the most."""
        found: dict[int, Stage] = {}
        for stage in self.stages:
            if stage.slot not in found or stage.bytes > found[stage.slot].bytes:
                found[stage.slot] = stage
        return found

    @property
    def worst(self) -> Stage:
        """The stage that takes the most of all."""
        return max(self.peaks.values(), key=lambda stage: stage.bytes)

    @property
    def awake(self) -> list[str]:
        """The roles that are awake in stages that do not fit."""
        full = [one for stage in self.stages if stage.bytes > self.hardware.room for one in stage.alive]
        return sorted({role for one in full if not one.asleep for role in one.process.split("+")})

    @property
    def fits(self) -> bool:
        """Whether every slot has room at its peak."""
        return self.worst.bytes <= self.hardware.room


def memory_of(job: Job[Any], hardware: Hardware, limits: RowLimits, prompts: int | None = None) -> Memory:
    """The predicted memory of a job; reads the configurations of its models, and no weights.

    A role that states ``memory=`` takes that. In one process all engines are alive at all times; processes that share a
    slot take turns, and on a GPU the sides of a sync are awake together.

    Args:
        prompts: per step; None counts as many rows as fit into a micro-batch, or as an engine samples at a time.

    Raises:
        BindError: a configuration does not load, or a model's memory cannot be predicted; or the place has too few
            slots.
    """
    graph = job.runs
    hosts = hosts_of(job)
    asked = Footprints(job, hardware, limits, prompts)
    stages: list[Stage] = []
    for node in Plan(graph).order:
        if not node.roles:
            continue
        for running in _moments(node, hosts, job):
            for slot in sorted({slot for host in running for slot in host.slots}):
                alive = (asked.alive(host, node, host in running) for host in hosts if slot in host.slots)
                stages.append(Stage(node.name, slot, tuple(alive)))
    return Memory(hardware, limits, stages, sorted(asked.unknown))


def hosts_of(job: Job[Any]) -> list[ProcessSpec]:
    """The processes of a job; without a place, the one that holds all roles."""
    if job.place is not None:
        return lay_out(job.graph, job.place)
    return [ProcessSpec(tuple(job.graph.bindings), 0, Mesh(), (0,))]


def _moments(node: Node, hosts: Sequence[ProcessSpec], job: Job[Any]) -> list[list[ProcessSpec]]:
    """The processes that are awake together for a node, one moment after the other: those that run it, and those that
    send to them."""
    running = processes_of(node, hosts)
    senders = [host for host in hosts if transfers(node) and set(node.reads) & set(host.roles)]
    room = None if job.place is None else job.place.memory
    if fit_together(job.graph.bindings, room, senders, running):
        return [[*running, *senders]]
    return [senders, running]


class Footprints:
    """The footprints of a job's engines; `unknown` are roles whose backends predict none."""

    def __init__(self, job: Job[Any], hardware: Hardware, limits: RowLimits, prompts: int | None) -> None:
        self._job, self._graph = job, job.runs
        self._hardware, self._limits, self._prompts = hardware, limits, prompts
        self._in_process = job.place is None
        self.unknown: set[str] = set()
        self._found: dict[tuple[str, str], Footprint] = {}

    def alive(self, host: ProcessSpec, node: Node, runs: bool) -> Alive:
        """What a process takes during a node that it `runs`, or during which it sleeps or waits."""
        asleep = not runs and self._hardware.device == "cuda" and not self._in_process
        parts: dict[str, int] = {}
        for role in host.roles:
            footprint = self.footprint(role, node)
            _add(parts, (footprint.asleep if asleep else footprint.awake).items())
            if runs and (call := call_of(self._graph, role, node, self._in_process)) is not None:
                _add(parts, footprint.calls.get(call, {}).items())
        if "CUDA" in parts:  # once for a process
            parts["CUDA"] = max(self.footprint(role, node).awake.get("CUDA", 0) for role in host.roles)
        return Alive("+".join(host.roles), parts, asleep)

    def footprint(self, role: str, node: Node) -> Footprint:
        """The footprint of a role's engine, as the node asks it."""
        if (key := (role, node.name)) not in self._found:
            self._found[key] = self._footprint(role, node)
        return self._found[key]

    def _footprint(self, role: str, node: Node) -> Footprint:
        backend: Backend = self._graph.bindings[role]
        if backend.memory is not None:
            return stated(backend.memory)
        found = backend.footprint(self._demand(backend, node))
        if found is None:
            self.unknown.add(role)
        return found or Footprint({}, {})

    def _demand(self, backend: Backend, node: Node) -> Demand:
        share = backend.geometry.data_ranks
        rows = rows_of_step(self._graph, node.name, self._prompts)
        mini_batch = getattr(node.operator, "mini_batch", None)
        rows = rows if rows is None or mini_batch is None else min(rows, mini_batch)
        return Demand(
            *self._limits,
            rows=rows and -(-rows // share),
            prompts=self._prompts and -(-self._prompts // share),
            device=self._hardware.device,
            room=self._hardware.room,
            distributions="distributions" in getattr(getattr(node.operator, "loss", None), "model_ports", ()),
            in_process=self._in_process,
            owner=None if backend.shares is None else self._graph.bindings[backend.shares],
            sent_in=self._graph.bindings[node.writes[0]].synced_dtype if transfers(node) else "float32",
            adapter=transfers(node) and self._graph.bindings[node.writes[0]].receives == "adapter_weights",
            transport=self._transport(node) if transfers(node) and not self._in_process else "in process",
        )

    def _transport(self, node: Node) -> str:
        """The transport of a sync, as `flowrl.distributed.delivery.Delivery` chooses it."""
        hosts, is_cuda = hosts_of(self._job), self._hardware.device == "cuda"
        sides = [[host for host in hosts if set(host.roles) & set(roles)] for roles in (node.reads, node.writes)]
        places = [
            [Location("", hosts.index(host), tuple(map(str, host.slots)) if is_cuda else ()) for host in side]
            for side in sides
        ]
        found, _ = choose(*places)
        together = fit_together(self._job.graph.bindings, getattr(self._job.place, "memory", None), *sides)
        return found if together or found != "cuda ipc" else "object store"


def call_of(graph: Graph, role: str, node: Node, in_process: bool) -> Call | None:
    """What a node asks of a role's engine; None for an alias, which a sync copies nothing to."""
    if role not in node.roles:
        return None
    if transfers(node):
        if any(graph.bindings[written].shares in node.reads for written in node.writes):
            return None
        return "receive" if role in node.writes else None if in_process else "send"
    if role in node.writes:
        return "update"
    generates = any(use.role == role and use.goes_through(Synced) for use in node.uses)
    return "generate" if generates else "score"


def _add(parts: dict[str, int], more: Iterable[tuple[str, int]]) -> None:
    for name, size in more:
        parts[name] = parts.get(name, 0) + size


def limits_of(graph: Graph, sources: Iterable[Any], given: Mapping[str, int]) -> RowLimits:
    """The longest rows of a graph: of its settings and its `sources` of data, unless they are `given`.

    Args:
        given: tokens by ``"prompt"`` and ``"response"``, or by ``"max"`` of both together.

    Raises:
        ParameterError: no setting limits a prompt or a response.
    """
    found: dict[str, int | None] = {"prompt": None, "response": None}
    for source in sources:
        for name in found:
            found[name] = _most(found[name], getattr(source, f"max_{name}_length", None))
    for settings in map(parameters, _operators(graph)):
        if (context := settings.get("context")) and isinstance(context, int):  # an episode ends where it is full
            found |= {"prompt": 0, "response": _most(found["response"], context)}
        found["response"] = _most(found["response"], settings.get("max_new_tokens"))
    found |= {name: given[name] for name in found if name in given}
    if (most := given.get("max")) is not None:
        prompt = min(found["prompt"] or 1, most)
        found = {"prompt": prompt, "response": most - prompt}
    for name, tokens in found.items():
        if tokens is None:
            fix = f"max_{name}_length= of its data" if name == "prompt" else "max_new_tokens of a node that generates"
            raise ParameterError(
                f"{graph.name} has no longest {name}, on which the memory of activations and caches depends; expected "
                f"{fix}. Set it, or pass --lengths {name}=1024.",
                code="memory.unknown-length",
                graph=graph.name,
                missing=name,
            )
    return RowLimits(**{name: int(tokens or 0) for name, tokens in found.items()})


def _operators(graph: Graph) -> Iterator[Any]:
    return (node.operator for node in graph.nodes.values() if not node.is_input)


def _most(one: int | None, other: Any) -> int | None:
    return one if not isinstance(other, int) else max(one or 0, other)
