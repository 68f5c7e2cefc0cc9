"""The process between this program and one that runs users' code: whatever that starts ends with it, and both with us.

`start` runs this file by its path, with the file to run as the argument and a socket as stdin. It runs none of the
user's code, and imports the standard library alone.

Killing a group of processes misses what has left it (``setsid``), and a process that is killed cannot clean up itself.
So there are three: the first is our child, whose exit status is the worker's; whoever kills our process may kill this
child too, as Ray does. The second is the keeper. On Linux, processes that lose their parent become its children, so
that it finds all that the worker has started; elsewhere it ends the worker's group. The third runs the file.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def start(program: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a file in a process, with a keeper; gives the first of the three, and our end of the worker's stdin.

    Once that end is closed or shut down, the worker is killed, and all that it has started.
    """
    with ExitStack() as undo:
        ours, theirs = map(undo.enter_context, socket.socketpair())
        process = subprocess.Popen(
            # -P: the folder of the file must not come before the standard library.
            [sys.executable, "-P", __file__, program],
            stdin=theirs.fileno(),
            env={"OMP_NUM_THREADS": "1", **os.environ},  # there are several workers, beside a model that computes
            start_new_session=True,  # we handle Ctrl-C
        )
        theirs.close()
        undo.pop_all()
    return process, ours


def main(program: str) -> None:
    """Keep a worker that runs `program`, until it ends or the other end of stdin is closed."""

    def run() -> None:
        sys.argv = [program]
        runpy.run_path(program, run_name="__main__")

    keeper = os.fork()
    if keeper == 0:
        keep(run)
    else:
        _end_like(os.waitpid(keeper, 0)[1])


def keep(run: Callable[[], None]) -> None:
    """Start a worker that runs `run` and wait; then end all that is left of it, and end as it did.

    It returns in the worker alone. The worker and all else are ended once the other end of stdin is closed.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(woken)
        os.close(wake)
        os.setsid()  # what it sends to its own group does not meet its keeper
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        run()
        return
    watch = select.poll()
    watch.register(0, 0)  # nothing but the hang-up, which is always told
    watch.register(woken, select.POLLIN)
    status = None
    while status is None and 0 not in dict(watch.poll()):
        os.read(woken, 64)
        status = _reaped(worker)
    _end_all(worker)
    _end_like(status or 0)


def _reaped(worker: int) -> int | None:
    """Wait for whatever has ended; the status of the worker, if it was among it."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]
    return None


def _end_all(worker: int) -> None:
    """Kill all children, and the children that these leave, until there is none."""
    while mine := [child for child in _children(worker) if _killed(child)]:
        with suppress(ChildProcessError):
            os.waitpid(mine[0], 0)


def _children(worker: int) -> list[int]:
    """The children of this process; without Linux's ``/proc`` the group of the worker, as long as it was not waited
    for."""
    if sys.platform != "linux":
        return [worker] if _killed(-worker) else []
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _killed(process: int) -> bool:
    """Kill a process, or the group of that number if it is negative; False where it is gone, or another user's."""
    try:
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end_like(status: int) -> None:
    """End as another process has, by its status of `os.waitpid`."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core of the first is enough
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _control(option: int, value: int) -> None:
    """Linux's ``prctl``; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
