"""Tokens per second of generation, milliseconds of packed updates, and of a head over a large vocabulary."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import lengths
import log_probs
import torch
from generate import write_model
from harness import medians
from harness.turns import finished

from flowrl import Key
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.protocols.protocols import Sampling

from .models import CONTEXT
from .parts import Target
from .report import Report

PROMPT = 128


def measure(target: Target, report: Report) -> None:
    """All tables."""
    _generation(target, report)
    _updates(target, report)
    _head(target, report)


def _generation(target: Target, report: Report) -> None:
    """By batch size, with new prompts in every call."""
    new = target.pick(128, 4)
    model = write_model(target.folder / "speed", *target.pick((24, 1024), (2, 64)))
    sampling, rows = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new), []
    engine: Any = TorchRollout(model, device=target.device).build(CONTEXT)
    engine.sync(TorchTrainer(model, SGD(lr=0.1), device=target.device).build(CONTEXT))
    for batch in target.pick((32, 256), (4,)):
        tokens: list[int] = []

        def generate(batch: int = batch, tokens: list[int] = tokens) -> None:
            prompts = torch.randint(8, 100, (batch, PROMPT))
            mask = torch.ones_like(prompts, dtype=torch.bool)
            sampled = engine.generate(prompts, mask, [str(i) for i in range(batch)], sampling, Key.of(len(tokens)))
            tokens.append(int(sampled.response_mask.sum()))

        seconds = medians({"": generate}, seconds=target.pick(5.0, 0.0), least=1)[""]
        rows.append([f"{batch} rows", f"{statistics.mean(tokens) / seconds:,.0f}"])
    report.table(f"TorchRollout: prompts of {PROMPT} tokens, at most {new} new ones", ["", "tokens/s"], rows)


def _updates(target: Target, report: Report) -> None:
    """64 rows of natural lengths; see `lengths.py`."""
    folder = write_model(target.folder / "lengths", *target.pick((12, 1024), (1, 32)), positions=512)
    heads = ["", "ms", "of padded"]
    title, rows = lengths.compared(folder, "natural lengths", lengths.natural(), target.pick(8.0, 0.0), target.device)
    report.table(title, heads, rows)


def _head(target: Target, report: Report) -> None:
    """Log-probs through a head, forward and backward, in bfloat16: milliseconds and peak memory."""
    hidden, tokens, vocabulary = target.pick((4096, 8192, 152_000), (64, 256, 8_000))
    layer = torch.nn.Linear(hidden, vocabulary, bias=False, device=target.device, dtype=torch.bfloat16)
    states = torch.randn(tokens, hidden, device=target.device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=target.device)

    def run(score: Any) -> None:
        log_probs.back_to_the_head(score, layer, states, labels)
        finished(target.device)

    cases = {"whole": log_probs.whole, "chunks of 1024": partial(log_probs.in_chunks, 1024), "flowrl": log_probs.tiles}
    calls = {name: partial(run, score) for name, score in cases.items()}
    taken = medians(calls, seconds=target.pick(8.0, 0.0), least=target.pick(3, 1))
    rows = []
    for name, score in cases.items():
        row = [name, f"{1e3 * taken[name]:.1f}", f"{taken[name] / taken['flowrl']:.2f}"]
        if target.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(score)
            row.append(f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}")
        rows.append(row)
    heads = ["", "ms", "vs flowrl", *(["peak GiB"] if target.on_gpu else [])]
    report.table(f"{tokens} tokens through a head of {hidden} x {vocabulary}, forward and backward", heads, rows)
