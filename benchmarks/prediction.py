"""How far a predicted step is from a measured one, on the demo: costs are those of runs with half, or twice, the rows.

The policy hardly learns here: costs know how long answers were, and not how long those of a better policy will be. Runs
take turns, and medians of several are compared; the last column says how far apart the medians of equal runs are.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from harness import table
from transformers.utils import logging

from flowrl import Colocate, Split
from flowrl.backends import Constant, TorchRollout
from flowrl.demo import run as demo
from flowrl.demo.model import build
from flowrl.demo.task import write_dataset
from flowrl.graph import Graph
from flowrl.run.costs import Costs
from flowrl.run.place import Place
from flowrl.run.prediction import predict
from flowrl.run.training import Training

STEPS = 13
RUNS = 2
ROWS = (128, 256)
PLACES: dict[str, tuple[Place | None, int]] = {  # with the ranks of the actor
    "local": (None, 1),
    "colocated": (Colocate(gpus=2), 2),
    "split": (Split(train=1, rollout=1), 1),
}


def training(graph: Graph, base: Path, where: str, rows: int, folder: str) -> Training:
    """The demo's training with another number of rows, at a place."""
    whole = demo.training(graph, base / "model", base / "data", base / folder, STEPS, seed=0)
    place, ranks = PLACES[where]
    slow = Constant(warmup_steps=10**6)
    bind = {"actor": dataclasses.replace(whole.job.graph.bindings["actor"], schedule=slow, ranks=ranks)}
    if place is not None:
        bind["rollout"] = TorchRollout(str(base / "model"))
    job = dataclasses.replace(whole.job.edit(bind=bind), place=place)
    return dataclasses.replace(whole, job=job, prompts=whole.prompts * rows // demo.ROWS, save_model=False)


def compare(graph: Graph, base: Path, where: str) -> list[list[str]]:
    """Rows of the table: each number of rows is predicted from runs with the other."""
    runs: dict[int, list[str]] = {rows: [] for rows in ROWS}
    medians: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for again in range(RUNS):
        for rows in ROWS:
            run = training(graph, base, where, rows, f"{graph.name}-{where}-{rows}-{again}").run()
            runs[rows].append(str(run.folder))
            medians[rows].append(statistics.median(step["timing/step"] for step in run.metrics[1:]))
    lines = []
    for rows, other in (ROWS, ROWS[::-1]):
        wanted = training(graph, base, where, rows, "none")
        job, prompts = wanted.job, wanted.prompts
        predicted = statistics.median(
            predict(job.graph, job.place, prompts, Costs.of(run)).seconds for run in runs[other]
        )
        measured = statistics.median(medians[rows])
        noise = max(medians[rows]) / min(medians[rows]) - 1.0
        numbers = (f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured - 1.0:+.1%}", f"{noise:.1%}")
        lines.append([f"{graph.name} {where}", f"{other} → {rows}", *numbers])
        print(*lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_dataset(base / "data")
        build(base / "model")
        chosen = sys.argv[1:] or PLACES
        lines = [line for where in chosen for graph in demo.graphs() for line in compare(graph, base, where)]
    table(
        f"seconds a step, medians of {STEPS - 1} steps and {RUNS} runs",
        ["", "rows", "predicted", "measured", "error", "noise"],
        lines,
    )
