"""The fork server of this process's hosts: started early, and reused by later jobs."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.distributed.cluster import ray_worker
from flowrl.protocols.backend import Backend
from flowrl.workers.fork_server import ForkServer, imports

_MODULES = (
    "flowrl.backends.torch.generate.rollout",
    "flowrl.backends.torch.train.critic",
    "flowrl.backends.torch.train.trainer",
    "flowrl.operators",
    "flowrl.run.engine.local",
    "flowrl.run.engine.build",
    "flowrl.sync.stream",
)
"""Modules that every host imports, except Ray: see `flowrl.distributed.cluster.ray_worker`."""


@dataclass(eq=False)
class HostServer:
    """A fork server, with the environment of its imports.

    Args:
        server: None on systems other than Linux, where forking such a process is not safe.
        environment: of this process at the start of the server, with variables that jobs added since. Libraries read it
            on import and workers inherit it, so any other change needs a new server.
    """

    server: ForkServer | None
    environment: dict[str, str]

    @property
    def alive(self) -> bool:
        """Whether it can fork workers, or is not needed."""
        return self.server is None or self.server.alive

    @property
    def current(self) -> bool:
        """Whether its forks have the environment of this process."""
        return self.alive and self.environment == dict(os.environ)

    def add_variables(self) -> None:
        """Accept variables that libraries and trackers added while a job opened or ran."""
        self.environment = {**os.environ, **self.environment}


_current: HostServer | None = None


def warm_up(bindings: Mapping[str, Backend]) -> None:
    """Start the server, which imports the modules of these backends in the background, unless it is current."""
    global _current
    if _current is None or not _current.current:
        close()
        _current = HostServer(start_fork_server(bindings), dict(os.environ))


def host_server() -> HostServer:
    """The server, started if `warm_up` was not called or its process has died."""
    if _current is None or not _current.alive:
        warm_up({})
    assert _current is not None
    _current.add_variables()
    return _current


def start_fork_server(bindings: Mapping[str, Backend]) -> ForkServer | None:
    """A new server that imports the modules of these backends; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    named = [name for backend in bindings.values() for name in (type(backend).__module__, *backend.imports)]
    own = sorted({name for name in named if name.startswith(("flowrl.", "transformers."))})  # not users' modules
    path = [*sys.path[1:], sys.path[0]]  # the script's folder must not come before the standard library
    return ForkServer(imports([*_MODULES, *own]), path, supervised=False, listens=True)


@atexit.register
def close() -> None:
    """End the server and its forks."""
    global _current
    if _current is not None and _current.server is not None:
        _current.server.close()
    _current = None


def _forget() -> None:
    """Drop the server in a fork of this process, which does not own it."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget)


def node_options(server: ForkServer) -> dict[str, Any]:
    """The parameters of a Ray node whose workers a server forks."""
    return {"worker_path": ray_worker.__file__, "env_vars": {ray_worker.ADDRESS: server.address}}
