"""`Footprint`: the memory that an engine takes on a slot, by part, as its backend predicts it before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GIB = 1 << 30

Call = Literal["update", "score", "generate", "send", "receive"]
"""What an engine does in a node: trains, scores, generates, or is a side of a sync."""

Parts = Mapping[str, int]
"""Bytes by part, such as ``"weights"``."""

PARTS = (
    "weights",
    "gradients",
    "optimizer states",
    "gathered weights",
    "activations",
    "logits",
    "KV cache",
    "sync buckets",
    "engine",
    "CUDA",
    "as stated",
)
"""All parts, in the order of tables."""

STATED = frozenset({"engine", "CUDA", "as stated"})
"""Parts that are stated, not computed."""

MICRO_BATCH = {"cpu": 2048, "cuda": 16384}
"""The most positions in a micro-batch by default: on a CPU small ones are fastest, since activations stay in its
caches; on a GPU large ones, within its memory."""

CUDA_BYTES = GIB // 2
"""Stated, not measured: what a CUDA context, its kernels and cuBLAS take in a process, awake or asleep."""


@dataclass(frozen=True)
class Demand:
    """What a job asks of an engine, and the slot where it runs.

    Args:
        prompt, response: the most tokens of a row.
        rows: the most rows of a call on one data rank; None is unknown.
        prompts: the different prompts among them.
        device: ``"cuda"`` or ``"cpu"``.
        room: bytes of the slot.
        in_process: engines are in one process, and weights pass without a copy.
        distributions: the loss reads full distributions over the vocabulary.
        owner: the backend whose weights the engine shares; None if it has its own.
        sent_in: the dtype that matrices are rounded to before they are sent; see `Backend.synced_dtype`.
        adapter: only an adapter is sent; see `Backend.receives`.
        transport: of a sync; see `flowrl.sync.route.choose`.
    """

    prompt: int
    response: int
    rows: int | None
    prompts: int | None
    device: Literal["cuda", "cpu"]
    room: int
    distributions: bool = False
    in_process: bool = False
    owner: Any = None
    sent_in: str = "float32"
    adapter: bool = False
    transport: str = "nccl"

    @property
    def tokens(self) -> int:
        """The most tokens of a row."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Footprint:
    """Bytes of a slot that an engine takes.

    Args:
        awake: between calls.
        asleep: after `sleep`.
        calls: in addition while a call is at its peak.
        sent: bytes that a sync sends of a trainer.
    """

    awake: Parts
    asleep: Parts
    calls: Mapping[Call, Parts] = field(default_factory=dict)
    sent: int = 0


def stated(gib: float) -> Footprint:
    """The footprint of an engine that takes this many GiB while it is awake."""
    return Footprint({"as stated": round(gib * GIB)}, {})


def largest(*moments: Parts) -> Parts:
    """Of the moments of a call, the one that takes the most."""
    return max(moments, key=lambda parts: sum(parts.values()))
