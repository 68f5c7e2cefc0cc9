"""The process of a `ForkServer`: it imports once, then forks a worker for each request.

It runs by its path with a socket as stdin, and needs only the standard library. It runs no user code beyond the given
imports, starts no thread and never initializes a GPU, so its forks are as clean as new processes. It ends when the
other end of its socket is closed.

Some libraries read the environment while they are imported. A request may therefore name a *layer*: an environment and
further imports, for which this process forks a server of the same kind, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

MOST_FDS = 8
"""File descriptors that a request may carry."""

_FIRST = 200
"""The lowest number of a socket moved away from stdin, out of reach of what user code opens and closes."""

Calls = Sequence[Sequence[Any]]
"""Functions to call, each as ``[module, name, *arguments]``; a module may be a file that imports the standard library
alone, by its absolute path."""


def detach_stdin() -> socket.socket:
    """Move the socket at stdin to another descriptor; stdin is empty from then on, and stdout goes to stderr."""
    moved = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return moved


def send(to: socket.socket, request: Any, fds: Sequence[int] = ()) -> None:
    """Send a request with file descriptors."""
    body = json.dumps(request).encode()
    socket.send_fds(to, [struct.pack("!I", len(body))], fds)
    to.sendall(body)


def receive(source: socket.socket) -> tuple[Any, list[int]] | None:
    """The next request with its file descriptors; None once the other end is closed."""
    head, fds, _, _ = socket.recv_fds(source, 4, MOST_FDS)
    if not head:
        return None
    head += _exactly(source, 4 - len(head))
    return json.loads(_exactly(source, struct.unpack("!I", head)[0])), fds


def _received(source: socket.socket) -> tuple[Any, list[int]] | None:
    """`receive`, where a connection that breaks counts as closed."""
    try:
        return receive(source)
    except (OSError, EOFError):
        return None


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if not (part := source.recv(size - len(parts))):
            raise EOFError("the connection was closed within a request")
        parts += part
    return bytes(parts)


def prepare(calls: Calls) -> None:
    """Make the calls, which import what workers need."""
    gc.disable()  # imports make little garbage, and looking for it takes a tenth of their time
    for module, name, *arguments in calls:
        getattr(_module(module), name)(*arguments)
    gc.freeze()  # a collection in a worker does not touch, and so copy, these pages


def _module(name: str) -> Any:
    """A module by its name, or by its file without the package around it."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, name)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class _Server:
    """Forks workers for requests of its owner, and of other processes of this user that connect."""

    def __init__(self, owner: socket.socket, listener: socket.socket | None, adopts: bool) -> None:
        self._owner, self._listener, self._adopts = owner, listener, adopts
        self._layers: dict[str, socket.socket] = {}
        self._forked: set[int] = set()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def serve(self) -> NoReturn:
        """Serve until the owner closes its end. In a worker, `SystemExit` leaves this once the worker is done.

        If the server adopts, its workers have supervisors, whose descendants become its children if user code kills
        one of them. It kills these.
        """
        if self._adopts:
            self._forked |= {*_supervisor().children()}  # which the imports have started
            _supervisor().adopt_orphans()
            signal.set_wakeup_fd(self._wake)
            signal.signal(signal.SIGCHLD, lambda *_: None)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
        while True:
            ready, _, _ = select.select([each for each in (self._owner, self._listener, self._woken) if each], [], [])
            if self._woken in ready:
                os.read(self._woken, 64)
                self._reap()
            elif self._owner in ready:
                if (received := _received(self._owner)) is None:
                    os._exit(0)
                self._handle(*received)
            elif (connection := self._accept()) is not None:
                if (received := _received(connection)) is not None:
                    request, fds = received
                    self._handle(request, [*fds, os.dup(connection.fileno())])
                connection.close()

    def _reap(self) -> None:
        """Wait for the workers that have ended; if one was killed, kill the orphans that it left."""
        killed = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                killed |= os.WIFSIGNALED(ended[1]) and ended[0] in self._forked
                self._forked.discard(ended[0])
        if killed:
            _supervisor().kill_all(lambda: set(_supervisor().children()) - self._forked)

    def _accept(self) -> socket.socket | None:
        """The next connection; None where it is another user's."""
        assert self._listener is not None
        found, _ = self._listener.accept()
        _, user, _ = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.geteuid():
            return found
        found.close()
        return None

    def _handle(self, request: Any, fds: list[int]) -> None:
        """Fork for a request. If that fails, the requesting process sees its descriptors closed."""
        try:
            if layer := request.pop("layer", None):
                send(self._layer(layer, fds), request, fds)
            elif worker := os.fork():
                self._forked.add(worker)
            else:
                self._work(request, fds)
        except OSError:
            traceback.print_exc()
        for fd in fds:
            os.close(fd)

    def _layer(self, layer: Any, fds: Sequence[int]) -> socket.socket:
        """The socket to the server of a layer, which is forked on first use and does not get `fds`."""
        key = json.dumps(layer, sort_keys=True)
        if key not in self._layers:
            ours, theirs = socket.socketpair()
            if layered := os.fork():
                self._forked.add(layered)
            else:
                for fd in (ours.detach(), *fds):
                    os.close(fd)
                self._close()
                os.environ.update(layer["environment"])
                prepare(layer["calls"])
                _Server(theirs, None, self._adopts).serve()
            theirs.close()
            self._layers[key] = ours
        return self._layers[key]

    def _work(self, request: Any, fds: list[int]) -> NoReturn:
        """Run the target of a request in the worker, which has none of the server's sockets and settings."""
        self._close()
        if self._adopts:
            signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.enable()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # Python's own generator seeds itself after a fork
        module, _, name = request["target"].partition(":")
        getattr(_module(module), name)(request["arguments"], fds)
        sys.exit()

    def _close(self) -> None:
        for each in (self._owner, self._listener, *self._layers.values()):
            if each is not None:
                each.close()
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)


def _supervisor() -> Any:
    """`flowrl.workers.supervisor`, without the package around it."""
    return _module(str(Path(__file__).with_name("supervisor.py")))


def main() -> None:
    """Make the calls of the first message, reply whether they went well, then serve."""
    owner = detach_stdin()
    if (first := receive(owner)) is None:
        return
    setup = first[0]
    listener = None
    if setup["address"]:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + setup["address"])  # in Linux's abstract namespace, so that no file remains
        listener.listen(socket.SOMAXCONN)
    sys.path[:] = setup["path"]
    try:
        prepare(setup["calls"])
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            raise RuntimeError("the imports have initialized CUDA, which no fork could use then")
    except BaseException as error:
        cause = error.__cause__ or error
        lines = "".join(traceback.format_tb(cause.__traceback__))
        send(owner, {"what": f"{type(error).__name__}: {error}", "traceback": lines})
        os._exit(1)
    with contextlib.suppress(OSError):  # the owner has closed its end; `serve` ends then
        send(owner, {"threads": len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1})
    _Server(owner, listener, setup["adopts"]).serve()


if __name__ == "__main__":
    main()
