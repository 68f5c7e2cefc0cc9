"""The reaper: a process that outlives an engine's processes and the process that started them, and cleans up.

It is not a child process, since whatever kills the engine's parent (such as Ray) may kill its children too. It imports
only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

NOTE = "shared-memory.txt"
"""In an engine's folder: the shared memory that it had at the last scan, one path per line."""


def launch(life: int, folder: Path, group: int | None = None) -> None:
    """Start a reaper that cleans up when every writing end of the pipe `life` (its reading end) is closed.

    It kills the process `group`, and removes `folder` after the shared memory that is noted in it.
    """
    arguments = [str(life), str(folder), *([] if group is None else [str(group)])]
    command = [sys.executable, "-I", __file__, *arguments]
    subprocess.run(command, pass_fds=(life,), start_new_session=True, stdin=subprocess.DEVNULL, check=True)


def start_reaper(segments: Iterable[Path]) -> int:
    """Start a reaper that removes shared memory when this process ends, or closes the returned descriptor."""
    folder = Path(tempfile.mkdtemp(prefix="flowrl-reaper-"))
    note(segments, folder)
    theirs, life = os.pipe()
    launch(theirs, folder)
    os.close(theirs)
    return life


def main(life: int, folder: Path, group: int | None) -> None:
    """Wait until the other end of a pipe is closed; then clean up."""
    os.read(life, 1)
    if group is None:
        remove(noted(folder))
    else:
        end_group(group, folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_group(group: int, folder: Path) -> None:
    """Kill every process of a group, and remove its shared memory.

    SIGKILL only: engines that terminate by themselves kill the process that tracks their shared memory before it has
    cleaned up. The group is stopped first, so that it maps nothing between the scan and the kill. `folder` may note
    shared memory of processes that died earlier.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
    segments = shared_memory(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    remove(noted(folder) | segments)


def note(segments: Iterable[Path], folder: Path) -> None:
    """Add shared memory to the note in a folder, while the processes that mapped it live."""
    known = noted(folder)
    if new := set(segments) - known:
        written = folder / f"{NOTE}.new"
        written.write_text("\n".join(map(str, known | new)))
        written.replace(folder / NOTE)  # atomic: a process killed while it writes leaves the old note


def noted(folder: Path) -> set[Path]:
    """The shared memory noted in a folder."""
    path = folder / NOTE
    return {Path(line) for line in path.read_text().splitlines()} if path.exists() else set()


def remove(segments: Iterable[Path]) -> None:
    """Remove shared memory that still exists."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def shared_memory(group: int) -> set[Path]:
    """The files in shared memory that processes of a group have mapped."""
    mapped: set[int] = set()
    for process in members(group):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines = (process / "maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    # By inode, since a semaphore is mapped under another name than its file's.
    return {Path(entry.path) for entry in os.scandir("/dev/shm") if entry.inode() in mapped}


def members(group: int) -> list[Path]:
    """The folders in ``/proc`` of a group's processes, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(entry)
    return found


if __name__ == "__main__":
    if os.fork() == 0:  # so that the reaper is an orphan
        main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
