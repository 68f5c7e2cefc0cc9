"""An engine in a process of its own: started, spoken to, and ended with everything that it started."""

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
from flowrl.backends.hosted import keeper
from flowrl.backends.hosted.keeper import end_group, members, note, shared_memory
from flowrl.errors import EngineError

GRACE = 20.0
"""Seconds that processes get to end."""

PATIENCE = 0.5
"""Seconds between looks at the shared memory of a group that is at work."""


class EngineProcess:
    """A Python process that answers requests, and the group of all processes that it starts.

    A request is a dict, and a body of bytes after it; a reply is a dict.

    It lives in a session of its own, writes its files into a folder of its own, and is ended, with the group and the
    folder, by `close`, with this object, and with this process, however that ends.

    Args:
        name: for errors.
        main: what it runs, ``"package.module:function"``; called with two connections: requests to receive, and
            replies to send.
        environment: variables besides those of this process; None removes one.
        folder: where its temporary files go; removed at the end.
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
        self._looked = "", 0.0  # at shared memory, after which call and when
        (theirs_in, requests), (replies, theirs_out), (theirs_life, life) = os.pipe(), os.pipe(), os.pipe()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                # -P: a flowrl that lies in the working directory is not the one that this process has
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
        """The process's id, which is its group's too."""
        return self._process.pid

    def send(self, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a request, and wait for nothing.

        Raises:
            EngineError: the process has died.
        """
        try:
            self._requests.send(dict(message))
            self._requests.send_bytes(body)
        except OSError:
            raise self._died(f"before {message.get('call', 'its start')}") from None

    def ask(self, call: str, body: bytes = b"", **message: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            EngineError: the process has died, or replies with an error.
        """
        self.send({"call": call, **message}, body)
        return self.reply(call)

    def reply(self, call: str) -> dict[str, Any]:
        """The next reply; `call` is what it answers.

        Raises:
            EngineError: as `ask`.
        """
        try:
            while not self._replies.poll(PATIENCE):
                note(shared_memory(self.pid), self._log.parent)  # it may die before it replies
            reply: dict[str, Any] = self._replies.recv()
        except (EOFError, OSError):
            raise self._died(f"during {call}") from None
        if call != self._looked[0] or time.monotonic() > self._looked[1] + PATIENCE:
            note(shared_memory(self.pid), self._log.parent)  # it takes milliseconds, and some calls come all the time
            self._looked = call, time.monotonic()
        if "error" in reply:
            raise EngineError(f"{self.name} failed in {call}: {reply['error']}; {self._last_words()}")
        return reply

    def close(self) -> None:
        """End the process and its group; twice is as good as once."""
        self._end()

    def _died(self, when: str) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        code = self._process.returncode
        how = "is no more" if code is None else f"exited with {code}" if code >= 0 else signal.Signals(-code).name
        how = f"was killed by {how}" if code is not None and code < 0 else how
        return EngineError(f"the process of {self.name} {how} {when}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join(["the last lines of its output are:", *(f"    {line}" for line in lines or ["(none)"])])


def _end(
    process: subprocess.Popen[bytes],
    requests: Connection,
    replies: Connection,
    life: int,
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    """End a group of processes, and wait until nothing of it is left."""
    end_group(process.pid, Path(folder.name))
    process.wait()
    requests.close()
    replies.close()
    deadline = time.monotonic() + GRACE
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    folder.cleanup()
    os.close(life)  # the keeper has nothing left to do


def run(main: str, requests: int, replies: int, life: int) -> None:
    """What the process runs: `main`, with a keeper beside it."""
    keeper.launch(life, Path(os.environ["TMPDIR"]), os.getpid())
    os.close(life)
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    module, _, function = main.partition(":")
    answer = getattr(importlib.import_module(module), function)
    answer(Connection(requests, writable=False), Connection(replies, readable=False))
