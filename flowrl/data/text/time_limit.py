"""`time_limit`: end Python code that runs for too long, in any thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Expired(Exception):
    """The time of a block is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after this time; a call into C ends first.

    Signals would do so in the main thread only, and episodes render in others.
    """
    thread, lock, running = ctypes.c_ulong(threading.get_ident()), threading.Lock(), True

    def expire() -> None:
        with lock:
            if running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            with lock:
                running = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that was set as the block ended
            timer.join()  # it has been woken, and no thread remains
    except _Expired:
        raise TimeoutError(f"it ran for more than {seconds:g} s") from None
