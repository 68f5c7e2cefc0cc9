"""The seconds of the stages of a step against what `flowrl plan --hardware --lengths mean=` predicts."""

from __future__ import annotations

import statistics
from typing import Any

from flowrl import PromptData
from flowrl.backends import AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.core.graphs.plan import Plan
from flowrl.demo.task import write_dataset
from flowrl.graphs import grpo
from flowrl.run.engine.local import local_steps
from flowrl.run.prediction.hardware import Hardware
from flowrl.run.prediction.memory import RowLimits
from flowrl.run.prediction.stages import times_of
from flowrl.run.training.job import Job

from .machine import hardware
from .models import QWEN3_06B, TINY, qwen3
from .parts import Target
from .report import Report

STEPS = 2
PROMPT = 16  # tokens, at most, with the template
OWN_CPU = Hardware(16, device="cpu", name="an unknown CPU", flops=0.1, bandwidth=20)
"""Stated so that the part runs; nothing follows from it."""


def compare(target: Target, report: Report) -> None:
    """Compare each stage of GRPO whose responses all have the same length; the first step does not count."""
    device = hardware() if target.on_gpu else OWN_CPU
    if device is None:
        report.skip("predicted seconds", "`flowrl.run.prediction.hardware` has no speeds of this GPU")
        return
    prompts, n, new = target.pick((32, 8, 496), (2, 2, 8))
    job = _job(target, n, new)
    times = times_of(job, device, RowLimits(PROMPT, new), PROMPT + new, prompts)
    measured = _measured(target, job, prompts)
    rows = []
    for one in times.stages:
        seconds = measured[one.node]
        rows.append([one.node, f"{seconds:.3f}", f"{one.seconds:.3f}", f"{one.seconds / seconds:.2f}", one.source])
    report.table(
        f"Seconds of {prompts * n} rows of {PROMPT + new} tokens on {device.name}; TorchRollout generates",
        ["", "measured", "predicted", "predicted / measured", "by"],
        rows,
    )
    missing = [node for node, why in times.unknown.items() if why != "its own code"]
    report.check("every stage with a model is predicted", not missing, f"{len(rows)}; not: {', '.join(missing)}")


def _job(target: Target, n: int, new: int) -> Job[Any]:
    model = qwen3(target, target.pick(QWEN3_06B, TINY))
    common: dict[str, Any] = {"device": target.device, "dtype": "bfloat16"}
    graph = grpo("flowrl.demo.verifier:compute_score", n=n, max_new_tokens=new)
    return graph.edit(set={"generate.ignore_eos": True}).bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), gradient_checkpointing=True, **common),
        ref=TorchScorer(model, **common),
        rollout=TorchRollout(model, **common),
    )


def _measured(target: Target, job: Job[Any], prompts: int) -> dict[str, float]:
    """The median seconds of each node."""
    executor = local_steps(Plan(job.runs), job.build(), 0)
    stream = PromptData(str(write_dataset(target.folder / "data")[0])).load(executor.tokenizer(), seed=0)
    executor.sync()
    each = [executor.step(stream.next(prompts), step).seconds for step in range(STEPS + 1)][1:]
    return {name: statistics.median(seconds[name] for seconds in each) for name in each[0]}
