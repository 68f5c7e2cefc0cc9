"""The thread that watches Ray's processes; see `tests/on_ray/faults/test_deaths_of_ray.py` for the death of Ray."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from flowrl.distributed.faults import ray_processes as watch
from tests.support.errors import raises

HIGH = 1100


@pytest.fixture
def room() -> Iterator[None]:
    """File descriptors above the limit of `select.select`."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] <= HIGH:
        pytest.skip(f"this machine allows {before[1]} descriptors a process")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], HIGH + 100), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches only on Linux")
@pytest.mark.usefixtures("room")
def test_the_death_of_a_ray_process_is_detected_for_any_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def high(process: int) -> int:
        low = opened(process)
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH)
        os.close(low)
        return descriptor

    opened, logged = os.pidfd_open, threading.Event()
    monkeypatch.setattr(os, "pidfd_open", high)
    monkeypatch.setattr(watch.logger, "error", lambda text: logged.set())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        monkeypatch.setattr(watch, "_processes", lambda: {raylet.pid: "the raylet"})
        with watch.watched():
            assert not watch.is_gone()
            raylet.kill()
            assert logged.wait(60)
            assert watch.is_gone()
            with raises("cluster.ray-died", process=f"the raylet, process {raylet.pid}") as caught:
                watch.wait([], 1.0)
            assert isinstance(caught.value, watch.RayDiedError)
    assert not watch.is_gone()
