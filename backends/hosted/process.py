"""`EngineProcess`: an engine in its own process, and the end of everything that it started."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowrl import errors
from flowrl.backends.hosted import reaper
from flowrl.backends.hosted.reaper import end_group, members, note, shared_memory
from flowrl.errors import EngineError

GRACE = 20.0
"""Seconds within which processes must end."""

PATIENCE = 0.5
"""Seconds between scans of the shared memory of a working group."""


class EngineProcess:
    """A Python process that serves requests, and the group of all processes that it starts.

    A request is a dict followed by a body of bytes; a reply is a dict.

    The process has its own session and folder. Process, group and folder end with `close`, with this object, and with
    this process, even if it is killed.

    Args:
        main: the function that it runs, ``"package.module:function"``; called with two connections: requests to
            receive, and replies to send.
        environment: variables in addition to those of this process; None removes one.
    """

    def __init__(
        self, name: str, main: str, environment: Mapping[str, str | None], folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self.name = name
        code = "import sys; from flowrl.backends.hosted.process import run; run(sys.argv[1], *map(int, sys.argv[2:]))"
        here = str(Path(errors.__file__).parents[1])
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        changed = {"PYTHONPATH": path, "TMPDIR": folder.name, **environment}
        self._log = Path(folder.name) / "output.txt"
        self._last_scan = "", 0.0  # of shared memory: after which call, and when
        (theirs_in, requests), (replies, theirs_out), (theirs_life, life) = os.pipe(), os.pipe(), os.pipe()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                # -P: import this process's flowrl, not one in the working directory
                [sys.executable, "-P", "-c", code, main, str(theirs_in), str(theirs_out), str(theirs_life)],
                env={key: v for key, v in {**os.environ, **changed}.items() if v is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out, theirs_life),
                start_new_session=True,
            )
        for descriptor in (theirs_in, theirs_out, theirs_life):
            os.close(descriptor)
        self._requests = Connection(requests, readable=False)
        self._replies = Connection(replies, writable=False)
        self._end = weakref.finalize(self, _end, self._process, self._requests, self._replies, life, folder)

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def send(self, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a request without waiting for its reply; raises `EngineError` if the process has died."""
        try:
            self._requests.send(dict(message))
            self._requests.send_bytes(body)
        except OSError:
            raise self._died(f"before {message.get('call', 'its start')}") from None

    def ask(self, call: str, body: bytes = b"", **message: Any) -> dict[str, Any]:
        """Send a request and wait for its reply; raises `EngineError` if the process died or replies with an error."""
        self.send({"call": call, **message}, body)
        return self.reply(call)

    def reply(self, call: str) -> dict[str, Any]:
        """The next reply, which is to `call`; raises as `ask`."""
        try:
            while not self._replies.poll(PATIENCE):
                note(shared_memory(self.pid), self._log.parent)  # it may die before it replies
            reply: dict[str, Any] = self._replies.recv()
        except (EOFError, OSError):
            raise self._died(f"during {call}") from None
        if call != self._last_scan[0] or time.monotonic() > self._last_scan[1] + PATIENCE:
            note(shared_memory(self.pid), self._log.parent)  # it takes milliseconds, and some calls are frequent
            self._last_scan = call, time.monotonic()
        if "error" in reply:
            raise EngineError(
                f"{self.name} failed in {call}: {reply['error'].rstrip('.')}. {self._output()}",
                code="engine.call-failed",
                engine=self.name,
                call=call,
                error=reply["error"],
            )
        return reply

    def close(self) -> None:
        """End the process and its group; idempotent."""
        self._end()

    def _died(self, when: str) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        code = self._process.returncode
        how = "does not reply" if code is None else f"exited with {code}" if code >= 0 else signal.Signals(-code).name
        how = f"was killed by {how}" if code is not None and code < 0 else how
        return EngineError(
            f"The process of {self.name} {how} {when}. {self._output()}",
            code="engine.process-died",
            engine=self.name,
            how=how,
            when=when,
        )

    def _output(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join(["The last lines of its output:", *(f"    {line}" for line in lines or ["(none)"])])


def _end(
    process: subprocess.Popen[bytes],
    requests: Connection,
    replies: Connection,
    life: int,
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    """End a group of processes, and wait until all have ended."""
    end_group(process.pid, Path(folder.name))
    process.wait()
    requests.close()
    replies.close()
    deadline = time.monotonic() + GRACE
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    folder.cleanup()
    os.close(life)  # the reaper has nothing left to do


def run(main: str, requests: int, replies: int, life: int) -> None:
    """The main function of the process: starts a reaper, and runs `main`."""
    reaper.launch(life, Path(os.environ["TMPDIR"]), os.getpid())
    os.close(life)
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    module, _, function = main.partition(":")
    serve = getattr(importlib.import_module(module), function)
    serve(Connection(requests, writable=False), Connection(replies, readable=False))
