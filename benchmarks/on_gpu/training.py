"""GRPO on Ray on all GPUs, with shards on each and a model of the size of Qwen3-0.6B with random weights."""

from __future__ import annotations

import statistics
from typing import Any

from flowrl import Colocate, PromptData, Training
from flowrl.backends import AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo.task import write_dataset
from flowrl.graphs import grpo

from .models import QWEN3_06B, TINY, qwen3
from .parts import Target
from .report import Report

STEPS = 3


def train(target: Target, report: Report) -> None:
    """Take steps in bfloat16 with checkpointing; check versions, finite metrics, and the engine's log-probs."""
    model, ranks = qwen3(target, target.pick(QWEN3_06B, TINY)), target.count
    prompts, new = target.pick((16 * ranks, 256), (2 * ranks, 8))
    common: dict[str, Any] = {"device": target.device, "dtype": "bfloat16", "ranks": ranks}
    graph = grpo("flowrl.demo.verifier:compute_score", n=4, max_new_tokens=new, mini_batch=2 * prompts)
    job = graph.edit(set={"generate.ignore_eos": True}).bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), gradient_checkpointing=True, **common),
        ref=TorchScorer(model, **common),
        rollout=TorchRollout(model, **common),
        place=Colocate(gpus=ranks),
    )
    data = PromptData(str(write_dataset(target.folder / "data")[0]))
    settings: Any = {"steps": STEPS, "prompts": prompts, "save_model": False}
    metrics = Training(job, data, folder=str(target.folder / "run"), **settings).run().metrics
    versions = [int(one["sync/version"]) for one in metrics]
    report.check("every step is synced", versions == [*range(1, STEPS + 1)], f"versions {versions}")
    difference = statistics.mean(one["rollout/logp_diff_mean"] for one in metrics)
    report.check("log-probs of engine and trainer are close", difference < 0.05, f"mean {difference:.4f} nats")
    norms = [one["actor/grad_norm"] for one in metrics]
    report.check("the gradient is finite", all(0 <= norm < float("inf") for norm in norms), f"norms {norms}")
    spent = {key: statistics.median(one[key] for one in metrics[1:]) for key in metrics[0] if key.startswith("timing/")}
    rows = [[key.removeprefix("timing/"), f"{seconds:.2f}"] for key, seconds in spent.items()]
    title = f"Seconds of a step: {4 * prompts} rows of at most {new} new tokens on {ranks} processes"
    report.table(title, ["", "median"], rows)
