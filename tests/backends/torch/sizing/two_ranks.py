"""A rank of two that measures syncs to engines in float32 and in bfloat16, and an update of a sharded trainer, and
prints them as JSON: ``two_ranks.py RANK STORE FOLDER DTYPE AXES RESHARD``; ``AXES`` is JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from flowrl.backends import Mesh, TorchTrainer
from flowrl.sync.weight_selection import rounded
from tests.backends.torch.sizing.counting import Allocations, local, update


def main(rank: int, store: str, folder: str, dtype: Any, axes: str, reshard: str) -> None:
    mesh = Mesh(**json.loads(axes))
    dist.init_process_group("gloo", store=dist.FileStore(store, mesh.ranks), rank=rank, world_size=mesh.ranks)
    context: Any = SimpleNamespace(seed=0, rank=rank, world_size=mesh.ranks)
    settings: dict[str, Any] = {"gradient_checkpointing": True, "reshard_after_forward": bool(reshard)}
    engine: Any = TorchTrainer(folder, device="cpu", mesh=mesh, dtype=dtype, **settings).build(context)
    buckets = {str(to).removeprefix("torch."): gathering(engine, to) for to in (torch.float32, torch.bfloat16)}
    print(json.dumps(asdict(update(engine)) | {"buckets": buckets}))
    dist.destroy_process_group()


def gathering(engine: Any, dtype: torch.dtype) -> int:
    """The most bytes while weights for an engine in `dtype` are gathered in buckets of 1 MiB: the least of some passes,
    since gloo's thread may release late what it has sent."""
    found = []
    for _ in range(5):
        counter = Allocations()
        counter.ignore(*map(local, engine.model.parameters()))
        with counter:
            for _ in rounded(engine.weights(1 << 20), dtype):
                pass
        found.append(sum(counter.peak.values()))
    return min(found)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
