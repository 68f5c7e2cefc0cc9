"""`Reported`: the file ``reported.json`` of a run folder, which holds what each reporter was given."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import threading
from pathlib import Path

from flowrl.data.files import parse_json, write
from flowrl.errors import ParameterError, StorageError
from flowrl.run.reporting.reporter import Given

logger = logging.getLogger(__name__)

REPORTED = "reported.json"


class Reported:
    """What each reporter of a run was given, by its name.

    Raises:
        ParameterError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / REPORTED
        self._lock = threading.Lock()  # reporters have threads
        self._all = _read(self._path)

    def of(self, name: str) -> Given:
        """What a reporter was given; its run has an id from the first call on."""
        if name not in self._all:
            self.enter(name, Given(secrets.token_hex(4)))
        return self._all[name]

    def enter(self, name: str, given: Given) -> None:
        """Write what a reporter was given."""
        with self._lock:
            self._all[name] = given
            content = {name: dataclasses.asdict(one) for name, one in self._all.items()}
            try:
                write(self._path, json.dumps(content, indent=2).encode() + b"\n")
            except StorageError as error:
                logger.warning("%s If the run resumes, %s may get reports twice.", error, name)

    def clear(self) -> None:
        """Start over, for another run in the folder."""
        self._all.clear()
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Given]:
    if not path.exists():
        return {}
    try:
        return {name: Given(**one) for name, one in parse_json(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ParameterError(
            f"{path} was not written by a run, or is damaged. Restore it, or remove it: the trackers then get the "
            f"whole run again, as new runs.",
            code="run.damaged",
            path=path,
        ) from error
