"""The work of both sides: settings, a reward, and a gate through which the driver lets one step at a time."""

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
        prompts: a step, each answered `GROUP` times.
        tokens: of an answer; its most, where `natural`.
        natural: answers end where the model ends them, and else are of one length.
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
    """Something that differs between answers."""
    return sum(character in "0123456789" for character in text) / (1 + len(text))


class Gate:
    """Waits for the driver before each step, and tells it afterwards what the step took."""

    def __init__(self) -> None:
        self.generating = 0.0

    def wait(self) -> None:
        """Until the driver says go on."""
        if sys.stdin.readline().strip() != "go":
            raise SystemExit
        self._started, self._cpu, self.generating = time.perf_counter(), time.process_time(), 0.0

    def done(self, tokens: float) -> None:
        """A step is: what it took, of which `generating` was for the answers; and how long these were."""
        took = {
            "seconds": time.perf_counter() - self._started,
            "cpu": time.process_time() - self._cpu,
            "generating": self.generating,
            "tokens": tokens,
        }
        print("step " + json.dumps(took), flush=True)
