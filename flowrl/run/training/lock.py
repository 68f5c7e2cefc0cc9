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
"""Bytes that are kept back, so that a run whose disk is full can still say so."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_open: set[int] = set()


class FolderLock:
    """Holds a folder until `release`, or until the process ends, however it ends: the kernel lets go of it then.

    Args:
        folder: one that is there.

    Raises:
        ParameterError: another process holds it, or this one; names it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._process = folder / LOCK, os.getpid()
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            _open.add(self._file)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._close()
                raise ParameterError(
                    f"{folder} is being written by a run that has not ended, {_holder(self._path)}; wait for its end, "
                    f"end it, or choose another folder (Training(folder=...), --folder)."
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    self._close()
                    raise
                logger.warning("the file system of %s has no locks, so nothing keeps a second run out of it.", folder)
            if self._is_there():
                break
            self._close()  # whoever held it has removed it in between
        named = {"host": socket.gethostname(), "process": self._process, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(named).encode()
        self._text = len(text)
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, text.ljust(RESERVE))
        except OSError:
            self.release()
            raise

    def give_way(self) -> None:
        """Give back the room that is kept back."""
        os.ftruncate(self._file, self._text)

    def release(self) -> None:
        """Let go of the folder."""
        if self._process == os.getpid():
            if self._is_there():  # and not of another run, since somebody has removed ours
                self._path.unlink(missing_ok=True)
            self._close()

    def _is_there(self) -> bool:
        """Whether the file that is locked is the one that others see."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        _open.discard(self._file)
        os.close(self._file)


def _holder(path: Path) -> str:
    """Who says in the file to hold it."""
    try:
        named = parse_json(path.read_bytes())
        return f"the process {named['process']} on {named['host']}, since {named['since']}"
    except (OSError, ValueError, LookupError, TypeError):  # it has just begun, or just ended
        return "a process that has just begun or ended it"


def _let_go() -> None:
    """A process that was forked off would hold the folder beyond the end of its parent."""
    for file in _open:
        os.close(file)
    _open.clear()


os.register_at_fork(after_in_child=_let_go)
