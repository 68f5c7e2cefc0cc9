"""`Slots`: the slots of a place, reserved on a Ray cluster as a placement group with one bundle each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.errors import BindError
from flowrl.run.placement.place import ProcessSpec

_RESERVE_SECONDS = 120


class Slots:
    """The slots of a place, and the hosts that share them."""

    def __init__(self, place: RayPlace, plans: Sequence[ProcessSpec]) -> None:
        self._plans = plans
        self._kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._group = self._reserve(place)
        try:
            table = placement_group_table(self._group)["bundles_to_node_id"]
            machines = [str(table[bundle]) for bundle in range(place.slots)]
            self._bundles = by_machine(machines)
            here = ray.get_runtime_context().get_node_id()
            refuse_split_processes(plans, [machines[bundle] for bundle in self._bundles], place, here)
            wide = self._kind == "GPU" and any(len(plan.slots) > 1 for plan in plans)
            self._gpus = self._gpu_numbers() if wide else []
        except BaseException:
            self.release()
            raise

    def _reserve(self, place: RayPlace) -> PlacementGroup:
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
        group: PlacementGroup = placement_group(
            [{"CPU": 1.0} | {self._kind: 1.0} for _ in range(place.slots)], strategy="PACK"
        )
        if not group.wait(_RESERVE_SECONDS):
            remove_placement_group(group)
            all_of, free = ray.cluster_resources(), ray.available_resources()
            found = " and ".join(f"{free.get(kind, 0):g} of {all_of.get(kind, 0):g} {kind}(s)" for kind in kinds)
            raise BindError(
                f"{_needs(place)}, but {found} of the Ray cluster are free after {_RESERVE_SECONDS} s, and those of a "
                f"slot must be on one machine. End other jobs there, or use fewer slots.",
                code="cluster.busy",
                slots=place.slots,
                found=found,
                seconds=_RESERVE_SECONDS,
            )
        return group

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
        bundle = self._bundles[slot]
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        }

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
        remove_placement_group(self._group)


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
                f"{plan.name} is one process with the slots {slots}, which are on {count} machines. Use machines that "
                f"each have a multiple of {many} slots free, or bind it with fewer slots per rank (tensor_parallel).",
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
                    f"({axis}={size}), but their slots {', '.join(map(str, used))} are on {count} machines. Use "
                    f"machines that each have a multiple of {size} slots free, or a smaller {axis}.",
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
