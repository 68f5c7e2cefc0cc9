"""Engines of one process that take turns on one device, as `RayRunner` lets those of colocated processes."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from flowrl.run.engine.steps import Steps


class Turn(NamedTuple):
    """An engine that went to sleep or woke up: seconds, and by how much the device's memory in use grew, in bytes."""

    role: str
    what: str
    seconds: float
    grown: int


class Turns:
    """Before a node runs, puts to sleep the engines that it does not use and wakes those that it does.

    Pass it as the executor's `on_node`. Engines that share weights must not be here: they would sleep together.

    Args:
        executor: whose engines take turns; they fall asleep now.
        device: where the engines compute.
    """

    def __init__(self, executor: Steps, device: str) -> None:
        self.executor, self.device = executor, device
        self.engines = executor.runner.engines
        self.log: list[Turn] = []
        for role in self.engines:
            self._take(role, "sleep")

    def __call__(self, node: str) -> None:
        """Make room for `node`; one without a role changes nothing."""
        self.wake(*self.executor.plan.graph[node].roles)

    def wake(self, *roles: str) -> None:
        """Have just these engines awake; without any, leave all as they are."""
        if roles:
            for role in self.engines:
                if role not in roles:
                    self._take(role, "sleep")
            for role in roles:
                self._take(role, "wake")

    def _take(self, role: str, what: str) -> None:
        engine = self.engines[role]
        if engine.residence.asleep == (what == "sleep"):
            return
        before, begun = allocated(self.device), finished(self.device)
        getattr(engine, what)()
        self.log.append(Turn(role, what, finished(self.device) - begun, allocated(self.device) - before))


def finished(device: str) -> float:
    """The time by `time.perf_counter`, once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated(device: str) -> int:
    """Bytes that tensors hold on a CUDA device; 0 for a CPU, which nobody has to leave."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0
