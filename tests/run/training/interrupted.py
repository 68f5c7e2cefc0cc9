"""Runs that are interrupted, and a comparison of a resumed run with an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import PromptData, Training, Validation
from flowrl.backends import AdamW
from flowrl.operators import KLShape
from flowrl.operators.kl import AdaptiveKL
from flowrl.run.training.job import Job
from flowrl.run.training.loop import Run
from flowrl.schedules import Cosine
from tests.support.jobs import job_of
from tests.support.rewards import digits
from tests.support.runs import TIMES

STEPS = 6


def settings(data: str, **changed: Any) -> dict[str, Any]:
    """12 prompts, 5 per step: one epoch ends in step 3, the next in step 5."""
    every: dict[str, Any] = {"steps": STEPS, "prompts": 5, "checkpoint_every": 2, "save_model": False, "seed": 3}
    return {"validation": Validation(PromptData(data), every=3), **every, **changed}


def jobs(name: str, folder: str, reward: Any = digits) -> Job:
    """PPO with an adaptive KL coefficient, or GRPO; AdamW under a schedule that changes its rate at every step."""
    trainer = {"schedule": Cosine(1.0, 0.0, steps=2 * STEPS, warmup=3)}
    adamw = AdamW(lr=2e-3)
    if name == "grpo":
        return job_of("grpo", folder, reward, optimizer=adamw, trainer=trainer, n=2, mini_batch=5)
    job = job_of("ppo", folder, reward, optimizer=adamw, trainer=trainer)
    return job.edit(replace={"kl_shape": KLShape(AdaptiveKL(target=0.01, horizon=20, coef=0.1))})


def run(job: Job, data: str, folder: Path, reporters: Any = (), **changed: Any) -> Run:
    return Training(job, PromptData(data), folder=str(folder), **settings(data, **changed)).run(reporters)


def without_times(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without times."""
    lines = file.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]


def status(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["status"])


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_same(resumed: Run, uninterrupted: Run) -> None:
    """Bit-equal metrics, predictions and weights."""
    assert without_times(resumed.folder / "metrics.jsonl") == without_times(uninterrupted.folder / "metrics.jsonl")
    first, second = ((r.folder / "predictions.jsonl").read_text() for r in (resumed, uninterrupted))
    assert first == second
    assert len(resumed.metrics) == len(uninterrupted.metrics) == STEPS
    assert (
        [line["step"] for line in resumed.validations]
        == [line["step"] for line in uninterrupted.validations]
        == [0, 3, 6]
    )
    assert status(resumed.folder) == "finished"
    for role in ("actor", "critic"):
        if role in uninterrupted.engines:
            # weights, both moments of AdamW, and its number of steps
            a, b = (flat(r.engines[role].state_dict()) for r in (resumed, uninterrupted))
            assert a.keys() == b.keys()
            assert [name for name in a if not equal(a[name], b[name])] == []


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, Mapping):  # without the learning rate, which each step computes from its number
        items = [(key, item) for key, item in state.items() if key != "param_groups"]
        return {k: v for key, item in items for k, v in flat(item, f"{prefix}.{key}").items()}
    return {prefix: state}


def equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


class Stop(Exception):
    """Interrupts a run."""


class Stopper:
    """A reporter that raises when `node` starts in the step after `step`."""

    in_loop = True

    def __init__(self, step: int, node: str) -> None:
        self.done, self.at, self.name = 0, step, node

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self.done = done

    def node(self, name: str) -> None:
        if (self.done, name) == (self.at, self.name):
            raise Stop

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def end(self, summary: Any) -> None: ...


def cut_off(job: Job, data: str, folder: Path, step: int, node: str = "update_actor", **changed: Any) -> None:
    with pytest.raises(Stop):
        run(job, data, folder, [Stopper(step, node)], **changed)
    assert status(folder) == "failed"


def contents(folder: Path) -> dict[Path, bytes]:
    """The content of every file in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
