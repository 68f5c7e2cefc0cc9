"""`Running`: an instance that is running on hosts."""

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
    """A running instance.

    Args:
        hosts: by the references of their results; None is the general host. Those of a sync include the trainer's while
            it sends weights.
        since: its launch, by `time.monotonic`.
    """

    task: Task
    hosts: dict[Any, ProcessSpec | None]
    rows: dict[Any, Array | None]
    since: float
    delivery: Delivery | None
    reports: dict[Any, Report | Sent] = field(default_factory=dict)

    @property
    def all(self) -> list[Report]:
        """The reports in order of rank, once the instance is complete."""
        return [report for ref in self.hosts if isinstance(report := self.reports[ref], Report)]

    @property
    def counted(self) -> list[Report]:
        """One report of each data rank, in order of rank: those of the other processes repeat them."""
        counted = (self.reports[ref] for ref, host in self.hosts.items() if reports(host))
        return [report for report in counted if isinstance(report, Report)]

    @property
    def swaps(self) -> bool:
        """Whether it updates weights while requests are in flight."""
        return swaps(self.task)


def reports(host: ProcessSpec | None) -> bool:
    """Whether the outputs and metrics of a host count."""
    return host is None or host.position.reports


def swaps(task: Task) -> bool:
    """Whether an instance updates weights while requests are in flight."""
    return Effect.SPANS in task.node.effects
