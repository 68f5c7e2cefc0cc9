"""GRPO with flowrl: ``flowrl_side.py MODEL PROMPTS WORK GRAPH``; see `benchmarks/race/__main__.py`.

The graph is ``grpo``, whose trainer recomputes log-probs, or ``rollout``, whose loss uses the ratio to those of the
engine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from work import CLIP, GROUP, LEARNING_RATE, WORKS, Gate, reward

from flowrl import PromptData, Training
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.graphs import grpo
from flowrl.operators import PPOClip, UpdateActor


class Steps:
    """A reporter that runs one step each time the gate opens."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self.gate.wait()

    def node(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.gate.generating = metrics["timing/generate"]
        self.gate.done(metrics["response_length/mean"])
        self.gate.wait()

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def end(self, summary: Any) -> None:
        pass


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Reward of a text."""
    return reward(solution_str)


def main(model: str, prompts: str, name: str, which: str) -> None:
    """Train until the driver stops it."""
    work = WORKS[name]
    graph = grpo(score, n=GROUP, max_new_tokens=work.tokens, kl_coef=0.0, clip=CLIP)
    graph = graph.edit(set={"generate.ignore_eos": not work.natural})
    if which == "rollout":
        ratio = UpdateActor(PPOClip(CLIP, ratio_to="rollout"))
        graph = graph.edit(replace={"update_actor": ratio}, drop=["old_log_prob", "mismatch"])
    adamw = AdamW(lr=LEARNING_RATE, weight_decay=0.0)
    job = graph.bind(actor=TorchTrainer(model, adamw, grad_clip=1.0), rollout=TorchRollout())
    with tempfile.TemporaryDirectory() as folder:
        training = Training(
            job, PromptData(prompts), steps=10_000, prompts=work.prompts, folder=f"{folder}/run", save_model=False
        )
        training.run(reporters=[Steps(Gate())])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
