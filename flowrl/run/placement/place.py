"""Places: where the ranks of roles run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import lcm

from pydantic import Field

from flowrl.core.graphs.graph import Graph, Node
from flowrl.errors import BindError
from flowrl.protocols.backend import Backend, refuse_uncheckpointed
from flowrl.protocols.mesh import Mesh, Position
from flowrl.protocols.protocols import Synced
from flowrl.run.engine.steps import Steps
from flowrl.spec import Spec, written


class Place(Spec):
    """Base of places: the number of slots, the roles that may use them, and how a job is opened.

    A slot is a GPU, or on a machine without GPUs a CPU.

    Args:
        memory: GiB per slot, to check the sizes that backends declare; None does not check.
        per_machine: slots of each machine, so that ranks that compute a layer together share one; None: any number.
    """

    schedulable = False

    memory: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True, kw_only=True)
    per_machine: int | None = Field(default=None, ge=1, strict=True, kw_only=True)

    @property
    def slots(self) -> int:
        """The number of slots."""
        raise NotImplementedError

    @property
    def machines(self) -> list[range]:
        """The slots of each machine; without `per_machine`, all of them."""
        each = self.per_machine or self.slots
        return [range(first, min(first + each, self.slots)) for first in range(0, self.slots, each)]

    @property
    def rebuilds(self) -> bool:
        """Whether a role that died is rebuilt, with its trained weights after the last step."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether engines may run on other machines, with other folders."""
        return False

    def slots_of(self, role: str, generates: bool) -> range:
        """The slots that a role's ranks may take."""
        raise NotImplementedError

    def warm_up(self, graph: Graph) -> None:
        """Start slow work in the background, such as imports, before `graph` is opened."""

    def open(self, graph: Graph, seed: int) -> AbstractContextManager[Steps]:
        """Open a bound graph, with all engines loaded; its processes end with the block.

        Raises:
            BindError, GraphError: the graph does not fit the place; before any model loads.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ProcessSpec:
    """A planned process: its roles (which share weights), its rank in their mesh, and its slots, which are on one
    machine."""

    roles: tuple[str, ...]
    rank: int
    mesh: Mesh
    slots: tuple[int, ...]

    @property
    def position(self) -> Position:
        """What it is in the mesh."""
        return self.mesh.position(self.rank)

    @property
    def name(self) -> str:
        return f"{'+'.join(self.roles)}[{self.rank}]"

    def shares_slots_with(self, other: ProcessSpec) -> bool:
        """Whether two different processes share a slot, so that they take turns."""
        return self != other and not set(self.slots).isdisjoint(other.slots)


def asked_by(node: Node, processes: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """The processes of the engines that a node may ask, other than its own; they are awake while it runs."""
    asked = {use.role for use in node.uses if use.asked}
    return [one for one in processes if asked & set(one.roles) and node.home not in one.roles]


def together(graph: Graph, processes: Sequence[ProcessSpec]) -> Iterator[tuple[Node, int, list[ProcessSpec]]]:
    """The nodes for which several processes of a slot are awake at once, with the slot and these processes."""
    for node in graph.nodes.values():
        if asked := asked_by(node, processes):
            awake = [*(one for one in processes if node.home in one.roles), *asked]
            for slot in sorted({slot for one in awake for slot in one.slots}):
                if len(sharing := [one for one in awake if slot in one.slots]) > 1:
                    yield node, slot, sharing


def fit_together(
    bindings: Mapping[str, Backend],
    room: float | None,
    senders: Sequence[ProcessSpec],
    receivers: Sequence[ProcessSpec],
) -> bool:
    """Whether both sides of a sync fit on the slots that they share, by the memory that their backends declare, in GiB
    or as a share of the `room` of a slot; without it they do. If not, the senders export their weights and sleep before
    the others wake."""
    if room is None:
        return True
    size = {
        host: sum(bindings[role].memory or (bindings[role].share or 0.0) * room for role in host.roles)
        for host in [*senders, *receivers]
    }
    pairs = [(a, b) for a in senders for b in receivers if a.shares_slots_with(b)]
    return all(size[a] + size[b] <= room for a, b in pairs)


def lay_out(graph: Graph, place: Place) -> list[ProcessSpec]:
    """Assign the processes of a bound graph to slots: each rank to the slots that have the fewest processes so far.

    A rank with several slots, and the ranks that compute a layer together, get adjacent ones of one machine, aligned to
    their width from the role's first slot there.
    """
    bindings: Mapping[str, Backend] = graph.bindings
    if place.rebuilds:
        refuse_uncheckpointed(graph.trained, bindings, written(place), "drop restart='role'")
    groups: dict[str, list[str]] = {}
    for role in bindings:
        groups.setdefault(_owner(role, bindings), []).append(role)
    hosts: list[ProcessSpec] = []
    load = dict.fromkeys(range(place.slots), 0)
    for owner, roles in groups.items():
        generates = any(use.goes_through(Synced) for use in graph.roles()[owner])
        allowed = place.slots_of(owner, generates)
        mesh, each = bindings[owner].geometry, max(bindings[role].slots_per_rank for role in roles)
        _refuse_too_few(owner, mesh, each, allowed, place)
        if odd := next((role for role in roles if bindings[role].geometry not in (Mesh(), mesh)), None):
            raise BindError(
                f"The role {odd!r} has {bindings[odd].geometry.ranks} ranks but shares the weights of {owner!r}, which "
                f"has {mesh.ranks}. Bind {odd} without ranks, so that it follows {owner}.",
                code="place.ranks",
                role=odd,
                owner=owner,
                found=bindings[odd].geometry.ranks,
                expected=mesh.ranks,
            )
        together = tuple(sorted(roles, key=lambda role: role != owner))
        found = _groups_of_slots(owner, mesh, each, allowed, place)
        count = mesh.ranks * each // len(found[0])
        chosen = sorted(found, key=lambda slots: sum(load[slot] for slot in slots))[:count]
        spans = [tuple(slots[i : i + each]) for slots in sorted(chosen, key=min) for i in range(0, len(slots), each)]
        for rank, span in enumerate(spans):
            hosts.append(ProcessSpec(together, rank, mesh, span))
            for slot in span:
                load[slot] += 1
    _refuse_too_large(bindings, hosts, place)
    _refuse_too_large_together(graph, hosts, place)
    return hosts


def _refuse_too_few(role: str, mesh: Mesh, each: int, allowed: range, place: Place) -> None:
    """Refuse more ranks, of `each` slots, than a role has slots for."""
    if mesh.ranks * each > len(allowed):
        wide = f" of {each} slots each" if each > 1 else ""
        narrower = ", or fewer slots per rank (tensor_parallel)" if each > 1 else ""
        raise BindError(
            f"The role {role!r} has {mesh.ranks} ranks{wide}, but {written(place)} has {len(allowed)} slot(s) for it. "
            f"Use a place with more slots, or bind {role} with fewer ranks{narrower}.",
            code="place.too-few-slots",
            role=role,
            place=written(place),
            ranks=mesh.ranks,
            slots_per_rank=each,
            found=len(allowed),
        )


def _groups_of_slots(role: str, mesh: Mesh, each: int, allowed: range, place: Place) -> list[range]:
    """Where the groups of a role's ranks that compute a layer together may be, `each` slots a rank; with the ranks that
    share experts, if these fit on a machine."""
    widths = [lcm(mesh.neighbors, mesh.expert), mesh.neighbors]
    for ranks in widths:
        width, found = ranks * each, list[range]()
        for machine in place.machines:
            own = range(max(machine.start, allowed.start), min(machine.stop, allowed.stop))
            found += [own[i : i + width] for i in range(0, len(own) - width + 1, width)]
        if len(found) * ranks >= mesh.ranks:
            return found
    axes = {"tensor": mesh.tensor, "context": mesh.context, "tensor_parallel": each}
    why = " * ".join(f"{name}={size}" for name, size in axes.items() if size > 1)
    count = mesh.ranks // mesh.neighbors
    raise BindError(
        f"The role {role!r} needs {count} times {width} adjacent slots of one machine ({why}), but {written(place)} "
        f"has them {len(found)} times. Use a smaller {why.partition('=')[0]}, or give the role a multiple of {width} "
        f"slots on each machine.",
        code="place.several-machines",
        role=role,
        place=written(place),
        slots=width,
        expected=count,
        found=len(found),
    )


def _owner(role: str, bindings: Mapping[str, Backend]) -> str:
    """The role whose weights, and process, `role` shares; itself if it shares none."""
    path = [role]
    while (shared := bindings[path[-1]].shares) is not None:
        if shared not in bindings:
            raise BindError(
                f"The role {path[-1]!r} shares the weights of {shared!r}, which is not bound. Bind {shared}=..., or "
                f"pass {path[-1]} its own model.",
                code="job.shared-weights",
                role=path[-1],
                owner=shared,
            )
        if shared in path:
            raise BindError(
                f"Roles share weights in a cycle: {' -> '.join([*path, shared])}. Pass one of them its own model.",
                code="job.shared-weights",
                role=role,
                cycle=[*path, shared],
            )
        path.append(shared)
    return path[-1]


def _refuse_too_large(bindings: Mapping[str, Backend], hosts: list[ProcessSpec], place: Place) -> None:
    """Processes of one slot take turns, so each must fit alone; the roles of a process are loaded together."""
    if place.memory is None:
        return
    for slot in range(place.slots):
        sizes = {
            host.name: sum(bindings[role].memory or 0.0 for role in host.roles) for host in hosts if slot in host.slots
        }
        if sizes and max(sizes.values()) > place.memory:
            named = ", ".join(f"{name} {size:g}" for name, size in sizes.items() if size)
            largest = max(sizes, key=sizes.__getitem__)
            raise BindError(
                f"Slot {slot} of {written(place)} has {place.memory:g} GiB, but {largest} alone declares "
                f"{sizes[largest]:g} GiB (processes that take turns there: {named} GiB). Bind it with more ranks, "
                f"offload it, or pass its own model if it shares one.",
                code="place.too-large",
                slot=slot,
                process=largest,
                expected=place.memory,
                found=sizes[largest],
            )


def _refuse_too_large_together(graph: Graph, hosts: list[ProcessSpec], place: Place) -> None:
    """The processes of engines that a node asks are awake with its own, so they must fit together."""
    if (room := place.memory) is None:
        return
    for node, slot, sharing in together(graph, hosts):
        sizes = {host.name: sum(graph.bindings[role].memory or 0.0 for role in host.roles) for host in sharing}
        if (found := sum(sizes.values())) > room:
            named = " and ".join(f"{name} {size:g}" for name, size in sizes.items())
            raise BindError(
                f"{node.name} asks engines while its own is awake, and on slot {slot} of {written(place)} they need "
                f"{found:g} GiB together ({named} GiB), but it has {room:g}. Use a place with more slots, or "
                f"bind smaller engines.",
                code="place.too-large-together",
                node=node.name,
                slot=slot,
                expected=room,
                found=found,
            )
