"""The keeper of a group of processes: it outlives them, and the process that started them, to clean up after both.

It is a process of its own, started by the group itself: whoever kills the process that started the group (Ray, say) may
kill that one's children too. It imports nothing but the standard library, so that it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

NOTE = "shared-memory.txt"
"""In the folder of a group: the shared memory that it had when it was looked at, a path a line."""


def main(life: int, group: int, folder: str) -> None:
    """Wait until the other end of a pipe is closed; then end a group and remove its folder."""
    os.read(life, 1)
    end_group(group, Path(folder))
    shutil.rmtree(folder, ignore_errors=True)


def end_group(group: int, folder: Path) -> None:
    """Kill every process of a group, without leaving its shared memory behind.

    Nobody is asked to end by himself: the engines' own ways of ending kill the process that tracks their shared memory
    before it has cleaned up, and wait for requests that nobody wants any more.

    Args:
        group: its number.
        folder: where `note_shared_memory` may have noted some, whose processes may have died since.
    """
    for segment in _noted(folder) | shared_memory(group):
        segment.unlink(missing_ok=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def note_shared_memory(group: int, folder: Path) -> None:
    """Write down, while there is somebody to look at, what shared memory a group has, besides what it had before."""
    known = _noted(folder)
    if new := shared_memory(group) - known:
        (folder / NOTE).write_text("\n".join(map(str, known | new)))


def _noted(folder: Path) -> set[Path]:
    """What has been written down."""
    note = folder / NOTE
    return {Path(line) for line in note.read_text().splitlines()} if note.exists() else set()


def shared_memory(group: int) -> set[Path]:
    """The files in shared memory that processes of a group have mapped."""
    mapped: set[int] = set()
    for process in members(group):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines = (process / "maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    # By number and not by name, since a semaphore is mapped under another name than it is found by.
    return {Path(entry.path) for entry in os.scandir("/dev/shm") if entry.inode() in mapped}


def members(group: int) -> list[Path]:
    """Where the processes of a group are described, but dead ones that nobody has waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(entry)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
