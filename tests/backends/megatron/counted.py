"""A rank that measures an update, scores and a sync of a `MegatronTrainer`, and prints them as JSON: ``python -m
tests.backends.megatron.counted RANK STORE FOLDER AXES SETTINGS``; the last two are JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.backends import MegatronTrainer, Mesh
from flowrl.protocols.protocols import MiniBatch
from flowrl.sync.buckets import packed
from flowrl.sync.weight_selection import outgoing
from tests.backends.megatron import on_cpu
from tests.backends.torch.sizing.counting import RESPONSE, ROWS, Allocations, Sum, batch, local, tagging

LIMIT = 3 << 19
"""Bytes of a bucket."""


def counted(engine: Any) -> dict[str, Any]:
    """Bytes of weights, gradients and states, of megatron-core's own buffer, and the peak of the second update and of
    scores over the buffer and what is between calls."""
    from megatron.core import parallel_state

    rows, whole = batch(), [MiniBatch(torch.arange(ROWS), torch.full((ROWS, RESPONSE), 1.0), None)]
    engine.update(rows, whole, Sum())
    stage, buffers = engine._scorer.stage, parallel_state.get_global_memory_buffer().buffer.values()
    weights = [*stage.module.parameters(), *stage._trained.values()]
    states = [value for state in engine.learner.optimizer.state.values() for value in state.values()]
    resident = [*weights, *states, *buffers, *stage.module.buffers(), *rows]
    gradients: list[int] = []
    begin = stage.begin

    def noting() -> None:
        begin()
        gradients.append(_bytes(stage._gradients.values()))

    stage.begin = noting
    update, score = Allocations(), Allocations()
    update.ignore(*resident)
    score.ignore(*resident)
    with tagging(update), update:
        engine.update(rows, whole, Sum())
    with score:
        engine.log_probs(rows)
    return {
        "weights": _bytes(weights),
        "gradients": gradients[0],
        "states": sum(local(state).nbytes for state in states),
        "buffer": _bytes(buffers),
        "passes": sum(update.peak.values()) - gradients[0],
        "score": sum(score.peak.values()),
        "sent": sent(engine, resident),
    }


def sent(engine: Any, resident: list[Tensor]) -> int:
    """The most bytes while the process sends its share of the weights."""
    counter = Allocations()
    counter.ignore(*resident)
    with counter:
        share = engine._scorer.mesh.position.share
        for bucket in packed(outgoing(engine.weights(LIMIT), torch.bfloat16, share), LIMIT, torch.device("cpu")):
            del bucket
    return sum(counter.peak.values())


def _bytes(tensors: Any) -> int:
    """The bytes of tensors, each memory once."""
    found = {local(tensor).untyped_storage()._cdata: local(tensor).untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def main(rank: int, store: str, folder: str, axes: str, settings: str) -> None:
    torch.set_num_threads(1)
    mesh = Mesh(**json.loads(axes))
    dist.init_process_group("gloo", store=dist.FileStore(store, mesh.ranks), rank=rank, world_size=mesh.ranks)
    context: Any = SimpleNamespace(seed=0, rank=rank, world_size=mesh.ranks)
    engine = MegatronTrainer(folder, device="cpu", mesh=mesh, **json.loads(settings)).build(context)
    print(json.dumps(counted(engine)))
    dist.destroy_process_group()


if __name__ == "__main__":
    on_cpu.install()
    main(int(sys.argv[1]), *sys.argv[2:])
