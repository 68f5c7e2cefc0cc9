"""Teach a small model to think before it answers, on a laptop: the demo as a script.

flowrl show examples/think.py:graph       show the graph
flowrl run examples/think.py:training     train, as `python examples/think.py` does
"""

import os
from pathlib import Path

from flowrl import PromptData, Terminal, Training, Validation
from flowrl.backends import AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo import build, score_and_thinking, write_dataset
from flowrl.graphs import grpo

# Hugging Face folder of any causal LM. If it does not exist, the demo's model (113,000 parameters) is written there.
MODEL = Path(os.environ.get("MODEL", "runs/think/model"))
DATA = Path("runs/think/data")
STEPS = int(os.environ.get("STEPS", "30"))

# The algorithm: 8 answers per prompt; the advantage of an answer is its score relative to the group's mean.
graph = grpo(score_and_thinking, n=8, max_new_tokens=28, mini_batch=128)


def training() -> Training:
    """The graph with its backends, data and number of steps; loads no model before it runs."""
    if not MODEL.exists():
        build(MODEL)
    train, heldout = write_dataset(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)),
        ref=TorchScorer(MODEL),  # the initial model; the KL penalty keeps the policy close to it
        rollout=TorchRollout(),  # samples with the actor's weights
    )
    answers = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, batch=500)
    return Training(job, PromptData(train), steps=STEPS, prompts=32, validation=answers)


if __name__ == "__main__":
    training().run([Terminal()])
