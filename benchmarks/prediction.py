"""How far a predicted step is from a measured one: costs of a demo run with half (or twice) the rows, locally and on Ray.

The last column is the noise: how far the medians of two equal runs are apart.
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
from flowrl.run.costs import Costs
from flowrl.run.place import Place
from flowrl.run.prediction import predict
from flowrl.run.training import Training

STEPS = 12
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
    job = whole.job
    if place is not None:
        actor = dataclasses.replace(job.graph.bindings["actor"], ranks=ranks)
        job = dataclasses.replace(
            job.edit(bind={"actor": actor, "rollout": TorchRollout(str(base / "model"))}), place=place
        )
    return dataclasses.replace(whole, job=job, prompts=whole.prompts * rows // demo.ROWS, save_model=False)


def compare(graph: Graph, base: Path, where: str) -> list[list[str]]:
    """Rows of the table: each number of rows is predicted from a run with the other."""
    measured: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for again in range(2):  # in turn, so that what the machine does meanwhile meets both
        for rows in ROWS:
            run = training(graph, base, where, rows, f"{graph.name}-{where}-{rows}-{again}").run()
            measured[rows].append(statistics.median(step["timing/step"] for step in run.metrics[1:]))
    lines = []
    for rows, other in (ROWS, ROWS[::-1]):
        wanted = training(graph, base, where, rows, "none")
        costs = Costs.of(base / f"{graph.name}-{where}-{other}-0")
        predicted = predict(wanted.job.graph, wanted.job.place, wanted.prompts, costs).seconds
        found, noise = measured[rows][0], abs(measured[rows][1] / measured[rows][0] - 1.0)
        lines.append(
            [graph.name, where, f"{other} → {rows}", f"{predicted:.3f}", f"{found:.3f}", f"{predicted / found - 1.0:+.1%}", f"{noise:.1%}"]
        )  # fmt: skip
        print(*lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_dataset(base / "data")
        build(base / "model")
        lines = [
            line for graph in demo.graphs() for where in sys.argv[1:] or PLACES for line in compare(graph, base, where)
        ]
    table(
        f"seconds a step, medians of {STEPS - 1} steps",
        ["graph", "place", "rows", "predicted", "measured", "error", "noise"],
        lines,
    )
