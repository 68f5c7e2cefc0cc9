"""The process between this program and one that runs user code: it terminates that one and all its descendants.

`start` runs this file by its path, with the program to run as the argument and a socket as stdin. It runs no user code
and imports only the standard library.

Killing a process group misses descendants that called ``setsid``, so there are three processes. The first is our child,
and its exit status is the worker's; Ray, for example, may kill it with our process. The second is the supervisor: on
Linux, orphaned descendants become its children, so it finds all of them; elsewhere it terminates the worker's group.
The third runs the program.
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
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def start(program: str, supervised: bool = True) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a file in a new process with its own session; returns the process, and our end of the program's stdin.

    If `supervised`, that is the first of three processes. When our end is closed or shut down, the supervisor kills the
    program and its descendants.
    """
    with ExitStack() as undo:
        ours, theirs = map(undo.enter_context, socket.socketpair())
        process = subprocess.Popen(
            # -P: the folder of the file must not come before the standard library.
            [sys.executable, "-P", *([__file__] if supervised else []), program],
            stdin=theirs.fileno(),
            env={"OMP_NUM_THREADS": "1", **os.environ},  # several workers share the cores with a model that computes
            start_new_session=True,  # we handle Ctrl-C
        )
        theirs.close()
        undo.pop_all()
    return process, ours


def main(program: str) -> None:
    """Supervise a worker that runs `program`, until it ends or the other end of stdin is closed."""

    def run() -> None:
        sys.argv = [program]
        runpy.run_path(program, run_name="__main__")

    supervisor = os.fork()
    if supervisor == 0:
        supervise(run)
    else:
        _exit_like(os.waitpid(supervisor, 0)[1])


def supervise(run: Callable[[], None], status: int | None = None) -> None:
    """Start a worker that calls `run`, wait for it, kill its remaining descendants, and exit with its status.

    It returns in the worker only. Closing the other end of stdin kills the worker and its descendants. `status` is a
    file descriptor for the worker's status of `os.waitpid`, in decimal.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    adopt_orphans()
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (woken, wake, *([] if status is None else [status])):
            os.close(descriptor)
        os.setsid()  # what it sends to its own group does not reach its supervisor
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        run()
        return
    watch = select.poll()
    watch.register(0, 0)  # only for the hang-up, which poll always reports
    watch.register(woken, select.POLLIN)
    ended = None
    while ended is None and 0 not in dict(watch.poll()):
        os.read(woken, 64)
        ended = _reaped(worker)
    kill_all(lambda: _descendants(worker))
    if status is not None and ended is not None:
        os.write(status, str(ended).encode())
    _exit_like(ended or 0)


def _reaped(worker: int) -> int | None:
    """Wait for whatever has ended; the status of the worker, if it was among it."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]
    return None


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end; nothing outside Linux."""
    control(_PR_SET_CHILD_SUBREAPER, 1)


def kill_all(processes: Callable[[], Iterable[int]]) -> None:
    """Kill child processes, and the ones that these leave, until `processes` returns none."""
    while mine := [child for child in processes() if _killed(child)]:
        with suppress(ChildProcessError):
            os.waitpid(mine[0], 0)


def _descendants(worker: int) -> list[int]:
    """The children of this process; without Linux's ``/proc`` the group of the worker, until it was waited for."""
    return children() if sys.platform == "linux" else [worker] if _killed(-worker) else []


def children() -> list[int]:
    """The children of this process, on Linux."""
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


def _exit_like(status: int) -> None:
    """Exit as another process did, by its status of `os.waitpid`."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core of the first is enough
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def control(option: int, value: int) -> None:
    """Linux's ``prctl``; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
