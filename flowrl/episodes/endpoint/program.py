"""`run_program`: a program that plays an episode, ended with everything that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from flowrl.workers import command as supervised

_TAIL = 1 << 16
"""Bytes of the end of an output."""


KEPT = 4096
"""Characters of the end of each output in the summary of an episode."""


class ProgramResult(NamedTuple):
    """How a program has ended: its exit status, negative for a signal and None if it was killed, and the ends of its
    outputs."""

    status: int | None
    stdout: str
    stderr: str

    def kept(self) -> dict[str, Any]:
        """What the summary of an episode has of it."""
        return {"status": self.status, "stdout": self.stdout[-KEPT:], "stderr": self.stderr[-KEPT:]}


async def run_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None,
    name: str,
    ended: Callable[[ProgramResult], None],
) -> ProgramResult:
    """Run a command until it exits; when it has, or the call is canceled, all that it has started is killed.

    Args:
        folder: keeps the output, as ``name.out`` and ``name.err``.
        ended: called when it has ended, also if the call is canceled.
    """
    with contextlib.ExitStack() as stack:
        stdout, stderr = stack.enter_context(_outputs(folder, name))
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)  # then its supervisor kills it
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", supervised.__file__, *command),
                stdin=theirs.fileno(),
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            ours.close()
            await process.wait()  # its supervisor has killed all of it
            ended(ProgramResult(None, _tail(stdout), _tail(stderr)))
            raise
        result = ProgramResult(status, _tail(stdout), _tail(stderr))
        ended(result)
        return result


@contextlib.contextmanager
def _outputs(folder: Path | None, name: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Files for the two outputs."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            yield stack.enter_context(tempfile.TemporaryFile()), stack.enter_context(tempfile.TemporaryFile())
            return
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (stack.enter_context((folder / f"{name}.{end}").open("w+b")) for end in ("out", "err"))
        yield out, err


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return file.read().decode(errors="replace")
