"""Operators and algorithms are plain Python: call them with tensors, or step through them in a debugger.

python examples/eager.py
"""

import os
from pathlib import Path

import torch

from flowrl import PromptBatch, PromptData
from flowrl.backends import AdamW, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo import build, compute_score, write_dataset
from flowrl.graphs import ppo
from flowrl.operators import GAE, KLShape

MODEL = Path(os.environ.get("MODEL", "runs/think/model"))


def operators() -> None:
    """One answer of six tokens with score 1: the KL to the reference shapes the reward; GAE gives the advantages."""
    old = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]])  # log-probs of the policy
    ref = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]])  # log-probs of the reference
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    rewards = KLShape(0.01)(scores, old, ref, mask)
    advantages, returns = GAE(gamma=1.0, lam=0.95)(rewards, torch.full((1, 6), 0.5), mask)
    for name, column in (("rewards", rewards), ("advantages", advantages), ("returns", returns)):
        print(f"{name:<12}", " ".join(f"{number:8.4f}" for number in column[0].tolist()))


def algorithm() -> None:
    """Two steps of PPO without an executor: inside the block, roles are the job's live engines."""
    if not MODEL.exists():
        build(MODEL)
    train, _ = write_dataset("runs/think/data")
    settings = {"max_new_tokens": 28, "kl_coef": 0.001}
    job = ppo(compute_score, **settings).bind(
        actor=TorchTrainer(MODEL, AdamW(lr=3e-4)),
        critic=TorchCritic(MODEL, AdamW(lr=1e-3)),
        ref=TorchScorer(MODEL),
        rollout=TorchRollout(),
    )
    with job.eager(seed=0) as session:
        prompts = PromptData(train).load(session.engines["rollout"].tokenizer, seed=0)
        for _ in range(2):
            batch = prompts.next(16).to_record(PromptBatch)
            receipt, *_ = ppo.step(batch, compute_score, **settings)  # a breakpoint inside `ppo` stops here
            print(f"\nstep {session.step}; the rollout engine now has version {receipt.version} of the policy")
            for node, metrics in session.metrics.items():
                for key, number in metrics.compute().items():
                    print(f"  {node:<14} {key:<28} {number:.4f}")


if __name__ == "__main__":
    operators()
    algorithm()
