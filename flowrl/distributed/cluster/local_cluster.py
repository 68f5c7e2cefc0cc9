"""The Ray cluster of one machine: started for the first job of this process, and kept for the next ones.

Its workers are forks of a `ForkServer`. Starting Ray takes two seconds, and importing torch and transformers three, so
that a second job opens in a fraction of the time of the first. The cluster ends with this process, or by
`ray.shutdown()`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import parameter, ray_constants
from ray._private import worker as ray_worker

from flowrl.distributed.cluster.host_server import HostServer, node_options
from flowrl.errors import BindError

_FORKS_AT_ONCE = 16
"""Workers that Ray may start at a time; by itself as many as there are processors, since others start by importing."""

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
"""Arguments of `ray.init` that leave the terminal to flowrl."""


@dataclass
class _Cluster:
    """The cluster that this process has started.

    Args:
        node: Ray's processes on this machine.
        hosts: the server that its workers are forked from.
        cpus: logical CPUs.
        jobs: how many use it now.
    """

    node: Any
    hosts: HostServer
    cpus: int
    jobs: int = 0


_cluster: _Cluster | None = None


def is_connected() -> bool:
    """Whether Ray is connected to a cluster that this process has started."""
    return _cluster is not None and ray.is_initialized() and ray_worker._global_node is _cluster.node


@contextlib.contextmanager
def local_cluster(cpus: int, hosts: HostServer) -> Iterator[None]:
    """Ray on this machine within the block, listening on the loopback alone.

    Args:
        cpus: logical CPUs that it must have.
        hosts: the server that its workers are forked from.

    Raises:
        BindError: Ray does not start.
    """
    global _cluster
    _cluster = _start(cpus, hosts)
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
        if cluster is _cluster and not cluster.jobs and not _is_alive():
            shut_down()
        cluster.hosts.add_variables()


def shut_down_unless(cpus: int, hosts: HostServer | None) -> None:
    """Shut the cluster down if it is idle and cannot serve the next job.

    Args:
        cpus: that the job needs.
        hosts: the server that its workers are to be forked from; None where it runs on another cluster.
    """
    if _cluster is None or _cluster.jobs:
        return
    if cpus > _cluster.cpus or hosts is not _cluster.hosts or not _is_alive():
        shut_down()


def shut_down() -> None:
    """Shut down the cluster that this process has started, if there is one."""
    global _cluster
    if is_connected():
        ray.shutdown()
    _cluster = None


def _is_alive() -> bool:
    """Whether all of the cluster's own processes run."""
    return _cluster is not None and is_connected() and bool(_cluster.node.remaining_processes_alive())


def _start(cpus: int, hosts: HostServer) -> _Cluster:
    try:
        with _on_loopback(), _forked_workers(hosts):
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                _system_config={"worker_maximum_startup_concurrency": _FORKS_AT_ONCE} if hosts.server else None,
                **QUIET,
            )
    except Exception as error:  # Ray has no class of its own for what keeps it from starting
        raise BindError(
            f"Ray could not be started on this machine ({type(error).__name__}: "
            f"{str(error).partition('. ')[0]}); look whether the machine is short of processors, memory or "
            f"disk, and into Ray's logs, in session_latest/logs under /tmp/ray."
        ) from error
    return _Cluster(ray_worker._global_node, hosts, cpus)


@contextlib.contextmanager
def _forked_workers(hosts: HostServer) -> Iterator[None]:
    """The node that Ray starts within the block has forked workers, and neither autoscaler nor log monitor.

    `ray.init` has no argument for the program of a worker, which is a parameter of Ray's nodes.
    """
    before = parameter.RayParams
    options = {} if hosts.server is None else node_options(hosts.server)

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
