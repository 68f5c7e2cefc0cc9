"""`TrainedWeights`: what a job trains, as it is synced, saved, and gone back to when something is lost."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.plan import Plan
from flowrl.errors import NodeError
from flowrl.records import Updated
from flowrl.run.engine.runner import Runner, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""What loses something so many times is given up."""


class TrainedWeights:
    """The weights of a job's trained roles.

    Args:
        plan: of the graph that trains them.
        runner: where the engines are.
        seed: of the run.
        spare: a folder of this machine in which they are kept as they were after the last step, so that `protect` can
            go back to them; None keeps none.
    """

    def __init__(self, plan: Plan, runner: Runner, seed: int, spare: Path | None = None) -> None:
        self._plan, self._runner, self._seed, self.spare = plan, runner, seed, spare
        self._kept: Path | None = None
        self._numbers = itertools.count()

    def sync(self, syncs: Sequence[Node] | None = None) -> None:
        """Carry them to the engines that generate; by these nodes alone, where some are given.

        Raises:
            NodeError: they did not arrive; with a `SyncError` as its cause.
        """
        for node in self._plan.syncs if syncs is None else syncs:
            version = Updated(self._runner.version(node.reads[0]))
            self._runner.launch(Task(node.in_step(0), None, self._seed, dict.fromkeys(node.inputs, version)))
            self._runner.wait()

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        for role in self._plan.graph.trained:
            shutil.rmtree(folder / role, ignore_errors=True)  # what a role that died has left half written
            self._runner.save(role, folder / role)

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync."""
        for role in self._plan.graph.trained:
            self._runner.load(role, folder / role)
        self.sync()

    def snapshot(self) -> None:
        """Where there is a spare folder: this is what to go back to."""
        if self.spare is None:
            return
        fresh, old = self.spare / str(next(self._numbers)), self._kept
        self.save(fresh)
        self._kept = fresh
        if old is not None:
            shutil.rmtree(old)

    def protect(self, act: Callable[[], T], restart: Callable[[], None] = lambda: None) -> T:
        """Do something; where a process is lost in it, mend that, go back to what was kept, `restart`, and do it again.

        Raises:
            NodeError: the runner cannot mend it, nothing was kept, or it happened too often.
        """
        lost: NodeError | None = None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if lost is not None and self._kept is not None:
                    self._runner.recover(lost)
                    self.load(self._kept)
                    restart()
                return act()
            except NodeError as error:
                if not self._runner.can_recover(error) or self._kept is None or attempt == ATTEMPTS:
                    raise
                logger.warning("%s\nWhat was lost is rebuilt and synced, and that is done again.", error)
                lost = error
        raise AssertionError("unreachable")
