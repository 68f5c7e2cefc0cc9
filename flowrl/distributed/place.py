"""Places on Ray: colocated or split slots."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from pydantic import Field

from flowrl.core.graphs.graph import Graph
from flowrl.distributed.cluster.host_server import warm_up
from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.run.engine.steps import Steps

_MOST = 1 << 16
"""The most slots; plans and predictions list each."""


class _Opened(RayPlace):
    def warm_up(self, graph: Graph) -> None:
        """Start the fork server of the hosts."""
        if self.address is None and not _connected_elsewhere():
            warm_up(graph.bindings)

    def open(self, graph: Graph, seed: int) -> AbstractContextManager[Steps]:
        from flowrl.distributed.runner import open_ray  # here, because it imports Ray

        return open_ray(graph, self, seed)


def _connected_elsewhere() -> bool:
    """Whether this process is connected to a cluster that flowrl did not start; does not import Ray."""
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        return False
    from flowrl.distributed.cluster.local_cluster import is_connected

    return not is_connected()


class Colocate(_Opened):
    """All roles share `gpus` slots and take turns on them.

    Args:
        gpus: slots.
        address, memory, per_machine, deadline, restart: see `RayPlace`.
    """

    gpus: int = Field(default=1, ge=1, le=_MOST, strict=True)

    @property
    def slots(self) -> int:
        return self.gpus

    def slots_of(self, role: str, generates: bool) -> range:
        return range(self.gpus)


class Split(_Opened):
    """Engines that generate have separate slots from those that train and score.

    Args:
        train: slots of all other roles.
        rollout: slots of the engines that generate.
        address, memory, per_machine, deadline, restart: see `RayPlace`.
    """

    train: int = Field(default=1, ge=1, le=_MOST, strict=True)
    rollout: int = Field(default=1, ge=1, le=_MOST, strict=True)

    @property
    def slots(self) -> int:
        return self.train + self.rollout

    def slots_of(self, role: str, generates: bool) -> range:
        return range(self.train, self.slots) if generates else range(self.train)
