"""Error of predicted step times on the demo, with costs from runs with half or twice the rows.

The policy hardly learns here, because costs reflect the lengths of past answers, not those of a better policy. Runs
with few and with many rows alternate, and each is predicted from its neighbor, because the load of the machine varies.
The table shows the pair with the median error. The last column shows how much equal runs differ.
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
from flowrl.backends import TorchRollout
from flowrl.demo import run as demo
from flowrl.demo.model import build
from flowrl.demo.task import write_dataset
from flowrl.graph import Graph
from flowrl.run.placement.place import Place
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.training.training import Training
from flowrl.schedules import Constant

STEPS = 25
RUNS = 3
ROWS = (128, 256)
PLACES: dict[str, tuple[Place | None, int]] = {  # with the ranks of the actor
    "local": (None, 1),
    "colocated": (Colocate(gpus=2), 2),
    "split": (Split(train=1, rollout=1), 1),
}


def training(graph: Graph, base: Path, where: str, rows: int, folder: str) -> Training:
    """The demo's training with another number of rows, on a placement."""
    whole = demo.training(graph, base / "model", base / "data", base / folder, STEPS, seed=0)
    place, ranks = PLACES[where]
    slow = Constant(1.0, warmup=10**6)
    bind = {"actor": dataclasses.replace(whole.job.graph.bindings["actor"], schedule=slow, ranks=ranks)}
    if place is not None:
        bind["rollout"] = TorchRollout(str(base / "model"))
    job = dataclasses.replace(whole.job.edit(bind=bind), place=place)
    return dataclasses.replace(whole, job=job, prompts=whole.prompts * rows // demo.ROWS, save_model=False)


def compare(graph: Graph, base: Path, where: str) -> list[list[str]]:
    """Rows of the table: each number of rows is predicted from runs with the other."""
    pairs: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}  # predicted and measured
    for again in range(RUNS):
        measured, costs = dict[int, float](), dict[int, Costs]()
        for rows in ROWS:
            run = training(graph, base, where, rows, f"{graph.name}-{where}-{rows}-{again}").run()
            measured[rows] = statistics.median(step["timing/step"] for step in run.metrics[1:])
            costs[rows] = Costs.of(run.folder)
        for rows, other in (ROWS, ROWS[::-1]):
            target = training(graph, base, where, rows, "none")
            predicted = predict(target.job.graph, target.job.place, target.prompts, costs[other]).seconds
            pairs[rows].append((predicted, measured[rows]))
    lines = []
    for rows, other in (ROWS, ROWS[::-1]):
        predicted, seconds = sorted(pairs[rows], key=lambda pair: pair[0] / pair[1])[RUNS // 2]
        every = [of_run for _, of_run in pairs[rows]]
        numbers = (f"{predicted:.3f}", f"{seconds:.3f}", f"{predicted / seconds - 1.0:+.1%}")
        lines.append([f"{graph.name} {where}", f"{other} → {rows}", *numbers, f"{max(every) / min(every) - 1.0:.1%}"])
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
        f"seconds per step, median of {STEPS - 1} steps, in the pair of runs with the median error, of {RUNS}",
        ["", "rows", "predicted", "measured", "error", "noise"],
        lines,
    )
