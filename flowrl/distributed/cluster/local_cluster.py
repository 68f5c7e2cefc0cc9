"""The local Ray cluster: started for the first job of this process, and reused by later ones.

Its workers are forks of a `ForkServer`, which saves two seconds of starting Ray and three of importing torch and
transformers. The cluster ends with this process, or with `ray.shutdown()`.
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
"""Workers that Ray may start concurrently; its default is the number of processors, because usual workers import."""

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
"""Arguments of `ray.init` that keep its logs off the terminal."""


@dataclass
class _Cluster:
    """The cluster that this process started."""

    node: Any
    hosts: HostServer
    cpus: int
    jobs: int = 0


_cluster: _Cluster | None = None


def is_connected() -> bool:
    """Whether Ray is connected to the cluster that this process started."""
    return _cluster is not None and ray.is_initialized() and ray_worker._global_node is _cluster.node


@contextlib.contextmanager
def local_cluster(cpus: int, hosts: HostServer) -> Iterator[None]:
    """Start Ray on this machine, listening only on the loopback, with these logical CPUs and this fork server."""
    global _cluster
    _cluster = _start(cpus, hosts)
    with use_cluster():
        yield


@contextlib.contextmanager
def use_cluster() -> Iterator[None]:
    """Count a job of the cluster that this process started; does nothing if another one is connected."""
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
    """Shut down the cluster if it is idle and cannot serve the next job, which may run on another cluster."""
    if _cluster is None or _cluster.jobs:
        return
    if cpus > _cluster.cpus or hosts is not _cluster.hosts or not _is_alive():
        shut_down()


def shut_down() -> None:
    """Shut down the cluster that this process started, if any."""
    global _cluster
    if is_connected():
        ray.shutdown()
    _cluster = None


def _is_alive() -> bool:
    """Whether all of the cluster's processes are running."""
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
    except Exception as error:  # Ray has no exception class for a failed start
        reason = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise BindError(
            f"Ray did not start on this machine ({reason}). Check for free processors, memory and disk, and Ray's "
            f"logs in /tmp/ray/session_latest/logs.",
            code="cluster.start-failed",
            reason=reason,
        ) from error
    return _Cluster(ray_worker._global_node, hosts, cpus)


@contextlib.contextmanager
def _forked_workers(hosts: HostServer) -> Iterator[None]:
    """Make the node that Ray starts in the block fork its workers, without autoscaler and log monitor."""
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
    """Make Ray listen only on the loopback in the block, as it does by default on macOS and Windows."""
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # a private name of Ray, which may disappear
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _object_store_bytes() -> int:
    """Size for columns and one set of weights: a quarter of the free shared memory, at least Ray's minimum."""
    status = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = status.f_bavail * status.f_frsize if status is not None else 1 << 30
    return max(80 << 20, min(free // 4, 8 << 30))
