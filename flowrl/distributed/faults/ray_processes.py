"""Ray's own processes on this machine, without which nothing of Ray's goes on: the raylet, and the GCS of a cluster
that this process has started."""

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
"""Seconds between two looks, while something is waited for."""

_gone: list[str] = []
"""What is said of the first of them that is gone."""


class RayDiedError(NodeError):
    """Ray itself has died on the driver's machine, with all processes of the job there."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch them within the block, in a thread that says at once when one has died: a driver that then touches the
    object store is ended by Ray, without a word and without unwinding. On Linux; elsewhere nothing is watched."""
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
                _gone.append(
                    f"a process of Ray's own on this machine has died ({watches[died]}), and with it all that runs on "
                    f"Ray here; look for the kernel's out-of-memory killer, and into Ray's logs, in "
                    f"session_latest/logs under its --temp-dir (/tmp/ray). Training(resume=True) goes on from the last "
                    f"checkpoint."
                )
                logger.error(_gone[0])

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
    """Whether one has died, as far as they are watched."""
    return bool(_gone)


def wait(refs: list[Any], seconds: float, count: int = 1) -> tuple[list[Any], list[Any]]:
    """`ray.wait` for `count` of these, as long as Ray is there.

    Raises:
        RayDiedError: one of its own processes has died.
    """
    until = time.monotonic() + seconds
    while True:
        if _gone:
            raise RayDiedError(_gone[0])
        left = max(0.0, until - time.monotonic())
        answered, waiting = ray.wait(refs, num_returns=count, timeout=min(_SLICE, left))
        if len(answered) >= count or left <= _SLICE:
            return answered, waiting


def _processes() -> dict[int, str]:
    """Those that this process depends on, by number; by names of Ray's own, which may go."""
    node, found = ray_worker._global_node, dict[int, str]()
    for gcs in getattr(node, "all_processes", {}).get("gcs_server", []):
        found[gcs.process.pid] = "the GCS"
    if (path := getattr(node, "raylet_socket_name", None)) is not None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)  # whoever listens there
            raylet: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if raylet:  # 0 is in another namespace
            found[raylet] = "the raylet"
    return found
