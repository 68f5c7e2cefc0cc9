"""A temporary folder that is removed when this process ends, even if it is killed.

A helper process removes it: it runs this file by its path, imports only the standard library, and has its own session.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LAST_SECONDS = 30
"""How long the processes of a killed driver may still write into it."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new temporary folder, which is removed after the block or when this process dies."""
    folder = Path(tempfile.mkdtemp(prefix="flowrl-"))
    helper = subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # so that readers of this process's output do not wait for the helper
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        helper.communicate(b".")
        shutil.rmtree(folder)


def main(folder: Path) -> None:
    """Wait for a byte or the end of the parent; after the latter, remove the folder, repeatedly for some time."""
    if sys.stdin.buffer.read(1):
        return
    until = time.monotonic() + _LAST_SECONDS
    while time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
