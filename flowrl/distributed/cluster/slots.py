"""`Slots`: the slots of a place, reserved on a Ray cluster as bundles of placement groups, one for each machine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.errors import BindError
from flowrl.run.placement.place import ProcessSpec

_RESERVE_SECONDS = 120

_HELD_SECONDS = 5
"""How long a job may hold some of its machines while it waits for the others."""

_PAUSE_SECONDS = (1.5, 5.0)
"""The least and the most seconds until it tries again; Ray gives freed machines to waiting jobs within a second."""


class Slots:
    """The slots of a place, and the hosts that share them."""

    def __init__(self, place: RayPlace, plans: Sequence[ProcessSpec]) -> None:
        self._plans = plans
        self._kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._groups = self._reserve(place)
        try:
            self._here = ray.get_runtime_context().get_node_id()
            tables = {group: placement_group_table(group)["bundles_to_node_id"] for group in self._groups}
            sizes = dict(zip(self._groups, map(len, place.machines), strict=True))
            # The driver's machine first, and those of one node adjacent; the last one may be smaller.
            self._groups.sort(key=lambda group: (-sizes[group], tables[group][0] != self._here, tables[group][0]))
            bundles = [(group, bundle) for group in self._groups for bundle in range(sizes[group])]
            machines = [str(tables[group][bundle]) for group, bundle in bundles]
            order = by_machine(machines) if place.per_machine is None else range(place.slots)
            self._bundles = [bundles[slot] for slot in order]
            refuse_split_processes(plans, [machines[slot] for slot in order], place, self._here)
            wide = self._kind == "GPU" and any(len(plan.slots) > 1 for plan in plans)
            self._gpus = self._gpu_numbers() if wide else []
        except BaseException:
            self.release()
            raise

    def _reserve(self, place: RayPlace) -> list[PlacementGroup]:
        kinds = dict.fromkeys([self._kind, "CPU"])
        for kind in kinds:
            if (have := ray.cluster_resources().get(kind, 0)) < place.slots:
                raise BindError(
                    f"{_needs(place)}, but the Ray cluster has only {have:g} {kind}(s), and each slot needs one. Use "
                    f"fewer slots, or join a larger cluster with address=.",
                    code="cluster.too-small",
                    slots=place.slots,
                    resource=kind,
                    found=have,
                )
        if place.per_machine is not None:
            _refuse_small_machines(place, kinds)
        strategy = "PACK" if place.per_machine is None else "STRICT_PACK"
        slot = {"CPU": 1.0} | {self._kind: 1.0}
        if (groups := _reserved([[slot] * len(machine) for machine in place.machines], strategy)) is None:
            all_of, free = ray.cluster_resources(), ray.available_resources()
            found = " and ".join(f"{free.get(kind, 0):g} of {all_of.get(kind, 0):g} {kind}(s)" for kind in kinds)
            raise BindError(
                f"{_needs(place)}, but {found} of the Ray cluster are free after {_RESERVE_SECONDS} s, and those of a "
                f"{'slot' if place.per_machine is None else 'machine'} must be together. End other jobs there, or use "
                f"fewer slots.",
                code="cluster.busy",
                slots=place.slots,
                found=found,
                seconds=_RESERVE_SECONDS,
            )
        return groups

    def _gpu_numbers(self) -> list[str]:
        """The GPU of each slot, as its machine numbers them; Ray shows it only to processes in the slot."""
        probes = [
            ray.remote(_gpu).options(num_cpus=0, num_gpus=1, **self._at(slot)) for slot, _ in enumerate(self._bundles)
        ]
        try:
            return list(ray.get([probe.remote() for probe in probes], timeout=_RESERVE_SECONDS))
        except GetTimeoutError as error:
            raise BindError(
                f"The {len(probes)} slots are reserved, but no process that reports their GPUs started there within "
                f"{_RESERVE_SECONDS} s. Check the cluster with `ray status`.",
                code="cluster.busy",
                slots=len(probes),
                found="no process",
                seconds=_RESERVE_SECONDS,
            ) from error

    def _at(self, slot: int) -> dict[str, Any]:
        group, bundle = self._bundles[slot]
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)}

    def at_driver(self) -> dict[str, Any]:
        """Ray's options of a process without a slot, on the driver's machine."""
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(self._here, soft=False)}

    def options(self, plan: ProcessSpec) -> dict[str, Any]:
        """Ray's options of a host's process: the bundle of its first slot, and a fair share of it."""
        sharing = sum(plan.slots[0] in other.slots for other in self._plans)
        share = int(1e4 / sharing) / 1e4  # Ray counts in 1/10000
        return {"num_cpus": share} | ({"num_gpus": share} if self._kind == "GPU" else {}) | self._at(plan.slots[0])

    def gpus(self, plan: ProcessSpec) -> str | None:
        """CUDA_VISIBLE_DEVICES of a host with several slots; None if Ray's setting, the GPU of one bundle, is right."""
        return ",".join(self._gpus[slot] for slot in plan.slots) if self._gpus and len(plan.slots) > 1 else None

    def release(self) -> None:
        """Give the slots back."""
        for group in self._groups:
            remove_placement_group(group)


