"""An engine in a process of its own: started, spoken to, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import flowrl
from flowrl.backends.frames import read_frame, write_frame
from flowrl.errors import FlowrlError

GRACE = 20.0
"""Seconds that we wait for processes to end that are ending."""


class EngineError(FlowrlError, RuntimeError):
    """The process of an engine died, or answered with an error."""


class EngineProcess:
    """A Python process that answers frames, and the group of all processes that it starts.

    It lives in a session of its own, writes its files into a folder of its own, and is ended, with the group and the
    folder, by `close`, with this object, and with this process, however that ends.

    Args:
        name: for errors.
        main: what it runs, ``"package.module:function"``; called with three file descriptors: requests to read, replies
            to write, and a pipe that ends with this process.
        environment: variables besides those of this process; None removes one.
        folder: where its temporary files go; removed at the end.
    """

    def __init__(
        self, name: str, main: str, environment: Mapping[str, str | None], folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self.name = name
        module, _, function = main.partition(":")
        code = f"import sys; from {module} import {function}; {function}(*map(int, sys.argv[1:]))"
        here = str(Path(flowrl.__file__).parents[1])
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        changed = {"PYTHONPATH": path, "TMPDIR": folder.name, **environment}
        self._log = Path(folder.name) / "output.txt"
        (theirs_in, requests), (replies, theirs_out), (theirs_life, life) = os.pipe(), os.pipe(), os.pipe()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs_in), str(theirs_out), str(theirs_life)],
                env={key: v for key, v in {**os.environ, **changed}.items() if v is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out, theirs_life),
                start_new_session=True,
            )
        for descriptor in (theirs_in, theirs_out, theirs_life):
            os.close(descriptor)
        self._requests: BinaryIO = open(requests, "wb")  # noqa: SIM115
        self._replies: BinaryIO = open(replies, "rb")  # noqa: SIM115
        self._segments: set[Path] = set()
        streams = (self._requests, self._replies, life)
        self._end = weakref.finalize(self, _end, self._process, *streams, folder, self._segments)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def send(self, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a frame that has no reply.

        Raises:
            EngineError: the process has died.
        """
        try:
            write_frame(self._requests, message, body)
        except (BrokenPipeError, ValueError):
            raise self._died("before it was asked") from None

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
            reply, _ = read_frame(self._replies)
        except (EOFError, ValueError):
            raise self._died(f"during {call}") from None
        self._segments |= shared_memory(self.pid)  # while there is somebody to tell
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
    requests: BinaryIO,
    replies: BinaryIO,
    life: int,
    folder: tempfile.TemporaryDirectory[str],
    segments: set[Path],
) -> None:
    """End a group of processes, and wait until nothing of it is left."""
    end_group(process.pid, segments)
    process.wait()
    for stream in (requests, replies):
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    os.close(life)
    deadline = time.monotonic() + GRACE
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    folder.cleanup()


def end_group(group: int, segments: Iterable[Path] = ()) -> None:
    """Kill every process of a group, without leaving its shared memory behind.

    Nobody is asked to end by himself: the engines' own ways of ending kill the process that tracks their shared memory
    before it has cleaned up, and wait for requests that nobody wants any more.

    Args:
        group: its number.
        segments: of shared memory that are known to be the group's, besides those that its processes have mapped now.
    """
    for segment in {*segments, *shared_memory(group)}:
        segment.unlink(missing_ok=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


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
