"""A run with trackers that kills itself: ``python -m tests.report.killed MODEL DATA FOLDER STEP TRACKER...``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl import PromptData, Validation
from flowrl.report.names import reporter
from tests.support.jobs import job_of
from tests.support.runs import Recorder, train

STEPS = 6


class Killer(Recorder):
    """Kills the process in the step after `step`, when each tracker has got the reports of that step."""

    def __init__(self, step: int, trackers: Sequence[Any]) -> None:
        super().__init__()
        self.at, self.arrived = step, []
        for tracker in trackers:
            self.arrived.append(event := threading.Event())
            tracker.rows = self.watched(tracker.rows, event)

    def watched(self, rows: Any, event: threading.Event) -> Any:
        def call(step: int, table: Any) -> None:
            rows(step, table)
            if step == self.at:
                event.set()

        return call

    def node(self, name: str) -> None:
        if name == "update_actor" and self.count("step") == self.at:
            assert all(event.wait(300) for event in self.arrived)
            os.kill(os.getpid(), signal.SIGKILL)


def settings(data: str) -> dict[str, Any]:
    """Checkpoints after steps 2, 4 and 6, validations after steps 0, 3 and 6."""
    validation = Validation(PromptData(data), every=3)
    return {"steps": STEPS, "checkpoint_every": 2, "validation": validation, "resume": "or-start"}


def main(model: str, data: str, folder: str, step: str, *names: str) -> None:
    trackers = [reporter(name, "--report") for name in names]
    reporters = [*trackers, Killer(int(step), trackers)]
    train(job_of("grpo", model), data, Path(folder), reporters, **settings(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
