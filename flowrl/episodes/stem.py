"""The process that a world's processes split off from: it has imported what they need, so that one more starts at once.

`flowrl.keeper` runs this file by its path, with a socket as stdin. The first line over it says what to import; the
answer is a line, empty where all went well. Each socket that comes then, as a file descriptor, is for one process more,
with a keeper of its own: once its other end is closed, the process is killed, and all that it has started. What they
print goes to stderr, and stdin is empty for them.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import socket
import sys
import traceback

_FIRST = 200
"""The least number of a socket as a file descriptor, out of the way of what users' code opens and closes."""


def taken() -> socket.socket:
    """The socket that stands in stdin's place; stdin is empty from now on, and stdout is stderr."""
    moved = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return moved


def main() -> None:
    """Import what the first line names, then split off a process for each socket."""
    asker = taken()
    job = json.loads(asker.makefile("rb").readline())
    sys.path[:] = job["path"]
    try:
        resolve = importlib.import_module("flowrl.core.references").resolve
        for reference in job["references"]:
            resolve(reference)
        apart = importlib.import_module("flowrl.episodes.apart")
        keeper = importlib.import_module("flowrl.keeper")
    except BaseException as error:
        cause = error.__cause__ or error
        said = {
            "what": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_tb(cause.__traceback__)),
        }
        asker.sendall(json.dumps(said).encode() + b"\n")
        os._exit(1)
    asker.sendall(b"{}\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    while True:
        _, sockets, _, _ = socket.recv_fds(asker, 1, 1)
        if not sockets:
            os._exit(0)  # whoever asked is gone
        if os.fork() == 0:
            asker.close()
            os.dup2(sockets[0], 0)
            os.close(sockets[0])
            keeper.keep(lambda: apart.serve(taken()))
            os._exit(0)
        os.close(sockets[0])


if __name__ == "__main__":
    main()
