"""Engines of one process that take turns on one device, as colocated processes do on Ray."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from flowrl.run.engine.steps import Steps


class Turn(NamedTuple):
    """One sleep or wake-up of an engine: seconds, and the change of used device memory in bytes."""

    role: str
    what: str
    seconds: float
    grown: int


class Turns:
    """Before each node, put unused engines to sleep and wake the engines that it uses.

    Pass it as the executor's `on_node`. Engines must not share weights, or they would sleep together.

    Args:
        executor: owner of the engines, which are put to sleep.
        device: device of the engines.
    """

    def __init__(self, executor: Steps, device: str) -> None:
        self.executor, self.device = executor, device
        self.engines = executor.runner.engines
        self.log: list[Turn] = []
        for role in self.engines:
            self._take(role, "sleep")

    def __call__(self, node: str) -> None:
        """Make room for `node`; a node without a role changes nothing."""
        self.wake(*self.executor.plan.graph[node].roles)

    def wake(self, *roles: str) -> None:
        """Wake exactly these engines; if there are none, change nothing."""
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
    """`time.perf_counter` after the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated(device: str) -> int:
    """Bytes of tensors on a CUDA device; 0 for a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0
