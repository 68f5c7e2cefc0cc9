"""Log-probs and gradients on the device against the CPU in float32: attention, packing, precision and checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from lengths import Batch, Gain
from torch import Tensor

from flowrl.backends import SGD, TorchScorer, TorchTrainer
from flowrl.protocols.protocols import MiniBatch

from .models import CONTEXT, SMALL, TINY, qwen3, ragged
from .parts import Target
from .report import Report

FLOAT32, BFLOAT16 = 1e-4, 0.05
"""Largest relative errors: products of other kernels, and rounding to 8 bits."""
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "float32, rows packed": ({}, FLOAT32),
    "float32, rows packed, in small micro-batches": ({"max_tokens": 64}, FLOAT32),
    "float32, plain attention": ({"attention": "eager"}, FLOAT32),
    "float32, checkpointed": ({"gradient_checkpointing": True}, FLOAT32),
    "float32, offloaded": ({"offload": True}, FLOAT32),
    "bfloat16, rows packed": ({"dtype": "bfloat16"}, BFLOAT16),
    "bfloat16, plain attention": ({"dtype": "bfloat16", "attention": "eager"}, BFLOAT16),
    "bfloat16, checkpointed and offloaded": (
        {"dtype": "bfloat16", "gradient_checkpointing": True, "offload": True},
        BFLOAT16,
    ),
}


def compare(target: Target, report: Report) -> None:
    """Check each setting of `CASES`; the reference is plain attention on the CPU."""
    folder, rows = qwen3(target, target.pick(SMALL, TINY)), ragged(target.pick(16, 4), 32, target.pick(256, 24))
    truth = _numbers(folder, rows, "cpu", {"attention": "eager"})
    for name, (settings, bound) in CASES.items():
        found = _numbers(folder, rows, target.device, settings)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        text = f"relative error {errors[0]:.1e} of log-probs, {errors[1]:.1e} of gradients"
        report.check(name, max(errors) <= bound, f"{text}; at most {bound:g}")
    scorer: Any = TorchScorer(folder, device=target.device).build(CONTEXT)
    why = scorer._scorer.unpacked
    report.check("rows are packed", why is None, why or "as a probe of the model on this device decides")


def _numbers(folder: str, rows: Batch, device: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probs of response tokens, and the gradient of one mini-batch, as the step of SGD with a large lr, so that
    weights are rounded little."""
    settings = {"optimizer": SGD(lr=1e3), "grad_clip": None, "device": device} | settings
    engine: Any = TorchTrainer(folder, **settings).build(CONTEXT)
    log_probs = engine.log_probs(rows)[rows.response_mask]
    before = {name: tensor.double().cpu().clone() for name, tensor in engine.weights()}
    weights = rows.response_mask / rows.response_mask.sum()
    engine.update(rows, [MiniBatch(torch.arange(len(weights)), weights)], Gain())
    steps = [(tensor.double().cpu() - before[name]).flatten() for name, tensor in engine.weights()]
    return log_probs, torch.cat(steps)
