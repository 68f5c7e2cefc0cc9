"""Runs one program with limits, inside a sandbox; standard library only, since it is sent there as text.

It reads a request from stdin, as JSON, and writes two lines: ``started``, then the result as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from typing import Any, BinaryIO

MIB = 1 << 20
FILE = 16 * MIB
"""The largest file that the program may write, its output included, in bytes."""
OUTPUT = MIB
"""The characters of the output that are returned."""


def execute(program: str, stdin: str, timeout: float, memory: int) -> dict[str, Any]:
    """Run a Python program in a new folder; its output goes to files, so it cannot write a result itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = functools.partial(os.path.join, folder)
        for name, text in (("main.py", program), ("stdin", stdin)):
            with open(path(name), "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        with open(path("stdin"), "rb") as given, open(path("out"), "w+b") as out, open(path("err"), "w+b") as err:
            child = subprocess.Popen(
                [sys.executable, "-I", path("main.py")],
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
                preexec_fn=lambda: limit(timeout, memory),
            )
            exit_code: int | None
            try:
                exit_code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                exit_code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return {"exit_code": exit_code, "stdout": read(out, OUTPUT), "stderr": read(err, OUTPUT // 64)}


def limit(timeout: float, memory: int) -> None:
    """Limit this process: its CPU time, address space, files and core dumps."""
    seconds = int(timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory * MIB, memory * MIB))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read(file: BinaryIO, characters: int) -> str:
    """The start of a file that was written."""
    file.seek(0)
    return file.read(characters).decode("utf-8", "replace")


def main(request: dict[str, Any]) -> None:
    """Run the program of a request, and write the result."""
    print("started", flush=True)
    print(json.dumps(execute(**request)), flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin))
