"""The training part of a step, fused and not fused, on one CPU thread.

The rows are those of `lengths.py`: 64 rows of a Llama with four layers, answers of geometric lengths. Each case is the
part between the advantages and the sync of GRPO without KL: `OldLogProb` and `UpdateActor`, AdamW and clipping
included, or the fused node. Cases alternate; times are CPU time.

    python benchmarks/fused.py [seconds]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from generate import write_model
from harness import medians, table
from lengths import CONTEXT, natural
from torch import Tensor
from transformers.utils import logging

from flowrl import Key
from flowrl.backends import AdamW, TorchTrainer
from flowrl.operators import OldLogProb, PPOClip, UpdateActor


class Rows(NamedTuple):
    """Rows sampled by a version of the policy."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor
    policy_version: Tensor


def cases(folder: str) -> dict[str, Callable[[], object]]:
    """The cases, each on its own engine."""
    *columns, advantages = natural()
    spec = TorchTrainer(folder, optimizer=AdamW(lr=1e-4), device="cpu")
    separate, once, alone = (cast(Any, spec.build(CONTEXT)) for _ in range(3))

    def rows(engine: Any) -> Any:
        return Rows(*columns, torch.full((len(advantages),), engine.version))

    def two() -> None:
        old = OldLogProb(actor=separate)(rows(separate))
        update = UpdateActor(PPOClip(), actor=separate)
        update(rows(separate), old_log_probs=old, advantages=advantages, key=Key.of(0))

    scorer = OldLogProb(actor=once)
    fused = cast(Any, UpdateActor(PPOClip(), actor=once).fusing(scorer))
    return {
        "old_log_prob, then update_actor": two,
        "the update, fused": lambda: fused(rows(once), advantages=advantages, key=Key.of(0)),
        "old_log_prob alone": lambda: OldLogProb(actor=alone)(rows(alone)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with tempfile.TemporaryDirectory() as base:
        found = medians(cases(write_model(base, layers=4, width=128, positions=512)), seconds, clock=time.process_time)
    whole = next(iter(found.values()))
    rows = [[case, f"{1e3 * taken:.0f}", f"{taken / whole:.2f}"] for case, taken in found.items()]
    table("64 rows of natural lengths", ["", "ms", "of both"], rows)
