"""The Ray cluster of one machine: started for the first job of this process, and kept for the next ones.

Its workers are forks of a `ForkServer`. Starting Ray takes two seconds, and importing torch and transformers three, so
that a second job opens in a fraction of the time of the first. The cluster ends with this process, or by
`ray.shutdown()`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter, ray_constants
from ray._private import worker as ray_worker_module

from flowrl.distributed import ray_worker
from flowrl.errors import BindError
from flowrl.workers.fork_server import ForkServer, imports

_MODULES = ("flowrl.backends", "flowrl.operators", "flowrl.run.local", "flowrl.run.build", "flowrl.sync.stream")
"""What every host imports, except Ray itself: see `flowrl.distributed.ray_worker`."""

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
"""Arguments of `ray.init` that leave the terminal to flowrl."""


@dataclass
class _Cluster:
    """The cluster that this process has started.

    Args:
        node: Ray's processes on this machine.
        server: forks its workers; None where workers start by themselves.
        cpus: logical CPUs.
        environment: of this process when Ray was started, with what jobs have added since. Workers inherit it, so
            after a change between two jobs the next one gets a new cluster.
        jobs: how many use it now.
    """

    node: Any
    server: ForkServer | None
    cpus: int
    environment: dict[str, str]
    jobs: int = 0

    @property
    def alive(self) -> bool:
        """Whether Ray is connected to it, and all that it consists of runs."""
        connected = ray.is_initialized() and ray_worker_module._global_node is self.node
        return connected and self.node.remaining_processes_alive() and (self.server is None or self.server.alive)


_cluster: _Cluster | None = None


@contextlib.contextmanager
def local_cluster(cpus: int, modules: Sequence[str] = ()) -> Iterator[None]:
    """Ray on this machine within the block, listening on the loopback alone.

    Args:
        cpus: logical CPUs that it must have.
        modules: what its workers import besides flowrl, so that a fork has it already.

    Raises:
        BindError: Ray does not start.
    """
    global _cluster
    _cluster = _start(cpus, modules)
    with kept_cluster():
        yield


@contextlib.contextmanager
def kept_cluster() -> Iterator[None]:
    """The cluster that this process has started stays up within the block; nothing where another one is connected."""
    if (cluster := _cluster) is None:
        yield
        return
    cluster.jobs += 1
    try:
        yield
    finally:
        cluster.jobs -= 1
        if not cluster.jobs and not cluster.alive:
            shut_down()
        cluster.environment = {**os.environ, **cluster.environment}  # libraries and trackers add variables of their own


def shut_down_unless(cpus: int | None) -> None:
    """Shut the cluster down if it is idle and cannot serve the next job.

    Args:
        cpus: that the job needs; None where it runs on another cluster.
    """
    if _cluster is None or _cluster.jobs:
        return
    suits = cpus is not None and cpus <= _cluster.cpus and dict(os.environ) == _cluster.environment
    if not (suits and _cluster.alive):
        shut_down()


def shut_down() -> None:
    """Shut down the cluster that this process has started, if there is one."""
    global _cluster
    if (cluster := _cluster) is None:
        return
    _cluster = None
    if ray.is_initialized() and ray_worker_module._global_node is cluster.node:
        ray.shutdown()
    if cluster.server is not None:
        cluster.server.close()


def _start(cpus: int, modules: Sequence[str]) -> _Cluster:
    server = start_fork_server(modules)
    try:
        with _on_loopback(), _forked_workers(server):
            ray.init(
                "local", num_cpus=cpus, include_dashboard=False, object_store_memory=_object_store_bytes(), **QUIET
            )
    except Exception as error:  # Ray has no class of its own for what keeps it from starting
        if server is not None:
            server.close()
        raise BindError(
            f"Ray could not be started on this machine ({type(error).__name__}: "
            f"{str(error).partition('. ')[0]}); look whether the machine is short of processors, memory or "
            f"disk, and into Ray's logs, in session_latest/logs under /tmp/ray."
        ) from error
    return _Cluster(ray_worker_module._global_node, server, cpus, dict(os.environ))


def start_fork_server(modules: Sequence[str] = ()) -> ForkServer | None:
    """Start to import what hosts need; None on systems other than Linux, where forking such a process is not sound.

    Args:
        modules: see `local_cluster`.
    """
    if sys.platform != "linux":
        return None
    path = [*sys.path[1:], sys.path[0]]  # the script's folder must not come before the standard library
    return ForkServer(imports([*_MODULES, *modules]), path, supervised=False, listens=True)


def node_options(server: ForkServer) -> dict[str, Any]:
    """The parameters of a Ray node whose workers are forks of a server."""
    return {"worker_path": str(Path(ray_worker.__file__)), "env_vars": {ray_worker.ADDRESS: server.address}}


@contextlib.contextmanager
def _forked_workers(server: ForkServer | None) -> Iterator[None]:
    """The node that Ray starts within the block has forked workers, and neither autoscaler nor log monitor.

    `ray.init` has no argument for the program of a worker, whose name is a parameter of Ray's nodes.
    """
    before = parameter.RayParams
    options = {} if server is None else node_options(server)

    class Parameters(before):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"no_monitor": True, "include_log_monitor": False, **options, **kwargs})

    parameter.RayParams = Parameters  # type: ignore[misc]
    try:
        yield
    finally:
        parameter.RayParams = before  # type: ignore[misc]


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """What Ray starts within the block listens on the loopback alone, as it does by itself on macOS and Windows.

    On Linux it listens on all interfaces, whatever address `ray.init` gets, unless the environment has
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 when Ray is first imported, which may be long before this.
    """
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # a private name of Ray's, which may go
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _object_store_bytes() -> int:
    """Room for columns and one set of weights: a quarter of what is free in shared memory, at least Ray's minimum."""
    status = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = status.f_bavail * status.f_frsize if status is not None else 1 << 30
    return max(80 << 20, min(free // 4, 8 << 30))
