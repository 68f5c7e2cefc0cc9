"""Termination signals: within `ended_in_order` they unwind the program, as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """A signal ends the program; the exit code is 128 plus the signal's number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._number = number

    def __str__(self) -> str:
        return signal.Signals(self._number).name


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise `Ended` in the block on SIGTERM and SIGHUP, so that a run can record its end. A second signal is ignored
    meanwhile; SIGKILL still ends the process at once.

    Signals that the program handles or ignores are left unchanged, as are all outside of the main thread.
    """

    def end(number: int, frame: Any) -> None:
        for one in mine:
            signal.signal(one, signal.SIG_IGN)
        raise Ended(number)

    main = threading.current_thread() is threading.main_thread()
    mine = [one for one in SIGNALS if main and signal.getsignal(one) is signal.SIG_DFL]
    for one in mine:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in mine:
            if signal.getsignal(one) in (end, signal.SIG_IGN):  # unless a library has since installed its own handler
                signal.signal(one, signal.SIG_DFL)
