"""Termination signals: within `ended_in_order` they unwind the program, as Ctrl-C does, or end a run after its step."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """A signal ends the program; the exit code is 128 plus the signal's number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


class Ending:
    """The signal that ends a run, if one has arrived."""

    def __init__(self) -> None:
        self.received: Ended | None = None
        self._deferred = False

    def receive(self, number: int, frame: Any) -> None:
        """The handler: raise `Ended` on the first signal, except in a block of `deferred`."""
        if self.received is None:
            self.received = Ended(number)
            if not self._deferred:
                raise self.received

    def end_after(self, step: int, folder: Path) -> None:
        """Raise what has arrived, after a step that has a checkpoint."""
        if self.received is not None:
            text = "%s ended the run after step %d, with a checkpoint. To resume: Training(folder=%r, resume=True)."
            logger.warning(text, self.received, step, str(folder))
            raise self.received

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block, a signal only sets `received`. It may reach the run's other processes, too, so an error after
        it counts as its effect."""
        self._deferred = True
        try:
            yield
        except Exception as error:
            if self.received is None:
                raise
            logger.warning("%s ended the run within a step, which failed: %s", self.received, error)
            raise self.received from error
        finally:
            self._deferred = False


@contextmanager
def ended_in_order() -> Iterator[Ending]:
    """Raise `Ended` in the block on SIGTERM and SIGHUP, so that a run can record its end. A second signal is ignored
    meanwhile; SIGKILL still ends the process at once.

    Signals that the program handles or ignores are left unchanged, as are all outside of the main thread.
    """
    ending = Ending()
    main = threading.current_thread() is threading.main_thread()
    mine = [one for one in SIGNALS if main and signal.getsignal(one) is signal.SIG_DFL]
    for one in mine:
        signal.signal(one, ending.receive)
    try:
        yield ending
    finally:
        for one in mine:  # unless a library has since installed its own handler
            if signal.getsignal(one) == ending.receive:
                signal.signal(one, signal.SIG_DFL)
