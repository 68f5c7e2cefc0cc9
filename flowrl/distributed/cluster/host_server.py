"""The fork server of this process's hosts: started before all else, and kept for the next job."""

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
    "flowrl.backends",
    "flowrl.operators",
    "flowrl.run.engine.local",
    "flowrl.run.engine.build",
    "flowrl.sync.stream",
)
"""What every host imports, except Ray itself: see `flowrl.distributed.cluster.ray_worker`."""


@dataclass(eq=False)
class HostServer:
    """A fork server, with the environment that it has imported in.

    Args:
        server: None on systems other than Linux, where forking such a process is not sound.
        environment: of this process when the server was started, with what jobs have added since. Libraries read it
            while they are imported, and workers inherit it, so after another change a job needs a new server.
    """

    server: ForkServer | None
    environment: dict[str, str]

    @property
    def alive(self) -> bool:
        """Whether it can fork workers, or none is needed."""
        return self.server is None or self.server.alive

    @property
    def current(self) -> bool:
        """Whether a worker forked now is what a new process would be."""
        return self.alive and self.environment == dict(os.environ)

    def add_variables(self) -> None:
        """Enter the variables that have been added since, as libraries and trackers do while a job opens and runs."""
        self.environment = {**os.environ, **self.environment}


_current: HostServer | None = None


def warm_up(bindings: Mapping[str, Backend]) -> None:
    """Start the server if there is none for this environment; it imports while the caller goes on.

    Args:
        bindings: the backends of a job, whose modules it imports.
    """
    global _current
    if _current is None or not _current.current:
        close()
        _current = HostServer(start_fork_server(bindings), dict(os.environ))


def host_server() -> HostServer:
    """The server; it is started where `warm_up` was not called, or its process has died since."""
    if _current is None or not _current.alive:
        warm_up({})
    assert _current is not None
    _current.add_variables()
    return _current


def start_fork_server(bindings: Mapping[str, Backend]) -> ForkServer | None:
    """A new server that imports what hosts of these backends do; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    named = [name for backend in bindings.values() for name in (type(backend).__module__, *backend.imports)]
    own = sorted({name for name in named if name.startswith(("flowrl.", "transformers."))})  # none of users' modules
    path = [*sys.path[1:], sys.path[0]]  # the script's folder must not come before the standard library
    return ForkServer(imports([*_MODULES, *own]), path, supervised=False, listens=True)


@atexit.register
def close() -> None:
    """End the server, and with it the workers that it has forked."""
    global _current
    if _current is not None and _current.server is not None:
        _current.server.close()
    _current = None


def _forget() -> None:
    """In a process forked from this one, which has no part in the server."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget)


def node_options(server: ForkServer) -> dict[str, Any]:
    """The parameters of a Ray node whose workers are forks of a server."""
    return {"worker_path": ray_worker.__file__, "env_vars": {ray_worker.ADDRESS: server.address}}