def _reserved(bundles: Sequence[Sequence[dict[str, float]]], strategy: str) -> list[PlacementGroup] | None:
    """A placement group for the bundles of each machine, or None after `_RESERVE_SECONDS`.

    Ray reserves one group at a time, so two jobs could each hold a machine and wait for the other's. A job that lacks
    machines therefore gives all back, and tries again after a random pause in which another one can take them.
    """
    until, draw = time.monotonic() + _RESERVE_SECONDS, random.Random()  # two jobs with one seed must differ
    while True:
        ends = until if len(bundles) == 1 else min(until, time.monotonic() + _HELD_SECONDS)
        if groups := _reserved_by(ends, bundles, strategy):
            return groups
        pause = draw.uniform(*_PAUSE_SECONDS)
        if time.monotonic() + pause >= until:
            return None
        time.sleep(pause)


def _reserved_by(
    ends: float, bundles: Sequence[Sequence[dict[str, float]]], strategy: str
) -> list[PlacementGroup] | None:
    """The groups, if Ray has them at this time; otherwise none is kept."""
    groups, found = list[PlacementGroup](), False
    try:
        for machine in bundles:
            groups.append(placement_group(list(machine), strategy=strategy))
        found = all(group.wait(max(0.0, ends - time.monotonic())) for group in groups)
    finally:
        if not found:
            for group in groups:
                remove_placement_group(group)
    return groups if found else None


def _refuse_small_machines(place: RayPlace, kinds: Iterable[str]) -> None:
    """Refuse a cluster whose machines are too small for `per_machine`, which Ray would wait for."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = sorted(int(min(node.get(kind, 0.0) for kind in kinds)) for node in nodes)
    free = have.copy()
    for machine in place.machines:  # the last may be smaller
        fits = next((index for index, slots in enumerate(free) if slots >= len(machine)), None)
        if fits is None:
            raise BindError(
                f"{_needs(place)}, {place.per_machine} of them on each machine, but the machines of the Ray cluster "
                f"have room for {', '.join(map(str, have))}. Use a smaller per_machine, or join a larger cluster with "
                f"address=.",
                code="cluster.too-small",
                slots=place.slots,
                per_machine=place.per_machine,
                found=have,
            )
        free[fits] -= len(machine)
        free.sort()  # so that each goes to the smallest that holds it


def by_machine(machines: Sequence[str]) -> list[int]:
    """The bundles, ordered so that those of one machine are adjacent; `machines` has that of each bundle."""
    return sorted(range(len(machines)), key=lambda bundle: machines.index(machines[bundle]))


def refuse_split_processes(plans: Sequence[ProcessSpec], machines: Sequence[str], place: RayPlace, here: str) -> None:
    """Refuse a host, or a group of hosts that compute a layer together, over several machines, and ``restart="role"``
    over several machines (`machines` of each slot)."""
    for plan in plans:
        if (count := len({machines[slot] for slot in plan.slots})) > 1:
            slots, many = ", ".join(map(str, plan.slots)), len(plan.slots)
            raise BindError(
                f"{plan.name} is one process with the slots {slots}, which are on {count} machines. Pass "
                f"{type(place).__name__}(per_machine=...), a multiple of {many} that machines have free, or bind it "
                f"with fewer slots per rank (tensor_parallel).",
                code="cluster.several-machines",
                process=plan.name,
                slots=plan.slots,
                machines=count,
            )
    for axis in ("tensor", "context"):
        for plan in plans:
            group = next(ranks for ranks in plan.mesh.together(axis) if plan.rank in ranks)
            used = [other.slots[0] for other in plans if other.roles == plan.roles and other.rank in group]
            if (count := len({machines[slot] for slot in used})) > 1:
                size = len(group)
                raise BindError(
                    f"The ranks {', '.join(map(str, group))} of {plan.roles[0]!r} exchange data in every layer "
                    f"({axis}={size}), but their slots {', '.join(map(str, used))} are on {count} machines. Pass "
                    f"{type(place).__name__}(per_machine=...), a multiple of {size} that machines have free, or a "
                    f"smaller {axis}.",
                    code="mesh.several-machines",
                    role=plan.roles[0],
                    axis=axis,
                    ranks=group,
                    slots=used,
                    machines=count,
                )
    if (count := len({*machines, here})) > 1 and place.restart == "role":
        raise BindError(
            f"{_needs(place)} with restart='role', but they are on {count} machines including this one, and snapshots "
            f"of the weights are local files. Use restart='never' and Training(checkpoint_every=...) in a shared "
            f"folder.",
            code="cluster.several-machines",
            slots=place.slots,
            machines=count,
        )


def _needs(place: RayPlace) -> str:
    return f"{type(place).__name__} needs {place.slots} slot(s)"


def _gpu() -> str:
    """The GPU of this process's bundle."""
    [gpu] = ray.get_gpu_ids()
    return str(gpu)
