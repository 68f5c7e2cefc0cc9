"""What a job on Ray leaves behind when it is over: nothing."""

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
    """By host plan, None being the general one."""
    actors = {None: executor.runner.hosts.general, **executor.runner.hosts.actors}
    return dict(zip(actors, ray.get([actor.pid.remote() for actor in actors.values()]), strict=True))


def ends(pid: int, seconds: float = 60) -> bool:
    """Whether a process ends before so many seconds are over."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], seconds)[0])
    finally:
        os.close(watch)


def family(pid: int) -> set[int]:
    """A process and all that it has started, and these, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def shared_memory(processes: Iterable[int]) -> set[str]:
    """Segments in shared memory that torch has made for tensors of these processes, by the numbers in their names."""
    made = tuple(f"torch_{process}_" for process in processes)
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(made)}


@contextmanager
def leaves_nothing() -> Iterator[list[int]]:
    """Within the block jobs are opened, and the processes that they start entered; none of them is left after it, and
    nothing that they have made. What others do on this machine meanwhile is theirs."""
    known, processes = set(placement_group_table()), list[int]()
    yield processes
    assert all(ends(pid) for pid in processes), "a process is left"
    until = time.monotonic() + 60
    while (left := shared_memory(processes)) and time.monotonic() < until:  # torch's manager removes it, and then ends
        time.sleep(0.5)
    assert not left, f"shared memory is left: {left}"
    states = {group["state"] for name, group in placement_group_table().items() if name not in known}
    assert states <= {"REMOVED"}, "a placement group is left"
