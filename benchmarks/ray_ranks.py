"""A GRPO step of the demo on Ray with an actor of one rank and of two (FSDP2), alternating.

Only the actor's work is split among ranks, and each rank needs a core. In a model as small as the demo's, communication
costs more than the split saves; so a larger model runs too, on fewer rows.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from generate import write_model
from harness import table
from transformers.utils import logging

from flowrl import Colocate
from flowrl.backends import AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.sources.prompts import PromptData
from flowrl.demo.task import write_dataset
from flowrl.demo.verifier import score_and_thinking
from flowrl.distributed.cluster.cluster import connected
from flowrl.graphs import grpo

RANKS = (1, 2)
GROUP = 8
SIZES = {"2 layers of 64": (2, 64, 256, 6), "4 layers of 256": (4, 256, 64, 3)}  # layers, width, rows, steps


def measure(model: str, data: PromptData, rows: int, steps: int) -> list[dict[str, float]]:
    """For each of `RANKS`, the median seconds of each node and of the step."""
    graph = grpo(score_and_thinking, n=GROUP, max_new_tokens=28, mini_batch=rows // 2)
    found: list[dict[str, list[float]]] = [{} for _ in RANKS]
    with ExitStack() as open_jobs:
        executors: list[Any] = []
        for ranks in RANKS:
            job = graph.bind(
                actor=TorchTrainer(model, AdamW(lr=1e-5), ranks=ranks),
                ref=TorchScorer(model),
                rollout=TorchRollout(model),
                place=Colocate(gpus=2),
            )
            executors.append(open_jobs.enter_context(job.open()))
            executors[-1].sync()
        stream = data.load(executors[0].tokenizer(), seed=0)
        for step in range(steps + 1):
            batch = stream.next(rows // GROUP)
            for executor, taken in zip(executors, found, strict=True):
                begun = time.perf_counter()
                result = executor.step(batch, step)
                seconds = {**result.seconds, "the step": time.perf_counter() - begun}
                for node, spent in seconds.items() if step else ():  # the first step warms up
                    taken.setdefault(node, []).append(spent)
    return [{node: statistics.median(spent) for node, spent in taken.items()} for taken in found]


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on CPU slots, wherever this runs
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    shown = ("generate", "old_log_prob", "ref_log_prob", "update_actor", "sync", "the step")
    with connected(Colocate(gpus=2 * len(RANKS))), tempfile.TemporaryDirectory() as base:  # both jobs are open at once
        data = PromptData(str(write_dataset(Path(base) / "data")[0]))
        for size, (layers, width, rows, steps) in SIZES.items():
            one, two = measure(write_model(Path(base) / str(width), layers, width), data, rows, steps)
            lines = [
                [node, f"{1e3 * one[node]:.0f}", f"{1e3 * two[node]:.0f}", f"{one[node] / two[node]:.2f}"]
                for node in shown
            ]
            table(
                f"{size}, {rows} rows, median of {steps} steps on {os.cpu_count()} cores",
                ["", "1 rank, ms", "2 ranks, ms", "speed-up"],
                lines,
            )
