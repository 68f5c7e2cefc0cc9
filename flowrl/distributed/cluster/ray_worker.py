"""The worker program of a Ray node: a fork of a process that has imported torch, transformers and flowrl.

Ray starts this file instead of its ``default_worker.py``. It passes its arguments, environment, folder and standard
streams to the `ForkServer` at `ADDRESS`, whose fork runs Ray's program and becomes the worker. If no server responds,
this process runs Ray's program itself. It imports only the standard library.

Ray's C++ library reads the ``RAY_*`` variables once on import, and the job's id is one of them. So the server forks a
layer for each such environment, which imports Ray there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import signal
import socket
import struct
import sys
from typing import Any

ADDRESS = "FLOWRL_FORK_SERVER"
"""The environment variable with the socket of the fork server."""

_RAY_WORKER = "ray._private.workers.default_worker"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main() -> None:
    """Fork this worker from the fork server, or start it here."""
    ray_variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    request = {
        "target": f"flowrl.distributed.cluster.ray_worker:{become_ray_worker.__name__}",
        "arguments": {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()},
        "layer": {
            "environment": ray_variables,
            "calls": [["importlib", "import_module", name] for name in (_RAY_WORKER, "flowrl.distributed.hosts.host")],
        },
    }
    if not _forked(request):
        spec = importlib.util.find_spec("ray")
        assert spec is not None and spec.origin is not None
        program = os.path.join(os.path.dirname(spec.origin), *_RAY_WORKER.split(".")[1:]) + ".py"
        os.execv(sys.executable, [sys.executable, program, *sys.argv[1:]])


def _forked(request: Any) -> bool:
    """Whether the fork server forked a worker for a request."""
    body = json.dumps(request).encode()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect("\0" + os.environ[ADDRESS])
            socket.send_fds(server, [struct.pack("!I", len(body))], [0, 1, 2])
            server.sendall(body)
            return server.recv(1) == b"."
    except OSError:
        return False


def become_ray_worker(given: Any, fds: list[int]) -> None:
    """Run Ray's worker program in a fork, set up as a process that Ray started.

    `given` has the program's arguments, the environment and the folder; `fds` are stdin, stdout, stderr, and the
    connection of the requesting process.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.write(fds[3], b".")
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    sys.argv[1:] = given["arguments"]
    runpy.run_module(_RAY_WORKER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
