"""`TrainedWeights`: sync, checkpoint and restore the trained roles of a job."""

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
"""How often `TrainedWeights.protect` tries."""


class TrainedWeights:
    """The weights of a job's trained roles.

    Args:
        snapshot_folder: a local folder for a snapshot after each step, which `protect` restores; None for no snapshots.
    """

    def __init__(self, plan: Plan, runner: Runner, seed: int, snapshot_folder: Path | None = None) -> None:
        self._plan, self._runner, self._seed, self.snapshot_folder = plan, runner, seed, snapshot_folder
        self._snapshot: Path | None = None
        self._numbers = itertools.count()

    def sync(self, syncs: Sequence[Node] | None = None) -> None:
        """Sync weights to the engines that generate, by all sync nodes or by these."""
        for node in self._plan.syncs if syncs is None else syncs:
            version = Updated(self._runner.version(node.reads[0]))
            self._runner.launch(Task(node.in_step(0), None, self._seed, dict.fromkeys(node.inputs, version)))
            self._runner.wait()

    def save(self, folder: Path) -> None:
        """Checkpoint each trained role into its own folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for role in self._plan.graph.trained:
            shutil.rmtree(folder / role, ignore_errors=True)  # partly written by a role that died
            self._runner.save(role, folder / role)

    def load(self, folder: Path) -> None:
        """Restore each trained role from what `save` wrote, and sync."""
        for role in self._plan.graph.trained:
            self._runner.load(role, folder / role)
        self.sync()

    def snapshot(self) -> None:
        """If there is a `snapshot_folder`, replace the snapshot in it."""
        if self.snapshot_folder is None:
            return
        new, old = self.snapshot_folder / str(next(self._numbers)), self._snapshot
        self.save(new)
        self._snapshot = new
        if old is not None:
            shutil.rmtree(old)

    def protect(self, act: Callable[[], T], restart: Callable[[], None] = lambda: None) -> T:
        """Call `act`. If a process is lost in it, recover, load the snapshot, call `restart`, and retry.
        The `NodeError` is raised if the runner cannot recover, there is no snapshot, or after `ATTEMPTS` attempts."""
        lost: NodeError | None = None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if lost is not None and self._snapshot is not None:
                    self._runner.recover(lost)
                    self.load(self._snapshot)
                    restart()
                return act()
            except NodeError as error:
                if not self._runner.can_recover(error) or self._snapshot is None or attempt == ATTEMPTS:
                    raise
                logger.warning("%s\nRebuilding and syncing the lost processes, then retrying.", error)
                lost = error
        raise AssertionError("unreachable")
