"""Time of a demo step by node, for GRPO, PPO, and GRPO with `Collect`: milliseconds and fraction of the step. Nodes
that run in several rounds count their total."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path

import torch
from harness import table
from transformers.utils import logging

from flowrl import After
from flowrl.demo.model import build
from flowrl.demo.run import graphs, training
from flowrl.demo.task import write_dataset
from flowrl.graph import Graph
from flowrl.operators import Collect, Spread

STEPS = 8


def shares(graph: Graph, base: Path) -> list[list[str]]:
    """Rows of the table: nodes in execution order, then the overhead of the executor."""
    whole = training(graph, base / "model", base / "data", base / graph.name, STEPS, seed=0)
    metrics = dataclasses.replace(whole, validation=(), save_model=False).run().metrics[1:]  # the first step warms up
    nodes = [key for key in metrics[0] if key.startswith("timing/") and key not in ("timing/step", "timing/record")]
    taken = {key.removeprefix("timing/"): statistics.median(step[key] for step in metrics) for key in nodes}
    taken["between nodes"] = statistics.median(
        step["timing/step"] - sum(step[key] for key in nodes) for step in metrics
    )
    step = statistics.median(step["timing/step"] for step in metrics)
    rows = [[name, f"{1e3 * s:.1f}", f"{s / step:.1%}"] for name, s in taken.items()]
    rate = statistics.median(step["throughput/tokens_per_second"] for step in metrics)
    return [*rows, ["the step", f"{1e3 * step:.1f}", "100.0%"], ["tokens per second", f"{rate:,.0f}", ""]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        write_dataset(folder / "data")
        build(folder / "model")
        plain = graphs()
        collect = After("reward", Collect(Spread(), groups=32))
        dynamic = next(g for g in plain if g.name == "grpo").edit(insert={"collect": collect}, name="grpo_with_collect")
        for graph in (*plain, dynamic):
            rows = shares(graph, folder)
            table(f"{graph.name}: median of {STEPS - 1} steps of 256 rows", ["", "ms", "share"], rows)
