"""Watch Ray's own processes on this machine, which a job depends on: the raylet, and the GCS of a local cluster."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import worker as ray_worker

from flowrl.errors import NodeError

logger = logging.getLogger(__name__)

_SLICE = 0.2
"""Seconds between two checks while waiting."""

_gone: list[tuple[str, str]] = []
"""The first of them that died, with the message."""


class RayDiedError(NodeError):
    """A process of Ray itself died on the driver's machine, and with it all processes of the job there."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch them in the block, in a thread that logs a death at once: if the driver then uses the object store, Ray
    ends it without a message or unwinding. Linux only; does nothing elsewhere."""
    if not hasattr(os, "pidfd_open"):
        yield
        return
    watches = {os.pidfd_open(process): f"{name}, process {process}" for process, name in _processes().items()}
    over, end = os.pipe()

    def look() -> None:
        found = select.poll()  # `select.select` takes no descriptor above 1023
        for descriptor in (over, *watches):
            found.register(descriptor, select.POLLIN)
        for died, _ in found.poll():
            if died in watches and not _gone:
                message = (
                    f"A process of Ray on this machine died ({watches[died]}), and with it everything that runs on Ray "
                    f"here. Check for the kernel's out-of-memory killer, and Ray's logs in session_latest/logs under "
                    f"its --temp-dir (/tmp/ray). Training(resume=True) resumes from the last checkpoint."
                )
                _gone.append((watches[died], message))
                logger.error(message)

    thread = threading.Thread(target=look, name="flowrl-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(end, b".")
        thread.join()
        _gone.clear()
        for descriptor in (*watches, over, end):
            os.close(descriptor)


def is_gone() -> bool:
    """Whether a watched process has died."""
    return bool(_gone)


def wait(refs: list[Any], seconds: float, count: int = 1) -> tuple[list[Any], list[Any]]:
    """`ray.wait` for `count` of these; raises `RayDiedError` if a process of Ray has died."""
    until = time.monotonic() + seconds
    while True:
        if _gone:
            process, message = _gone[0]
            raise RayDiedError(message, code="cluster.ray-died", process=process)
        remaining = max(0.0, until - time.monotonic())
        done, waiting = ray.wait(refs, num_returns=count, timeout=min(_SLICE, remaining))
        if len(done) >= count or remaining <= _SLICE:
            return done, waiting


def _processes() -> dict[int, str]:
    """The processes to watch: name by process id. Uses private names of Ray, which may disappear."""
    node, found = ray_worker._global_node, dict[int, str]()
    for gcs in getattr(node, "all_processes", {}).get("gcs_server", []):
        found[gcs.process.pid] = "the GCS"
    if (path := getattr(node, "raylet_socket_name", None)) is not None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)  # the listener is the raylet
            raylet: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if raylet:  # 0: in another namespace
            found[raylet] = "the raylet"
    return found
