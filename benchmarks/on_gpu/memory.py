"""The peak of an update against what `flowrl plan --hardware` predicts from the configuration."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any, cast

import torch
from lengths import Batch, Gain
from torch import nn

from flowrl.backends import LoRA, TorchTrainer
from flowrl.protocols.footprint import GIB, Demand
from flowrl.protocols.protocols import MiniBatch

from .models import CONTEXT, PREDICTABLE, QWEN3_06B, even, qwen3
from .parts import Target
from .report import Report

WITHIN = 0.1
"""The relative error that the docs state."""
CASES: dict[str, dict[str, Any]] = {  # the largest last
    "bfloat16, checkpointed, offloaded": {"dtype": "bfloat16", "gradient_checkpointing": True, "offload": True},
    "bfloat16, checkpointed": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "bfloat16, LoRA": {"dtype": "bfloat16", "lora": LoRA(r=16)},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {},
}


def compare(target: Target, report: Report) -> None:
    """Check each setting of `CASES` with rows of one length; the first update makes gradients and states."""
    folder = qwen3(target, target.pick(QWEN3_06B, PREDICTABLE))
    rows, prompt, response = target.pick((4, 256, 768), (2, 32, 96))
    batch, table = even(rows, prompt, response), []
    for name, settings in CASES.items():
        if settings.get("offload") and not target.on_gpu:
            report.skip(name, "a CPU has only one memory")
            continue
        footprint = TorchTrainer(folder, **settings).footprint(
            Demand(prompt, response, rows, None, cast(Any, target.device), 1 << 40)
        )
        parts = {**footprint.awake, **footprint.calls["update"]}
        predicted = sum(footprint.awake.values()) + sum(footprint.calls["update"].values()) - parts.get("CUDA", 0)
        measured = _peak(target, TorchTrainer(folder, device=target.device, **settings), batch)
        ratio = predicted / measured
        table.append([name, f"{measured / GIB:.3f}", f"{predicted / GIB:.3f}", f"{ratio:.2f}"])
        report.check(f"{name}: predicted within {WITHIN:.0%}", abs(ratio - 1) <= WITHIN, f"{ratio:.3f} of the peak")
    title = f"Peak of an update of {rows} rows of {prompt + response} tokens, in GiB of tensors"
    report.table(title, ["", "measured", "predicted", "predicted / measured"], table)


def _peak(target: Target, spec: TorchTrainer, batch: Batch) -> int:
    """The most bytes of tensors in the second update of a new engine."""
    gc.collect()
    before = torch.cuda.memory_allocated() if target.on_gpu else 0
    engine: Any = spec.build(CONTEXT)
    weights = batch.response_mask / batch.response_mask.sum()
    minis = [MiniBatch(torch.arange(len(weights)), weights)]
    engine.update(batch, minis, Gain())
    if target.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        engine.update(batch, minis, Gain())
        return torch.cuda.max_memory_allocated() - before
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.backends.torch.sizing.counting import Allocations

    counter, model = Allocations(), cast(nn.Module, engine.model)
    held = [*model.parameters(), *model.buffers()]
    held += [x for state in engine.learner.optimizer.state.values() for x in state.values()]
    counter.ignore(*held, *batch)
    with counter:
        engine.update(batch, minis, Gain())
    sizes = {x.untyped_storage()._cdata: x.nbytes for x in held}
    return sum(counter.peak.values()) + sum(sizes.values())
