"""Checks that a job on Ray leaves no processes, shared memory or placement groups."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from flowrl.run.engine.steps import Steps


def process_ids(executor: Steps) -> dict[Any, int]:
    """Process ids by host; None is the general host."""
    actors = {None: executor.runner.hosts.general, **executor.runner.hosts.actors}
    return dict(zip(actors, ray.get([actor.pid.remote() for actor in actors.values()]), strict=True))


def ends(pid: int, seconds: float = 60) -> bool:
    """Whether a process ends within so many seconds."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], seconds)[0])
    finally:
        os.close(watch)


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def shared_memory(processes: Iterable[int]) -> set[str]:
    """Segments in shared memory that torch created for tensors of these processes, whose ids are in their names."""
    made = tuple(f"torch_{process}_" for process in processes)
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(made)}


@contextmanager
def leaves_nothing() -> Iterator[list[int]]:
    """The test opens jobs in the block and adds their process ids to the list; afterwards, none of these processes, and
    nothing that they created, may exist. Other processes of the machine are ignored."""
    known, processes = set(placement_group_table()), list[int]()
    yield processes
    assert all(ends(pid) for pid in processes), "a process still runs"
    until = time.monotonic() + 60
    while (rest := shared_memory(processes)) and time.monotonic() < until:  # torch's manager removes it, and ends
        time.sleep(0.5)
    assert not rest, f"shared memory remains: {rest}"
    states = {group["state"] for name, group in placement_group_table().items() if name not in known}
    assert states <= {"REMOVED"}, "a placement group remains"
