"""`RayExecutor`: walks a plan over processes, and goes on where one dies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from flowrl.core.graph import Graph
from flowrl.core.plan import Plan
from flowrl.data.dataproto import DataProto
from flowrl.data.tokenizer import ChatTokenizer
from flowrl.distributed.cluster import connected
from flowrl.distributed.faults import HostDiedError, chain, named
from flowrl.distributed.hosts import Hosts, refuse_unplaceable
from flowrl.distributed.ray_place import RayPlace
from flowrl.distributed.walk import Traffic, Walk, refuse_unequal
from flowrl.errors import DataError, EngineError, NodeError
from flowrl.records import Updated
from flowrl.run.local import StepResult
from flowrl.run.place import lay_out
from flowrl.run.timeline import Trace

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ATTEMPTS = 3
"""A step that loses a process so many times is given up."""


@contextlib.contextmanager
def open_ray(graph: Graph, place: RayPlace, seed: int) -> Iterator[RayExecutor]:
    """A `RayExecutor` with all engines loaded; its processes end with the block, whatever happens in it.

    Raises:
        BindError, GraphError: the graph does not fit the place, the cluster is too small, or none answers; before
            any model loads.
    """
    plan, plans = Plan(graph), lay_out(graph, place)
    refuse_unplaceable(plan, plans)
    with connected(place), tempfile.TemporaryDirectory(prefix="flowrl-") as folder:
        hosts = Hosts(plans, graph.bindings, place, seed)
        try:
            hosts.start(plans)
            yield RayExecutor(plan, hosts, seed, Weights(plan, hosts, Path(folder)))
        finally:
            hosts.close()


class Weights:
    """The state of the trained roles of a job: moved to the engines that generate, written, and gone back to.

    Args:
        plan: of the graph that trains.
        hosts: where the engines are.
        folder: where the state after the last step is kept, for a place with ``restart="role"``.
    """

    def __init__(self, plan: Plan, hosts: Hosts, folder: Path) -> None:
        self.plan, self.hosts, self._folder = plan, hosts, folder
        self._kept: Path | None = None
        self._numbers = itertools.count()

    def sync(self) -> None:
        """Carry the trainers' weights to the engines that generate."""
        for node in self.plan.syncs:
            trainer = node.reads[0]
            version = self.hosts.ask(self.hosts.ranks(trainer), f"{node.name} between steps", "version", trainer)[0]
            walk = Walk(self.plan, self.hosts, None, 0, {})
            refuse_unequal(walk.settle(walk.launch(node, dict.fromkeys(node.inputs, Updated(version)))), node)

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own."""
        for role in self.plan.graph.trained:
            self.hosts.ask_role(role, f"saving {role}", "save_checkpoint", role, str(folder.absolute() / role))

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync."""
        for role in self.plan.graph.trained:
            self.hosts.ask_role(role, f"loading {role}", "load_checkpoint", role, str(folder.absolute() / role))
        self.sync()

    def refuse_elsewhere(self, folder: Path) -> None:
        """Refuse a folder that the trained roles' processes would not share with the driver.

        Raises:
            DataError: one is on a machine that has no such folder, or another of that name.
        """
        for role in self.plan.graph.trained:
            ranks = self.hosts.ranks(role)
            with tempfile.NamedTemporaryFile(dir=folder.absolute()) as probe:
                seen = self.hosts.ask(ranks, f"saving {role}", "sees", probe.name)
            if not all(seen):
                raise DataError(
                    f"{named(ranks[seen.index(False)])} is on a machine that does not share {folder.absolute()} with "
                    f"this one, so a checkpoint there would lack its part; give the run a folder that all machines "
                    f"of the cluster share by the same path: Training(folder=...)."
                )

    def keep(self) -> None:
        """Where roles are to be restarted: this is what to go back to."""
        if self.hosts.place.restart == "never":
            return
        fresh, old = self._folder / str(next(self._numbers)), self._kept
        self.save(fresh)
        self._kept = fresh
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)  # a graph that trains nothing has written none

    def protect(self, act: Callable[[], T]) -> T:
        """Do something; where a process dies in it, rebuild the role, take all roles back to what was kept, and do
        it again. An engine that ended itself (`EngineError`) is started anew by the sync that comes with that.

        Raises:
            NodeError: the place says ``restart="never"``, or it happened too often.
        """
        lost: NodeError | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if lost is not None and self._kept is not None:
                    if isinstance(lost, HostDiedError):
                        self.hosts.rebuild(lost.host)
                    self.load(self._kept)
                return act()
            except NodeError as error:
                mends = isinstance(error, HostDiedError) or any(isinstance(one, EngineError) for one in chain(error))
                if not mends or self._kept is None or attempt == _ATTEMPTS:
                    raise
                logger.warning("%s\nWhat was lost is rebuilt and synced, and that is done again.", error)
                lost = error
        raise AssertionError("unreachable")


