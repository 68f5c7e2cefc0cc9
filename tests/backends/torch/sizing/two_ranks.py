"""A rank of two that measures an update of a sharded trainer, and prints it as JSON: ``two_ranks.py RANK STORE FOLDER
DTYPE``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from flowrl.backends import TorchTrainer
from tests.backends.torch.sizing.counting import Allocations, local, update


def main(rank: int, store: str, folder: str, dtype: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    context: Any = SimpleNamespace(seed=0, rank=rank, world_size=2)
    engine: Any = TorchTrainer(folder, device="cpu", ranks=2, dtype=dtype, gradient_checkpointing=True).build(context)
    found, counter = update(engine), Allocations()
    counter.ignore(*map(local, engine.model.parameters()))
    with counter:
        for _ in engine.weights(1 << 20):
            pass
    if rank == 0:
        print(json.dumps(asdict(found) | {"buckets": sum(counter.peak.values())}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
