"""`Running`: an instance that runs on hosts now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowrl.core.operators.effects import Effect
from flowrl.distributed.delivery import Delivery
from flowrl.distributed.hosts.host import Report, Sent
from flowrl.distributed.hosts.wire import Array
from flowrl.run.engine.runner import Task
from flowrl.run.placement.place import ProcessSpec


@dataclass
class Running:
    """An instance that runs now.

    Args:
        task: which.
        hosts: where, by the reference of the answer; None is the general host. Those of a sync may be the trainer's
            too, while it sends its weights.
        rows: of each rank; None is all.
        since: when it was launched, by `time.monotonic`.
        delivery: of the weights that it carries.
        reports: the answers so far.
    """

    task: Task
    hosts: dict[Any, ProcessSpec | None]
    rows: dict[Any, Array | None]
    since: float
    delivery: Delivery | None
    reports: dict[Any, Report | Sent] = field(default_factory=dict)

    @property
    def all(self) -> list[Report]:
        """The reports in order of rank; complete only when the instance is."""
        return [report for ref in self.hosts if isinstance(report := self.reports[ref], Report)]

    @property
    def swaps(self) -> bool:
        """Whether it swaps weights under answers that are under way."""
        return swaps(self.task)


def swaps(task: Task) -> bool:
    """Whether an instance swaps weights under answers that are under way."""
    return Effect.SPANS in task.node.effects
