"""Time to open a job of four roles on Ray: the first of a process, the next one, and a rebuilt role.

    python benchmarks/ray_start.py [RUNS]                    # this tree
    python benchmarks/ray_start.py [RUNS] OTHER_TREE         # and another one, alternating

Seconds of wall-clock time, counted from the start of Python for the first job. It is PPO with a tiny model, whose roles
share a slot. "import" is the time to import Ray, torch and transformers in a separate process.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness import table

HERE = Path(__file__).resolve().parents[1]
MEASURES = ["import", "first job, open", "first job, one step", "second job, open", "role rebuilt"]


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """The parity of the response's length."""
    return float(len(solution_str) % 2)


def jobs(folder: str, data: str) -> None:
    """Open two jobs, kill the reference of the second, and print the seconds of each as JSON."""
    import psutil

    from flowrl import Colocate, PromptData
    from flowrl.backends import TorchCritic, TorchRollout, TorchScorer, TorchTrainer
    from flowrl.graphs import ppo

    graph = ppo(reward, max_new_tokens=16)
    engines = dict(actor=TorchTrainer(folder), critic=TorchCritic(folder), ref=TorchScorer(folder))
    job = graph.bind(**engines, rollout=TorchRollout(folder), place=Colocate(gpus=1))
    begun, seconds = psutil.Process().create_time(), {}
    with job.open(seed=0) as steps:
        seconds["first job, open"] = time.time() - begun
        batch = PromptData(data).load(steps.tokenizer(), seed=0).next(8)
        steps.sync()
        steps.step(batch, 0)
        seconds["first job, one step"] = time.time() - begun
    begun = time.time()
    with replace(job, place=Colocate(gpus=1, restart="role")).open(seed=0) as steps:
        seconds["second job, open"] = time.time() - begun
        steps.sync()
        steps.step(batch, 0)
        begun = time.time()
        steps.step(batch, 1)
        usual = time.time() - begun
        hosts = steps.runner.hosts  # type: ignore[attr-defined]
        (plan,) = hosts.ranks("ref")
        import ray

        pid = ray.get(hosts.actors[plan].pid.remote())
        threading.Timer(0.0, lambda: os.kill(pid, signal.SIGKILL)).start()
        begun = time.time()
        steps.step(batch, 2)
        seconds["role rebuilt"] = time.time() - begun - usual
    print(json.dumps(seconds), flush=True)


def write_inputs(folder: Path) -> tuple[str, str]:
    """A tiny model and some prompts."""
    from transformers.utils import logging

    from flowrl.demo.model import make_model, make_tokenizer

    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = folder / "model"
    make_model(tokenizer, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    data = folder / "prompts.jsonl"
    with data.open("w") as lines:
        for i in range(8):
            row = {"prompt": [{"role": "user", "content": f"{i}+1="}], "data_source": "sums"}
            lines.write(json.dumps(row | {"reward_model": {"ground_truth": str(i + 1)}}) + "\n")
    return str(model), str(data)


def measured(tree: Path, model: str, data: str) -> Mapping[str, float]:
    """One process of each kind in a tree."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{HERE / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every process compiles flowrl
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import ray, torch, transformers"], env=environment, check=True)
    importing = time.perf_counter() - begun
    command = [sys.executable, __file__, "--jobs", model, data]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return {"import": importing, **json.loads(done.stdout.splitlines()[-1])}


def main(runs: int, trees: list[Path]) -> None:
    """Measure the trees alternately; print median, minimum and maximum of each."""
    found: dict[Path, list[Mapping[str, float]]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder))
        for _ in range(runs):
            for tree in trees:
                found[tree].append(measured(tree, *inputs))
    rows = []
    for name in MEASURES:
        cells = []
        for tree in trees:
            values = [run[name] for run in found[tree]]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        rows.append([name, *cells])
    table(
        f"Seconds, medians of {runs} runs", ["", *("this tree" if tree == HERE else str(tree) for tree in trees)], rows
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--jobs"]:
        jobs(*sys.argv[2:])
    else:
        main(int((sys.argv[1:] or ["3"])[0]), [HERE, *map(Path, sys.argv[2:])])
