"""What flowrl warns of in a process whose log nobody reads, carried to the log that the user sees."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Warned(NamedTuple):
    """A warning or an error: the logger's name, the level and the text."""

    logger: str
    level: int
    text: str


@contextmanager
def collect_warnings() -> Iterator[list[Warned]]:
    """Collect what flowrl's loggers warn of inside the block and in its thread (another may run another node)."""
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
    """Log the warnings here; what several ranks say in the same words is logged once."""
    for logger, level, text in dict.fromkeys(collected):
        logging.getLogger(logger).log(level, "%s", text)
