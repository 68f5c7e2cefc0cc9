"""The workload of both sides: settings, a reward, and a gate by which the driver releases one step at a time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

GROUP = 8
LEARNING_RATE = 1e-5
CLIP = 0.2


@dataclass(frozen=True)
class Work:
    """A step of GRPO.

    Args:
        prompts: prompts per step, with `GROUP` answers each.
        tokens: length of an answer; at most, if `natural`.
        natural: the model ends answers; otherwise all have the same length.
    """

    prompts: int
    tokens: int
    natural: bool


WORKS = {
    "16 x 8 x exactly 32": Work(16, 32, natural=False),
    "32 x 8 x exactly 64": Work(32, 64, natural=False),
    "8 x 8, natural lengths up to 256": Work(8, 256, natural=True),
}


def reward(text: str) -> float:
    """A reward that differs between answers."""
    return sum(character in "0123456789" for character in text) / (1 + len(text))


class Gate:
    """Waits for the driver before each step, and reports the step's times afterward."""

    def __init__(self) -> None:
        self.generating = 0.0

    def wait(self) -> None:
        """Wait for the driver."""
        if sys.stdin.readline().strip() != "go":
            raise SystemExit
        self._started, self._cpu, self.generating = time.perf_counter(), time.process_time(), 0.0

    def done(self, tokens: float) -> None:
        """Report a step: its times, with `generating` for the answers, and the lengths of these."""
        took = {
            "seconds": time.perf_counter() - self._started,
            "cpu": time.process_time() - self._cpu,
            "generating": self.generating,
            "tokens": tokens,
        }
        print("step " + json.dumps(took), flush=True)
