"""`Slots`: the slots of a place, reserved on a Ray cluster: a placement group with a bundle for each."""

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
    """The slots of a job.

    Args:
        place: how many there are.
        plans: the hosts that share them.

    Raises:
        BindError: the cluster is too small, its slots are taken, or they are on more machines than can be.
    """

    def __init__(self, place: RayPlace, plans: Sequence[ProcessSpec]) -> None:
        self._plans = plans
        self._kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._group = self._reserve(place)
        try:
            table = placement_group_table(self._group)["bundles_to_node_id"]
            machines = [str(table[bundle]) for bundle in range(place.slots)]
            self._bundles = by_machine(machines)
            here = ray.get_runtime_context().get_node_id()
            refuse_torn(plans, [machines[bundle] for bundle in self._bundles], place, here)
            wide = self._kind == "GPU" and any(len(plan.slots) > 1 for plan in plans)
            self._gpus = self._look() if wide else []
        except BaseException:
            self.release()
            raise

    def _reserve(self, place: RayPlace) -> PlacementGroup:
        asked, kinds = _asked(place), dict.fromkeys([self._kind, "CPU"])
        for kind in kinds:
            if (have := ray.cluster_resources().get(kind, 0)) < place.slots:
                raise BindError(
                    f"{asked}, and the Ray cluster has {have:g} {kind}(s); expected at least one for each slot: "
                    f"ask for fewer slots, or join a larger cluster by address=."
                )
        group: PlacementGroup = placement_group(
            [{"CPU": 1.0} | {self._kind: 1.0} for _ in range(place.slots)], strategy="PACK"
        )
        if not group.wait(_RESERVE_SECONDS):
            remove_placement_group(group)
            all_of, free = ray.cluster_resources(), ray.available_resources()
            found = " and ".join(f"of {all_of.get(kind, 0):g} {kind}(s) {free.get(kind, 0):g}" for kind in kinds)
            raise BindError(
                f"{asked}, and {found} of the Ray cluster were free within {_RESERVE_SECONDS} s, a slot's on one "
                f"machine; end what runs there, or ask for fewer slots."
            )
        return group

    def _look(self) -> list[str]:
        """The GPU of each slot, as its machine numbers them, which Ray tells who runs there."""
        looks = [
            ray.remote(_gpu).options(num_cpus=0, num_gpus=1, **self._at(slot)) for slot, _ in enumerate(self._bundles)
        ]
        try:
            return list(ray.get([look.remote() for look in looks], timeout=_RESERVE_SECONDS))
        except GetTimeoutError as error:
            raise BindError(
                f"the {len(looks)} slots are reserved, and no process started there within {_RESERVE_SECONDS} s that "
                f"says which GPUs they are; look at the cluster by `ray status`."
            ) from error

    def _at(self, slot: int) -> dict[str, Any]:
        bundle = self._bundles[slot]
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        }

    def options(self, plan: ProcessSpec) -> dict[str, Any]:
        """What Ray is to know of a host's process: it runs in the bundle of its first slot, with a fair share of it."""
        sharing = sum(plan.slots[0] in other.slots for other in self._plans)
        share = int(1e4 / sharing) / 1e4  # Ray counts in 1/10000
        return {"num_cpus": share} | ({"num_gpus": share} if self._kind == "GPU" else {}) | self._at(plan.slots[0])

    def gpus(self, plan: ProcessSpec) -> str | None:
        """The GPUs of a host of several slots, as CUDA_VISIBLE_DEVICES names them; None is as Ray sets it, which shows
        a process that of its one bundle."""
        return ",".join(self._gpus[slot] for slot in plan.slots) if self._gpus and len(plan.slots) > 1 else None

    def release(self) -> None:
        """Give the slots back."""
        remove_placement_group(self._group)


def by_machine(machines: Sequence[str]) -> list[int]:
    """Bundles in an order in which those of one machine are neighbours.

    Args:
        machines: of each bundle.
    """
    return sorted(range(len(machines)), key=lambda bundle: machines.index(machines[bundle]))


def refuse_torn(plans: Sequence[ProcessSpec], machines: Sequence[str], place: RayPlace, here: str) -> None:
    """Refuse what must be on one machine and is not.

    Args:
        plans: the hosts.
        machines: of each slot.
        place: what was asked for.
        here: the driver's machine.

    Raises:
        BindError: a host's slots are on several machines, or not all are on the driver's and the place says
            ``restart="role"``.
    """
    for plan in plans:
        if (count := len({machines[slot] for slot in plan.slots})) > 1:
            slots, many = ", ".join(map(str, plan.slots)), len(plan.slots)
            raise BindError(
                f"{plan.name} is one process over the slots {slots}, and these are on {count} machines; expected one: "
                f"ask for slots of machines that each have a multiple of {many} free, or bind it with fewer slots a "
                f"rank (tensor_parallel)."
            )
    if (count := len({*machines, here})) > 1 and place.restart == "role":
        raise BindError(
            f"{_asked(place)} with restart='role', and they are on {count} machines, this one counted; weights to go "
            f"back to are kept in files of this machine: use Training(checkpoint_every=...) in a shared folder, and "
            f"restart='never'."
        )


def _asked(place: RayPlace) -> str:
    return f"{type(place).__name__} wants {place.slots} slot(s)"


def _gpu() -> str:
    """The GPU of the bundle that this runs in."""
    [gpu] = ray.get_gpu_ids()
    return str(gpu)
