"""Relay flowrl's warnings from worker processes to the driver's log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Warned(NamedTuple):
    """A log record: the logger's name, the level and the text."""

    logger: str
    level: int
    text: str


@contextmanager
def collect_warnings() -> Iterator[list[Warned]]:
    """Collect warnings and errors of flowrl's loggers in the block and its thread; others may run other nodes."""
    collected: list[Warned] = []
    thread = threading.get_ident()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                collected.append(Warned(record.name, record.levelno, record.getMessage()))

    handler, logger = Handler(logging.WARNING), logging.getLogger("flowrl")
    logger.addHandler(handler)
    try:
        yield collected
    finally:
        logger.removeHandler(handler)


def relay_warnings(collected: Iterable[Warned]) -> None:
    """Log the warnings here; identical ones of several ranks are logged once."""
    for logger, level, text in dict.fromkeys(collected):
        logging.getLogger(logger).log(level, "%s", text)
