"""Leaks of ended SGLang engines."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def leaks_of_sglang(mark: str) -> set[str]:
    """Processes with this mark in their environment, which subprocesses inherit; and shared memory and folders without
    a living owner. Engines of other programs are ignored."""
    processes, environments, mapped = set(), b"", b""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            environment = (process / "environ").read_bytes()
            environments += environment
            mapped += (process / "maps").read_bytes()
            if mark.encode() in environment and b"sglang" in (process / "cmdline").read_bytes():
                processes.add(f"process {process.name}")
    memory = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("sglang")}
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("flowrl-sglang-*")}
    owned = environments + mapped
    return processes | {name for name in memory | folders if name.encode() not in owned}


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` is true; another process makes it true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
