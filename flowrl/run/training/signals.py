"""Signals that end a program: within `ended_in_order` they unwind it, as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """A signal ends the program; its exit code is the one of shells, 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._number = number

    def __str__(self) -> str:
        return signal.Signals(self._number).name


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM (of ``kill`` and of schedulers) and SIGHUP (of a terminal that is closed) raise `Ended` in the block, so
    that what is under way can say that it was ended. A second one is ignored meanwhile; SIGKILL still is at once.

    A signal that the program handles itself, or ignores, is left alone; so are all outside of the main thread.
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
            if signal.getsignal(one) in (end, signal.SIG_IGN):  # and not of a library that was imported meanwhile
                signal.signal(one, signal.SIG_DFL)
