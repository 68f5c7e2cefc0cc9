"""A sync of changes (``Sync(changed=True)``): its bytes over real updates, and its time against a full sync and memcpy.

The bytes are those of GRPO on the demo's model (113,472 parameters, warm-started), with AdamW and float32 weights, for
an engine in bfloat16. The times are CPU time of larger random models whose weights AdamW moved by one step of lr 1e-6,
with trainer and engine on one core in one process; *on a link* adds the bytes at a given speed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from generate import write_model
from harness import medians, table
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from flowrl import PromptData
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.core.graphs.plan import Plan
from flowrl.data import ChatTokenizer
from flowrl.demo import build, write_dataset
from flowrl.distributed import export
from flowrl.distributed.export import Export
from flowrl.graphs import grpo
from flowrl.run.engine.local import local_steps
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.digest import tensor_digest
from flowrl.sync.received import Origin
from flowrl.sync.shadow import Shadow, common
from flowrl.sync.weight_selection import rounded

RATES = (1e-6, 1e-5, 1e-4)
STEPS = 12
SIZES = ((2, 64), (5, 512), (5, 1024))  # layers and width
LINKS = {"1 GB/s": 1e9, "100 MB/s": 1e8}

Weights = list[tuple[str, Tensor]]


def updates(folder: str, data: str, lr: float) -> Iterator[Weights]:
    """The bfloat16 weights that a sync sends, after each step of a training."""
    job = grpo("flowrl.demo.verifier:compute_score", n=8, max_new_tokens=24, kl_coef=0.0).bind(
        actor=TorchTrainer(folder, AdamW(lr=lr), device="cpu"), rollout=TorchRollout(folder, device="cpu")
    )
    engines = job.build(seed=0)
    steps, rows = local_steps(Plan(job.runs), engines, 0), PromptData(data).load(ChatTokenizer(folder), seed=0)
    steps.sync()
    for step in range(STEPS):
        yield [(name, tensor.clone()) for name, tensor in rounded(engines["actor"].weights(), torch.bfloat16)]
        steps.step(rows.next(16), step)


def shares(folder: str, data: str) -> list[list[str]]:
    """By learning rate: the share of values that change in a step, and the bytes of its sync."""
    rows = []
    for lr in RATES:
        shadow, found, before = Shadow(), list[tuple[float, float]](), Weights()
        full = 0
        for step, weights in enumerate(updates(folder, data, lr)):
            base = shadow.sync
            sent = chain.from_iterable(shadow.outgoing([weights], str(step), base))
            nbytes = sum(tensor.nbytes for _, tensor in sent)
            if before:
                moved = sum(int((a != b).sum()) for (_, a), (_, b) in zip(before, weights, strict=True))
                found.append((moved / sum(tensor.numel() for _, tensor in weights), nbytes / full))
            else:
                full = nbytes
            before = weights
        changed, sent = zip(*found, strict=True)
        ratio = mean(nbytes / share for share, nbytes in found)
        span = f"{min(changed):.2%} to {max(changed):.2%}"
        rows.append([f"{lr:g}", f"{mean(changed):.2%}", span, f"{mean(sent):.2%}", f"{ratio:.2f}"])
    return rows


def times(folder: str) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes of each kind of sync, and seconds of its parts, in turns from one version to the other."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    versions = [list(rounded(_live(model), torch.bfloat16))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = torch.randint(6, 80, (1, 32), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    versions.append(list(rounded(_live(model), torch.bfloat16)))
    context: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
    engine = TorchRollout(folder, dtype="bfloat16", device="cpu").build(context)
    there = [torch.empty_like(tensor) for _, tensor in versions[0]]
    number, turns, bytes_of = count(), count(), dict[str, int]()

    def copy() -> None:
        for target, (_, tensor) in zip(there, versions[0], strict=True):
            target.copy_(tensor)

    def sync(kind: str, weights: Weights, *shadows: Shadow) -> None:
        origin, sent = Origin("actor", 0), iter(weights)
        if shadows:
            base, sync = common(shadow.sync for shadow in shadows), str(next(number))
            origin = replace(origin, sync=sync, base=base)
            sent = chain.from_iterable(shadows[0].outgoing([weights], sync, base))
        exported = Export.of(origin, sent, BUCKET_BYTES)
        with exported.open(0, *shadows[1:]) as source:
            source.check(engine.sync(source))
        bytes_of[kind] = exported.nbytes

    shadows = Shadow(), Shadow()
    cases: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "digest": lambda: [tensor_digest(name, tensor) for name, tensor in versions[0]],
        "hash64 digest": lambda: [tensor_digest(name, tensor, "hash64") for name, tensor in versions[0]],
        "full": lambda: sync("full", versions[0]),
        "changes": lambda: sync("changes", versions[next(turns) % 2], *shadows),
    }
    return bytes_of, medians(cases, seconds=4, clock=time.process_time)


def _live(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.detach().clone()) for name, tensor in model.named_parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    # One process's memory instead of Ray's object store, which would copy once more on each side.
    export.ray = SimpleNamespace(put=lambda bucket: bucket, get=lambda bucket: bucket)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as base:
        demo, data = build(Path(base) / "demo"), write_dataset(base)[0]
        heads = ["lr", "values changed", "least to most", "bytes of a full sync", "bytes / share"]
        table(f"Bytes of {STEPS - 1} syncs of changes", heads, shares(str(demo), str(data)))
        heads = [""]
        rows: dict[str, list[str]] = {}
        for layers, width in SIZES:
            sizes, taken = times(write_model(Path(base) / str(width), layers, width))
            for link, speed in LINKS.items():
                for kind in ("full", "changes"):
                    taken[f"{kind}, on a link of {link}"] = taken[kind] + sizes[kind] / speed
            heads += [f"{sizes['full'] / 2**20:.1f} MiB, ms", "× memcpy"]
            for part, seconds in taken.items():
                ratio = seconds / taken["memcpy"]
                rows.setdefault(part, [part]).extend([f"{1e3 * seconds:.1f}", f"{ratio:.1f}"])
            rows.setdefault("MiB sent: full, changes", ["MiB sent: full, changes"]).extend(
                [f"{sizes['full'] / 2**20:.2f}", f"{sizes['changes'] / 2**20:.2f}"]
            )
        table("A sync, CPU time of one core", heads, list(rows.values()))
