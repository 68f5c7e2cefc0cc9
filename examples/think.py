"""Teach a small model to think before it answers, on a laptop: the demo as a file of your own.

flowrl show examples/think.py:graph       look at the graph
flowrl run examples/think.py:training     train, as `python examples/think.py` does
"""

import os
from pathlib import Path

from flowrl import PromptData, Terminal, Training, Validation
from flowrl.backends import AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo import build, score_and_thinking, write_dataset
from flowrl.graphs import grpo

# The Hugging Face folder of any causal LM. If there is none, the demo's model is made (113 thousand parameters).
MODEL = Path(os.environ.get("MODEL", "runs/think/model"))
DATA = Path("runs/think/data")
STEPS = int(os.environ.get("STEPS", "30"))

# The algorithm: each prompt is answered 8 times, and an answer is scored by how far it beats its group's mean.
graph = grpo(score_and_thinking, n=8, max_new_tokens=28, mini_batch=128)


def training() -> Training:
    """The graph with engines for its roles, the prompts, and the number of steps. Nothing is loaded before it runs."""
    if not MODEL.exists():
        build(MODEL)
    train, heldout = write_dataset(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)),
        ref=TorchScorer(MODEL),  # the model as it was; the policy should stay close to it
        rollout=TorchRollout(),  # samples with the actor's own weights
    )
    answers = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, batch=500)
    return Training(job, PromptData(train), steps=STEPS, prompts=32, validation=answers)


if __name__ == "__main__":
    training().run([Terminal()])