class RayExecutor:
    """Runs steps of a plan on the hosts of a job; see `Walk`.

    Where the place says ``restart="role"``, trained weights are kept as they were after the last step; a role that
    dies is rebuilt, all trained roles go back to these, and the step is repeated with the same keys. So no row is
    lost, and none is trained on twice.

    Args:
        plan: what to run.
        hosts: the processes of the job.
        seed: root of the keys.
        weights: of the job, which forks of an executor share.
    """

    def __init__(self, plan: Plan, hosts: Hosts, seed: int, weights: Weights) -> None:
        self.plan, self.hosts, self.seed = plan, hosts, seed
        self.state: dict[str, Any] = {}
        self.traffic = Traffic()
        self.trace = Trace()
        self._weights = weights

    def fork(self, plan: Plan, seed: int) -> RayExecutor:
        """Another plan on the same hosts, with keys and state cells of its own."""
        return RayExecutor(plan, self.hosts, seed, self._weights)

    def tokenizer(self) -> ChatTokenizer:
        """The tokeniser of the engine that generates."""
        role = self.plan.graph.generators[0]
        return ChatTokenizer(self.hosts.ask(self.hosts.ranks(role), "tokenizer", "tokenizer_folder", role)[0])

    def sync(self) -> None:
        """Carry the trainers' weights to the engines that generate: before step 0, and after a restore.

        Raises:
            NodeError: they did not arrive; with a `SyncError` as its cause.
        """
        self._weights.sync()
        self._weights.keep()

    def step(
        self,
        batch: DataProto,
        step: int,
        *,
        keep: tuple[str, ...] = (),
        on_node: Callable[[str], None] = lambda name: None,
    ) -> StepResult:
        """Run every node once; see `LocalExecutor.step`. A step that is repeated calls `on_node` again.

        Raises:
            NodeError: a node raised, a rank died, or nothing was heard of it within the place's deadline; names
                node, role, rank and step.
        """

        def walk() -> StepResult:
            self.hosts.trace = self.trace
            if self.hosts.forgetful:
                self._weights.sync()
            one = Walk(self.plan, self.hosts, step, self.seed, self.state)
            result = one.run(batch, keep, on_node)
            if self.plan.graph.trained:
                self._weights.keep()
            self.state, self.traffic = one.state, one.traffic
            return result

        return self._weights.protect(walk)

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own.

        Raises:
            DataError: see `Weights.refuse_elsewhere`.
        """

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self._weights.refuse_elsewhere(folder)
            for role in self.plan.graph.trained:  # what a role that died has left half written
                shutil.rmtree(folder / role, ignore_errors=True)
            self._weights.save(folder)

        self._weights.protect(write)

    def load(self, folder: Path) -> None:
        """Take every trained role back to what `save` wrote, and sync."""
        self._weights.load(folder)
        self._weights.keep()

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write the weights of a role's engine as a Hugging Face folder."""
        path = str(Path(folder).absolute())
        self._weights.protect(lambda: self.hosts.ask_role(role, f"writing {role}", "save_pretrained", role, path))
