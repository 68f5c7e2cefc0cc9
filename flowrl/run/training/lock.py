"""`FolderLock`: one run at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from flowrl.data.files import parse_json
from flowrl.errors import ParameterError

logger = logging.getLogger(__name__)

LOCK = ".lock"
RESERVE = 1 << 16
"""Reserved bytes: a run that fills the disk frees them to record its failure."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_open: set[int] = set()


class FolderLock:
    """Locks an existing folder until `release` or the end of the process, when the kernel releases the lock."""

    def __init__(self, folder: Path) -> None:
        self._path, self._process = folder / LOCK, os.getpid()
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            _open.add(self._file)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._close()
                holder = _holder(self._path)
                raise ParameterError(
                    f"The folder {folder} is locked by another run, {holder}. Wait until that run ends, stop it, or "
                    f"choose another folder (Training(folder=...), --folder).",
                    code="run.folder-locked",
                    path=folder,
                    holder=holder,
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    self._close()
                    raise
                logger.warning("The file system of %s has no file locks, so a second run could write to it.", folder)
            if self._is_there():
                break
            self._close()  # its holder has removed it since
        named = {"host": socket.gethostname(), "process": self._process, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(named).encode()
        self._text = len(text)
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, text.ljust(RESERVE))
        except OSError:
            self.release()
            raise

    def free_reserve(self) -> None:
        """Free the reserved bytes."""
        os.ftruncate(self._file, self._text)

    def release(self) -> None:
        """Unlock the folder."""
        if self._process == os.getpid():
            if self._is_there():  # otherwise ours was removed, and this is the lock of another run
                self._path.unlink(missing_ok=True)
            self._close()

    def _is_there(self) -> bool:
        """Whether the locked file is still the one at the path."""
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        _open.discard(self._file)
        os.close(self._file)


def _holder(path: Path) -> str:
    """The holder of the lock, as its file names it."""
    try:
        named = parse_json(path.read_bytes())
        return f"the process {named['process']} on {named['host']}, since {named['since']}"
    except (OSError, ValueError, LookupError, TypeError):  # it has just started, or just ended
        return "a process that has just started or ended"


def _close_inherited() -> None:
    """Close the locks in a forked process, which would otherwise outlive its parent's."""
    for file in _open:
        os.close(file)
    _open.clear()


os.register_at_fork(after_in_child=_close_inherited)
