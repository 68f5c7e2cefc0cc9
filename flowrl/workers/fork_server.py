"""`ForkServer`: a process that has imported what workers need, and forks one in milliseconds."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.workers import fork_server_process, supervisor
from flowrl.workers.fork_server_process import Calls, receive, send

START_LIMIT = 300.0
"""Seconds allowed for the imports."""

PROGRAM = str(Path(fork_server_process.__file__))


class NotReadyError(Exception):
    """The imports of a fork server raised, or ended its process; `details` has the lines of the traceback, if any."""

    def __init__(self, what: str, details: str = "") -> None:
        super().__init__(what)
        self.details = details


class ForkServer:
    """A process from which workers are forked. It lives until `close`, at most as long as this process.

    Args:
        calls: functions to call first, which import what workers need.
        supervised: a supervisor terminates all processes that its workers started when the server ends.
        listens: other processes of this user may connect to `address` and send requests.
    """

    def __init__(
        self, calls: Calls, path: Sequence[str] | None = None, supervised: bool = True, listens: bool = False
    ) -> None:
        self.address = f"flowrl-{os.getpid()}-{secrets.token_hex(8)}" if listens else ""
        self._owner, self._lock, self._supervised = os.getpid(), threading.Lock(), supervised
        self._ready: int | Exception | None = None
        self._process, self._channel = supervisor.start(PROGRAM, supervised)
        setup: dict[str, Any] = {
            "path": [*(sys.path if path is None else path)],
            "calls": calls,
            "address": self.address,
        }
        setup["adopts"] = supervised and sys.platform == "linux"
        send(self._channel, setup)

    def wait_until_ready(self) -> int:
        """Wait for the imports. Returns how many threads they left running, of which a fork has one."""
        with self._lock:
            if self._ready is None:
                self._ready = self._reply()
            if isinstance(self._ready, Exception):
                raise self._ready
            return self._ready

    def _reply(self) -> int | Exception:
        self._channel.settimeout(START_LIMIT)
        try:
            received = receive(self._channel)
        except TimeoutError:
            return TimeoutError(f"the import took more than {START_LIMIT:g} s")
        except (OSError, EOFError):
            received = None
        if received is None:
            return NotReadyError("its process ended")
        self._channel.settimeout(None)
        reply = received[0]
        return NotReadyError(reply["what"], reply["traceback"].rstrip()) if "what" in reply else int(reply["threads"])

    @property
    def alive(self) -> bool:
        """Whether it can fork workers."""
        return self._process.poll() is None

    def fork(self, target: str, arguments: Any, fds: Sequence[int]) -> None:
        """Fork a worker, which calls `target` (``"module:function"``) with `arguments` (JSON) and copies of `fds`."""
        with self._lock:
            send(self._channel, {"target": target, "arguments": arguments}, fds)

    def close(self) -> None:
        """End it, also while it imports. In a process that was forked from its owner, it only closes this end."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):  # it has ended already
                self._channel.shutdown(socket.SHUT_RDWR)  # which also ends a wait in another thread
            if not self._supervised:
                self._process.kill()
            self._process.wait()
        self._channel.close()


def imports(modules: Sequence[str]) -> Calls:
    """The calls that import modules."""
    return [[importlib.__name__, importlib.import_module.__name__, module] for module in modules]
