"""A step of GRPO with TRL and with flowrl: the same model, prompts, rewards, lengths and optimizer step, on one thread.

``make race`` sets up TRL in a separate environment and calls this. Each side is a process, and they alternate step by
step, so that other load on the machine affects both; ratios are medians over rounds. TRL's ratio is to the log-probs of
the step's own forward pass. ``flowrl grpo`` recomputes them first, and compares them with the engine's; ``flowrl, ratio
to the rollout`` uses those of the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from generate import write_model  # noqa: E402
from harness import table  # noqa: E402
from work import WORKS  # noqa: E402

from flowrl.demo.task import write_dataset  # noqa: E402

WARM, ROUNDS = 2, 8

Side = subprocess.Popen[str]
Took = dict[str, float]


def begin(python: str, script: str, *arguments: str) -> Side:
    """A process that waits before its first step."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(HERE / script), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def step(side: Side) -> Took:
    """Let it take a step; return the times."""
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write("go\n")
    side.stdin.flush()
    for line in side.stdout:
        if line.startswith("step "):
            found: Took = json.loads(line.removeprefix("step "))
            return found
    raise SystemExit(f"{side.args} exited during its step; see its output above.")


def race(name: str, model: str, prompts: str, peer: str) -> list[list[str]]:
    """Rows of the table for one workload."""
    with ExitStack() as ends:
        sides = {"TRL": begin(peer, "trl_side.py", model, prompts, name)}
        for which, graph in (("flowrl grpo", "grpo"), ("flowrl, ratio to the rollout", "rollout")):
            sides[which] = begin(sys.executable, "flowrl_side.py", model, prompts, name, graph)
        for side in sides.values():
            ends.callback(end, side)
        took = [{who: step(side) for who, side in sides.items()} for _ in range(WARM + ROUNDS)][WARM:]
    return [row(name, who, [turn[who] for turn in took], [turn["TRL"] for turn in took]) for who in sides]


def end(side: Side) -> None:
    """Stop."""
    assert side.stdin is not None
    side.stdin.close()
    side.wait()


def row(name: str, who: str, took: Sequence[Took], peer: Sequence[Took]) -> list[str]:
    """Medians of one side, and the ratio to the peer by wall-clock time and by CPU time."""
    of: Any = {key: median(one[key] for one in took) for key in took[0]}
    ratios = [median(a[key] / b[key] for a, b in zip(took, peer, strict=True)) for key in ("seconds", "cpu")]
    rest = median(one["seconds"] - one["generating"] for one in took)
    numbers = (f"{of['seconds']:.3f}", f"{of['generating']:.3f}", f"{rest:.3f}", f"{of['tokens']:.1f}")
    return [f"{name}: {who}", *numbers, *(f"{ratio:.2f}" for ratio in ratios)]


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(WORKS)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_dataset(base / "data")
        model = write_model(base / "model", layers=4, width=128, positions=512)
        rows = [line for name in chosen for line in race(name, model, str(base / "data/train.jsonl"), sys.argv[1])]
    head = ["", "step, s", "answers, s", "rest, s", "tokens", "x TRL", "by CPU"]
    table(f"one thread, medians of {ROUNDS} turns", head, rows)
