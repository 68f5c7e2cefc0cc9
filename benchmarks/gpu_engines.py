"""vLLM and SGLang on one CUDA device: what no CPU can show of them, checked and measured.

Weights reach the engine without leaving the device, sleep gives its memory back, what sleeps comes back with the same
answers, an adapter goes alone, and rows keep to their seeds. ``python benchmarks/gpu_engines.py``, where vLLM or SGLang
for GPUs is installed, ends with exit status 1 if something is not as it should be; with ``cpu`` the same lines run on a
CPU, to see that they run: nothing is released there, and SGLang draws without seeds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would tell of every sync

import torch
from engines import CONTEXT, GROUP, GROUPS, NEW, PROMPT, disagreement, prompts_of, timed
from generate import write_model
from harness import table
from transformers.utils import logging

from flowrl import Key
from flowrl.backends import SGD, VLLM, LoRA, SGLang, TorchTrainer
from flowrl.core.protocols import Sampling

ROOM = 0.3  # of the device for an engine, so that the trainer has room beside it
ADAPTER = LoRA(r=8, alpha=16)
GREEDY, DRAWN = (Sampling(temperature=t, top_k=0, top_p=1.0, max_new_tokens=NEW) for t in (0.0, 1.0))
HEADS = ["", "as it should be", "found"]


def spec(name: str, model: str, device: str, **more: Any) -> Any:
    """An engine in float32, with room for a call of `engines.generate`."""
    common = {"dtype": "float32", "max_model_len": PROMPT + NEW, "max_num_seqs": GROUPS * GROUP, **more}
    if device == "cuda":
        common["memory_fraction"] = ROOM
    if name == "vllm":
        return VLLM(model, **common)
    seeded = {"enable_deterministic_inference": True} if device == "cuda" else {}
    return SGLang(model, engine_args=seeded, **common)


def trainer_of(model: str, device: str, **more: Any) -> Any:
    """A trainer on the device."""
    return TorchTrainer(model, SGD(lr=0.1), device=device, **more).build(CONTEXT)


def answers(engine: Any, sampling: Sampling) -> list[list[int]]:
    """The tokens of all rows of a call."""
    prompts = prompts_of(0)
    mask = torch.ones_like(prompts, dtype=torch.bool)
    sampled = engine.generate(prompts, mask, [f"row {i}" for i in range(len(prompts))], sampling, Key.of(0))
    return [ids[counts].tolist() for ids, counts in zip(sampled.responses, sampled.response_mask, strict=True)]


def free(device: str) -> float:
    """GB of the device's memory that nobody has taken; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / 1e9 if device == "cuda" else 0.0


def check(name: str, model: str, device: str) -> list[tuple[str, bool, str]]:
    """What is checked of an engine, whether it is so, and what was found."""
    on_gpu = device == "cuda"
    trainer = trainer_of(model, device)
    engine, seconds = timed(lambda: spec(name, model, device).build(CONTEXT))
    found = [("starts", True, f"{seconds:.1f} s")]
    engine.sync(trainer)  # the first one also compiles what the probe runs
    receipt = engine.sync(trainer)
    wanted = ("in process", "cuda ipc") if on_gpu else ("in process", "pipe")
    speed = f"{receipt.transport}, {receipt.bytes / 1e6 / receipt.seconds:,.0f} MB/s with digest and probe"
    found.append(("weights stay on the device", receipt.transport in wanted, speed))
    apart = disagreement(engine, SimpleNamespace(log_probs=lambda batch: trainer.log_probs(moved(batch, device))))
    found.append(("log-probs are the trainer's", float(apart.max()) < 1e-3, f"max {float(apart.max()):.1e} nats"))

    before, drawn, held = answers(engine, GREEDY), answers(engine, DRAWN), free(device)
    engine.sleep()
    released = free(device) - held
    found.append(("sleep gives memory back", released > 0 or not on_gpu, f"{released:.2f} GB"))
    engine.wake()
    if engine.receipt is None:
        engine.sync(trainer)
    found.append(("the answers come back with it", answers(engine, GREEDY) == before, f"{len(before)} rows"))
    seeded = on_gpu or name == "vllm"
    found.append(("rows keep to their seeds", answers(engine, DRAWN) == drawn or not seeded, f"{len(drawn)} rows"))
    engine.close()

    if name == "vllm" or on_gpu:  # SGLang's adapters ask for pinned memory
        learner = trainer_of(model, device, lora=ADAPTER)
        adapted = spec(name, model, device, lora=ADAPTER).build(CONTEXT)
        small = adapted.sync(learner)
        share = small.bytes / receipt.bytes
        found.append(("an adapter goes alone", share < 0.5, f"{share:.1%} of the bytes, {small.transport}"))
        adapted.close()
    return found


def moved(batch: Any, device: str) -> Any:
    """The columns on the device."""
    return SimpleNamespace(**{key: column.to(device) for key, column in vars(batch).items()})


def main(device: str) -> int:
    """Print the table; the exit status."""
    installed = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is not None]
    rows, fine = [], True
    with tempfile.TemporaryDirectory() as base:
        model = str(write_model(Path(base) / "model", *((24, 1024) if device == "cuda" else (2, 64))))
        for name in installed:
            for what, so, found in check(name, model, device):
                rows.append([f"{name}: {what}", "yes" if so else "NO", found])
                fine = fine and so
    rows += [[f"{name}: not installed", "", ""] for name in ("vllm", "sglang") if name not in installed]
    table(f"Engines on one {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}", HEADS, rows)
    return 0 if fine else 1


if __name__ == "__main__":
    logging.disable_progress_bar()
    wanted = "cpu" if "cpu" in sys.argv[1:] else "cuda"
    if wanted == "cuda" and not torch.cuda.is_available():
        print("Left out: torch finds no CUDA device here; `python benchmarks/gpu_engines.py cpu` runs the lines.")
        sys.exit(0)
    sys.exit(main(wanted))
