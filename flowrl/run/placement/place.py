"""Places: where the ranks of roles run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pydantic import Field

from flowrl.core.graphs.graph import Graph
from flowrl.errors import BindError
from flowrl.protocols.backend import Backend, refuse_uncheckpointed
from flowrl.protocols.protocols import Synced
from flowrl.run.engine.steps import Steps
from flowrl.spec import Spec, written


class Place(Spec):
    """Base of places: how many slots there are, which roles may take them, and how a job is opened there.

    A slot is a GPU, or on a machine without GPUs a CPU.

    Args:
        memory: GiB that a slot has, to be held against the sizes that backends state; None does not check.
    """

    timeless = True

    memory: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True, kw_only=True)

    @property
    def slots(self) -> int:
        """How many slots the place has."""
        raise NotImplementedError

    @property
    def rebuilds(self) -> bool:
        """Whether a role that died is rebuilt, from what its trained weights were after the last step."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether engines may be on other machines than this one, which have folders of their own."""
        return False

    def slots_of(self, role: str, generates: bool) -> range:
        """The slots that a role's ranks may take."""
        raise NotImplementedError

    def warm_up(self, graph: Graph) -> None:
        """Start what takes long and goes on by itself, such as imports, as soon as it is known that `graph` is to be
        opened here."""

    def open(self, graph: Graph, seed: int) -> AbstractContextManager[Steps]:
        """A bound graph ready to step, with all engines loaded; its processes end with the block.

        Raises:
            BindError, GraphError: the graph does not fit the place; before any model loads.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ProcessSpec:
    """One process to be: its roles (those that share weights live together), its rank among equals, and its slots,
    which are on one machine."""

    roles: tuple[str, ...]
    rank: int
    ranks: int
    slots: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{'+'.join(self.roles)}[{self.rank}]"

    def meets(self, other: ProcessSpec) -> bool:
        """Whether both want the same slot, so that they take turns; with itself a host does not."""
        return self != other and not set(self.slots).isdisjoint(other.slots)


def lay_out(graph: Graph, place: Place) -> list[ProcessSpec]:
    """Every host of a bound graph, with its slots: ranks go to the slots that have the fewest hosts yet. A rank of
    several slots takes neighbours, the first of them a multiple of as many from where the role's slots begin.

    What each role takes is what its backend declares; see `flowrl.protocols.backend.Backend`.

    Raises:
        BindError: more ranks than there are slots for, roles that share weights with one that is not bound or with
            unequal ranks, a role that does not fit into a slot's memory by the size that it states, or a trained role
            that cannot be restored where the place rebuilds roles.
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
        ranks, each = bindings[owner].ranks, max(bindings[role].slots_per_rank for role in roles)
        if ranks * each > len(allowed):
            wide = f" of {each} slots each" if each > 1 else ""
            narrower = ", or fewer slots a rank (tensor_parallel)" if each > 1 else ""
            raise BindError(
                f"the role {owner!r} wants {ranks} ranks{wide}, and {written(place)} has {len(allowed)} slot(s) for it;"
                f" expected at most one rank a slot: give the place more slots, or {owner} fewer ranks{narrower}."
            )
        if odd := next((role for role in roles if bindings[role].ranks not in (1, ranks)), None):
            raise BindError(
                f"the role {odd!r} wants {bindings[odd].ranks} ranks and shares the weights of {owner!r}, which "
                f"has {ranks}; expected as many, or 1, which follows {owner}: bind {odd} without ranks."
            )
        together = tuple(sorted(roles, key=lambda role: role != owner))
        spans = [tuple(allowed[i : i + each]) for i in range(0, len(allowed) - each + 1, each)]
        chosen = sorted(spans, key=lambda span: sum(load[slot] for slot in span))[:ranks]
        for rank, span in enumerate(sorted(chosen)):
            hosts.append(ProcessSpec(together, rank, ranks, span))
            for slot in span:
                load[slot] += 1
    _refuse_too_large(bindings, hosts, place)
    return hosts


def _owner(role: str, bindings: Mapping[str, Backend]) -> str:
    """The role whose process `role` lives in."""
    path = [role]
    while (shared := bindings[path[-1]].shares) is not None:
        if shared not in bindings:
            raise BindError(
                f"the role {path[-1]!r} shares the weights of {shared!r}, which is not bound; bind {shared}=..., or "
                f"give {path[-1]} a model of its own."
            )
        if shared in path:
            raise BindError(
                f"roles share weights in a circle: {' -> '.join([*path, shared])}; give one a model of its own."
            )
        path.append(shared)
    return path[-1]


def _refuse_too_large(bindings: Mapping[str, Backend], hosts: list[ProcessSpec], place: Place) -> None:
    """Hosts of one slot take turns, so each must fit alone; roles of one host are there together."""
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
                f"slot {slot} of {written(place)} has {place.memory:g} GiB, and its roles state {named} GiB; roles "
                f"take turns, but {largest} does not fit even alone: give it more ranks, offload it, or let it have a "
                f"model of its own where it shares one."
            )
