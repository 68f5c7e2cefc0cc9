"""Small runs and steps for tests, readers of a run folder, and a reporter that records its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl import PromptData, Training
from flowrl.core.graphs.plan import Plan
from flowrl.graph import Graph
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Summary
from flowrl.run.training.loop import Run

TIMES = ("time", "timing/", "throughput/", "total/seconds")


def train(job: Any, data: str, folder: Path, reporters: Any = (), **settings: Any) -> Run:
    """Train `job` on the prompts in the file `data`; by default 3 steps of 4 prompts, without saving the model."""
    settings = {"steps": 3, "prompts": 4, "save_model": False} | settings
    return Training(job, PromptData(data), folder=str(folder), **settings).run(reporters)


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, which must be JSON in the strict sense."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def described(folder: Path) -> dict[str, Any]:
    """The `run.json` of a run folder."""
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def without_times(records: list[Any]) -> list[dict[str, Any]]:
    """Metrics without times and throughput."""
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in records]


def walk(graph: Graph, **engines: Any) -> Steps:
    """The steps of a graph in this process, at seed 0."""
    return local_steps(Plan(graph), engines, 0)


class Recorder:
    """A reporter that records its calls, and raises at `fail_at`."""

    in_loop = True

    def __init__(self, fail_at: str = "") -> None:
        self.calls: list[Any] = []
        self.fail_at = fail_at

    def _record(self, event: str, *more: Any) -> None:
        self.calls.append((event, *more))
        if event == self.fail_at:
            raise RuntimeError(f"the reporter fails at {event}")

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self._record("start", name, steps, folder, done)

    def node(self, name: str) -> None:
        self._record("node", name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record("step", step)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record("validation", step)

    def end(self, summary: Summary | None) -> None:
        self._record("end", summary)

    def count(self, event: str) -> int:
        return sum(call[0] == event for call in self.calls)


def fails_at(call: int, error: BaseException) -> Any:
    """A reward function that raises `error` after `call` calls."""
    calls = []

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        calls.append(None)
        if len(calls) > call:
            raise error
        return 0.5

    return reward
