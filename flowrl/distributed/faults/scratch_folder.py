"""A folder that goes with this process, however that ends.

A process that is killed cannot clean up, so another one does: it runs this file by its path, imports the standard
library alone, and lives in a session of its own.
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
"""So long may processes of a driver that was killed still write into it."""


@contextmanager
def spare_folder() -> Iterator[Path]:
    """A new folder in the one for temporary files, which is removed after the block, or when this process dies."""
    folder = Path(tempfile.mkdtemp(prefix="flowrl-"))
    keeper = subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # whoever reads the output of this process need not wait for it
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        keeper.communicate(b".")
        shutil.rmtree(folder)


def main(folder: Path) -> None:
    """Wait for a word, or for the end of whoever would say it; then remove what is there, and what comes after."""
    if sys.stdin.buffer.read(1):
        return
    until = time.monotonic() + _LAST_SECONDS
    while time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
