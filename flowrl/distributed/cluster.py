"""The Ray cluster of a job: joined or started, with a placement group of one bundle a slot and a process for every host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.distributed.host import Host
from flowrl.distributed.place import HostPlan, Place
from flowrl.errors import BindError

# Every process keeps to one thread: at several processes a core more only make them wait for each other.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_START_SECONDS = 120


@contextlib.contextmanager
def connected(place: Place) -> Iterator[None]:
    """Ray, joined at the place's address or started here; what was started here is shut down at the end.

    Raises:
        BindError: nothing answers at the address.
    """
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"flowrl-{os.getpid()}",
    }
    if place.address is not None:
        try:
            ray.init(address=place.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise BindError(
                f"no Ray cluster answers at {place.address!r} ({str(error).splitlines()[0]}); start one with `ray start --head`, or "
                f"leave address out and one is started here."
            ) from error
    else:
        cpus = max(os.cpu_count() or 1, place.slots) + 1  # slots are logical, and one is for nodes without a role
        ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=_store_bytes(), **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _store_bytes() -> int:
    """Room for columns and one set of weights: a quarter of what is free in shared memory, at least Ray's minimum."""
    status = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = status.f_bavail * status.f_frsize if status is not None else 1 << 30
    return max(80 << 20, min(free // 4, 8 << 30))


class Hosts:
    """All processes of a job.

    Args:
        plans: the hosts of roles.
        bindings: backends by role.
        place: where they run.
        seed: of the run.
    """

    def __init__(self, plans: list[HostPlan], bindings: Mapping[str, Any], place: Place, seed: int) -> None:
        self.plans, self.bindings, self.place, self.seed = plans, bindings, place, seed
        self.gpus = bool(ray.cluster_resources().get("GPU"))
        self._refuse_too_small()
        kind = "GPU" if self.gpus else "CPU"
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self.gpus else {})}
        self.group = placement_group([dict(bundle) for _ in range(place.slots)], strategy="PACK")
        if not self.group.wait(_START_SECONDS):
            raise BindError(
                f"Ray could not reserve {place.slots} {kind} slot(s) within {_START_SECONDS} s; free some, or ask for fewer."
            )
        self.actors: dict[HostPlan, Any] = {}
        self.start_general()

    def _refuse_too_small(self) -> None:
        have = ray.cluster_resources()
        kind = "GPU" if self.gpus else "CPU"
        if have.get(kind, 0) < self.place.slots:
            raise BindError(
                f"{self.place!r} wants {self.place.slots} slot(s), and the Ray cluster has {have.get(kind, 0):g} {kind}(s); expected at "
                f"most one slot for each."
            )

    def _remote(self) -> Any:
        return ray.remote(max_restarts=0, runtime_env={"env_vars": _ENVIRONMENT})(Host)

    def start_general(self) -> None:
        """Start the process for nodes that use no role; it runs several at once."""
        self.general: Any = self._remote().options(num_cpus=0, max_concurrency=8).remote(None, {}, self.seed)

    def start(self, plans: list[HostPlan]) -> None:
        """Start processes for `plans` and load their engines; those of one slot one after another, so that they fit.

        Raises:
            BindError and what else the backends raise.
        """
        for plan in plans:
            share = 0.99 / sum(other.slot == plan.slot for other in self.plans)
            strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=plan.slot)
            resources = {"num_cpus": share, **({"num_gpus": share} if self.gpus else {})}
            bindings = {role: self.bindings[role] for role in plan.roles}
            self.actors[plan] = (
                self._remote().options(scheduling_strategy=strategy, **resources).remote(plan, bindings, self.seed)
            )
        addresses = {
            plan.roles: ray.get(self.actors[plan].address.remote())
            for plan in plans
            if plan.rank == 0 and plan.ranks > 1
        }
        for roles in dict.fromkeys(plan.roles for plan in plans):
            ranks = [plan for plan in plans if plan.roles == roles]
            ray.get(
                [self.actors[plan].build.remote(addresses.get(roles)) for plan in ranks], timeout=self.place.deadline
            )
            if self.crowded(ranks):
                ray.get([self.actors[plan].sleep.remote() for plan in ranks])

    def crowded(self, plans: list[HostPlan]) -> bool:
        """Whether any of these shares its slot with another host, so that they take turns."""
        return any(sum(other.slot == plan.slot for other in self.plans) > 1 for plan in plans)

    def kill(self, plans: list[HostPlan] | None = None) -> None:
        """End processes at once: those of `plans`, or all and the reservation with them."""
        for plan in self.plans if plans is None else plans:
            if (actor := self.actors.pop(plan, None)) is not None:
                ray.kill(actor)
        if plans is None:
            ray.kill(self.general)
            remove_placement_group(self.group)
