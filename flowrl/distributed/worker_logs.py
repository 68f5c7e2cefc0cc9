"""What flowrl warns of in a process whose log nobody reads, on its way to the one that the user sees."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Said(NamedTuple):
    """A warning, or worse: the logger's name, the level and the text."""

    logger: str
    level: int
    text: str


@contextmanager
def heard() -> Iterator[list[Said]]:
    """What flowrl's loggers warn of inside the block, in its thread (another may run another node), as it comes."""
    said: list[Said] = []
    thread = threading.get_ident()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                said.append(Said(record.name, record.levelno, record.getMessage()))

    ear, logger = Ear(logging.WARNING), logging.getLogger("flowrl")
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)


def say(said: Iterable[Said]) -> None:
    """Warn of it here; what several ranks said in the same words once."""
    for logger, level, text in dict.fromkeys(said):
        logging.getLogger(logger).log(level, "%s", text)
