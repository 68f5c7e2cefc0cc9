"""Speedup of a lag when generation and training take equally long: the demo's GRPO on Ray, one core for each.

A run without a lag measures the cost of each node. These costs give the bound (no step is shorter than the work of the
busier slot) and the prediction of the simulated runner; then the same training runs with a lag. Runs without and with a
lag alternate, because the speed of the machine varies, and each is compared with the one before it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from generate import write_model
from harness import table
from transformers.utils import logging

from flowrl import After, PromptData, Split, Training
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.demo.task import write_dataset
from flowrl.demo.verifier import score_and_thinking
from flowrl.graphs import grpo
from flowrl.operators import RolloutCorrection
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict

STEPS = 14
ROUNDS = 4
LAGS = (1, 2)
PROMPTS, GROUP, TOKENS = 24, 8, 28
ROWS_AT_ONCE = 32
"""Rows sampled together: with this many, generation takes about as long as training."""


def training(base: Path, lag: int, folder: str) -> Training:
    """The demo's GRPO without a reference, corrected for the older weights that sampled."""
    model = str(base / "model")
    graph = grpo(score_and_thinking, n=GROUP, max_new_tokens=TOKENS, kl_coef=0.0)
    correction = RolloutCorrection("token", "truncate", high=2.0)
    job = graph.edit(lag=lag, insert={"correction": After("group_advantage", correction)}).bind(
        actor=TorchTrainer(model, AdamW(lr=3e-5)),
        rollout=TorchRollout(model, max_rows=ROWS_AT_ONCE),
        place=Split(train=1, rollout=1),
    )
    data = PromptData(base / "data" / "train.jsonl")
    return Training(job, data, steps=STEPS, prompts=PROMPTS, folder=str(base / folder), save_model=False)


def measure(training: Training) -> tuple[float, Costs]:
    """Run it; return the median seconds of a step while lag + 1 steps are in flight, and the costs of its nodes."""
    run, lag = training.run(), training.job.graph.lag.versions
    steps = [line["timing/step"] for line in run.metrics]
    return median(steps[lag + 2 : STEPS - lag]), Costs.of(str(run.folder))


def compare(base: Path, again: int) -> dict[int, list[float]]:
    """By lag: seconds per step without it, bound, prediction, measurement, and bound by the costs of this run."""
    found = {}
    for lag in LAGS:
        before, costs = measure(training(base, 0, f"before-{lag}-{again}"))
        ahead = training(base, lag, f"ahead-{lag}-{again}")
        took, own = measure(ahead)
        predicted, busy = (predict(ahead.job.graph, ahead.job.place, PROMPTS, of) for of in (costs, own))
        found[lag] = [before, predicted.bound, predicted.seconds, took, busy.bound]
        print(f"lag {lag}", *(f"{seconds:.3f}" for seconds in found[lag]), flush=True)
    return found


def line(lag: int, rounds: list[dict[int, list[float]]]) -> list[str]:
    """A row of the table: medians over the rounds."""
    each = [found[lag] for found in rounds]
    seconds = [f"{median(column):.3f}" for column in zip(*(one[:4] for one in each), strict=True)]
    gain = median(before / took for before, _, _, took, _ in each)
    most = median(before / bound for before, bound, _, _, _ in each)
    share = median(bound / took for _, bound, _, took, _ in each)
    error = median(predicted / took - 1.0 for _, _, predicted, took, _ in each)
    busy = median(own / took for _, _, _, took, own in each)
    return [f"lag {lag}", *seconds, f"{gain:.2f}", f"{most:.2f}", f"{share:.0%}", f"{error:+.1%}", f"{busy:.0%}"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_dataset(base / "data")
        write_model(base / "model", layers=4, width=128)
        rounds = [compare(base, again) for again in range(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)]
    head = ["", "lag 0", "bound", "predicted", "measured", "gain", "most", "of it", "error", "busy"]
    table("seconds per step: medians", head, [line(lag, rounds) for lag in LAGS])
