"""Run a command under `supervise`: ``python -P command.py PROGRAM ARGUMENT...``, with a socket as stdin.

When the other end of the socket is closed, the supervisor kills the program and everything that it has started. This
file runs by its path and imports only the standard library.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def execute(command: list[str]) -> None:
    """Become the command, without stdin; exits with 127 if it cannot be executed."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an executed program would inherit that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot execute {command[0]!r}: {error.strerror}.", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("supervisor.py")))["supervise"](lambda: execute(sys.argv[1:]))
