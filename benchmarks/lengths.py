"""An update of rows of natural lengths: packed micro-batches and the padded batch, on one CPU thread.

64 rows of a Llama with four layers, prompts padded on the left and responses on the right. Lengths of answers are
geometric, so the padded batch has about 2.2 times as many positions as tokens. Each case is one optimizer step, AdamW
and clipping included. The peer is plain torch, in one forward and backward pass over the padded batch; like flowrl, it
computes log-probs at response tokens only. With plain attention, flowrl pads rows to the longest of their micro-batch.
Cases alternate; times are CPU time, and wall-clock time on a GPU (`gpu.py`).

    python benchmarks/lengths.py [seconds per table]
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from generate import write_model
from harness import medians, table
from harness.turns import finished
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from flowrl import Metrics
from flowrl.backends import AdamW, TorchTrainer
from flowrl.protocols.protocols import MiniBatch

ROWS, PROMPT, MEAN, LONGEST = 64, 16, 110, 256  # of responses
CONTEXT: Any = SimpleNamespace(seed=0, rank=0, world_size=1)


class Batch(NamedTuple):
    """Input of a trainer, and advantages ``[row response]``."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor
    advantages: Tensor


class Gain:
    """Mean of advantages times log-probs."""

    wants_entropy = False
    of_distribution = None
    of_tokens = True

    def __call__(self, output: Tensor, entropy: Any, batch: Batch, weights: Tensor, metrics: Metrics) -> Tensor:
        return -(weights * batch.advantages * output).sum()


def batch_of(prompts: Tensor, responses: Tensor) -> Batch:
    """Rows of these lengths with random tokens."""
    draw = torch.Generator().manual_seed(0)
    columns = torch.arange(PROMPT + int(responses.max()))
    attended = (columns >= PROMPT - prompts[:, None]) & (columns < PROMPT + responses[:, None])
    ids = torch.randint(6, 90, attended.shape, generator=draw).masked_fill(~attended, 0)
    advantages = torch.randn(len(ids), 1, generator=draw).expand(-1, len(columns) - PROMPT).contiguous()
    places = (attended.cumsum(1) - 1).clamp(min=0)
    return Batch(ids, attended, places, attended[:, PROMPT:], torch.ones(len(ids)), advantages)


def natural() -> Batch:
    """Responses of geometric lengths, prompts of uniform lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.rand(ROWS, generator=draw).log() / math.log(1 - 1 / MEAN)).ceil().clamp(1, LONGEST).long()
    return batch_of(torch.randint(PROMPT // 2, PROMPT + 1, (ROWS,), generator=draw), lengths)


def equal() -> Batch:
    """Rows of equal length."""
    return batch_of(torch.full((ROWS,), PROMPT), torch.full((ROWS,), LONGEST))


def bare(folder: str, batch: Batch, sizes: list[int], device: str) -> Callable[[], None]:
    """An update in plain torch: rows in order, in padded chunks."""
    lm = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    batch = Batch(*(column.to(device) for column in batch))
    optimizer, tokens = torch.optim.AdamW(lm.parameters(), lr=0.0), int(batch.response_mask.sum())

    def update() -> None:
        for rows in torch.arange(ROWS).split(sizes):
            ids, mask, places, response, _, advantages = (column[rows] for column in batch)
            base = lm.model(input_ids=ids, attention_mask=mask.long(), position_ids=places, use_cache=False)
            log_p = lm.lm_head(base.last_hidden_state[:, PROMPT - 1 : -1][response]).log_softmax(-1)
            chosen = log_p.gather(1, ids[:, PROMPT:][response][:, None])[:, 0]
            (-(advantages[response] * chosen).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        finished(device)

    return update


def flowrl(folder: str, batch: Batch, device: str, **settings: Any) -> Callable[[], None]:
    """The same update by a trainer."""
    engine = TorchTrainer(folder, optimizer=AdamW(lr=1e-12), device=device, **settings).build(CONTEXT)
    weights = batch.response_mask / batch.response_mask.sum()

    def update() -> None:
        engine.update(batch, [MiniBatch(torch.arange(ROWS), weights)], Gain())
        finished(device)

    return update


def compared(folder: str, name: str, batch: Batch, seconds: float, device: str = "cpu") -> tuple[str, list[list[str]]]:
    """Title and rows of the table of a batch."""
    width = batch.input_ids.shape[1]
    cases = {
        "torch alone: padded, one batch": bare(folder, batch, [ROWS], device),
        "torch alone: padded, 8 rows at a time": bare(folder, batch, [8] * (ROWS // 8), device),
        "flowrl, plain attention": flowrl(folder, batch, device, attention="eager"),
        "flowrl, max_tokens=1000000": flowrl(folder, batch, device, max_tokens=10**6),
        "flowrl": flowrl(folder, batch, device),
    }
    found = medians(cases, seconds, clock=time.process_time if device == "cpu" else time.perf_counter)
    peer = next(iter(found.values()))
    waste = ROWS * width / int(batch.attention_mask.sum())
    rows = [[case, f"{1e3 * taken:.0f}", f"{taken / peer:.2f}"] for case, taken in found.items()]
    return f"{name}: {ROWS} rows of {width} columns, {waste:.2f} times their tokens", rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory() as base:
        folder = write_model(Path(base), layers=4, width=128, positions=512)
        for name, batch in {"natural lengths": natural(), "equal lengths": equal()}.items():
            title, rows = compared(folder, name, batch, seconds)
            table(title, ["", "ms", "of padded"], rows)
