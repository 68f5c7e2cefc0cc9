"""A rank of two that measures syncs to engines in float32 and in bfloat16, of a share of the weights and of all, an
update of a sharded trainer, and a step of Muon, and prints them as JSON: ``two_ranks.py RANK STORE FOLDER DTYPE AXES
RESHARD``; ``AXES`` is JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from flowrl.backends import Mesh, Muon, TorchTrainer
from flowrl.sync.buckets import packed
from flowrl.sync.weight_selection import outgoing
from tests.backends.torch.sizing.counting import Allocations, local, step, update

LIMIT = 3 << 19
"""Bytes of a bucket."""


def main(rank: int, store: str, folder: str, dtype: Any, axes: str, reshard: str) -> None:
    mesh = Mesh(**json.loads(axes))
    dist.init_process_group("gloo", store=dist.FileStore(store, mesh.ranks), rank=rank, world_size=mesh.ranks)
    context: Any = SimpleNamespace(seed=0, rank=rank, world_size=mesh.ranks)
    settings: dict[str, Any] = {"gradient_checkpointing": True, "reshard_after_forward": bool(reshard)}
    engine: Any = TorchTrainer(folder, device="cpu", mesh=mesh, dtype=dtype, **settings).build(context)
    buckets = {
        f"{str(to).removeprefix('torch.')} {transport}": sending(engine, to, share)
        for to in (torch.float32, torch.bfloat16)
        for transport, share in (("nccl", rank), ("cuda ipc", None))
    }
    found = asdict(update(engine))
    muon: Any = TorchTrainer(folder, Muon(lr=0.1), device="cpu", mesh=mesh).build(context)
    print(json.dumps(found | {"buckets": buckets, "step": min(step(muon) for _ in range(5))}))
    dist.destroy_process_group()


def sending(engine: Any, dtype: torch.dtype, share: int | None) -> int:
    """The most bytes while weights for an engine in `dtype` are gathered and packed into buckets of `LIMIT` bytes, as a
    stream sends them: the least of some passes, since gloo's thread may release late what it has sent."""
    found = []
    for _ in range(12):
        counter = Allocations()
        counter.ignore(*map(local, engine.model.parameters()))
        with counter:
            for bucket in packed(outgoing(engine.weights(LIMIT), dtype, share), LIMIT, torch.device("cpu")):
                del bucket
        found.append(sum(counter.peak.values()))
    return min(found)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
