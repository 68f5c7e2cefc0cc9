"""Transfer of weights from a trainer to an engine in another process, compared with a memory copy of the same size.

The parts are measured in one process, with the code of both processes; the last rows are the whole transfer between two
processes, by the object store and by a stream (gloo, as between nodes, and handles to shared memory, in place of CUDA
IPC); and between the ranks of a sharded trainer and an engine, with one sender and with all ranks as senders. The
copy writes to memory that was written before; the object store and the receiver use new memory each time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from generate import write_model
from harness import medians, table
from harness.streams import Receiver
from transformers.utils import logging

from flowrl import Colocate, Split
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.distributed import delivery
from flowrl.distributed.cluster.cluster import connected
from flowrl.distributed.export import Export
from flowrl.graphs import grpo
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.digest import weights_digest
from flowrl.sync.received import Origin, received

SIZES = ((2, 64), (5, 512), (5, 1024))  # layers and width
RANKS = (2, 4)


def parts(model: str) -> tuple[int, dict[str, float]]:
    """Bytes of the weights, and the seconds of each part of a sync."""
    context: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
    trainer = TorchTrainer(model, SGD(lr=0.1), device="cpu").build(context)
    rollout = TorchRollout(model, device="cpu").build(context)
    weights = [tensor for _, tensor in trainer.weights()]
    elsewhere = [torch.empty_like(tensor) for tensor in weights]

    def export() -> Export:
        return Export.of(Origin("actor", trainer.version), trainer.weights(), BUCKET_BYTES)

    def copy() -> None:
        for target, tensor in zip(elsewhere, weights, strict=True):
            target.copy_(tensor)

    sent: Any = export()
    source: Any = received(sent.origin, sent)
    cases: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "gather": lambda: list(trainer.weights()),
        "gather, digest": lambda: weights_digest(trainer.weights()),
        "gather, digest, put": export,
        "get": lambda: list(source.unchecked()),
        "get, load, check": lambda: rollout.sync(source),
    }
    taken = medians(cases, seconds=2)
    split = {
        "memcpy of the same bytes": taken["memcpy"],
        "gather the weights": taken["gather"],
        "digest them": taken["gather, digest"] - taken["gather"],
        "put them into the object store": taken["gather, digest, put"] - taken["gather, digest"],
        "get them": taken["get"],
        "load them, digest the engine's weights": taken["get, load, check"] - taken["get"],
        "total in one process": taken["gather, digest, put"] + taken["get, load, check"],
    }
    for name, transport in {"gloo": "gloo", "handles to shared memory": "cuda ipc"}.items():
        receiver = Receiver(transport, "cpu")
        stream = medians({"stream": lambda receiver=receiver: receiver.send(trainer.weights)}, seconds=2)["stream"]
        split[f"gather, digest, stream by {name}, check"] = stream
        receiver.close()
    return sent.nbytes, split


def between_processes(model: str) -> dict[str, float]:
    """Seconds of a sync of two live processes, by transport."""
    graph = grpo("flowrl.demo.verifier:compute_score", kl_coef=0.0)
    engines = {"actor": TorchTrainer(model, SGD(lr=0.1)), "rollout": TorchRollout(model)}
    with graph.bind(**engines, place=Split(train=1, rollout=1)).open() as executor:
        taken = {}
        for transport in ("object store", "gloo"):
            delivery.choose = lambda *locations, transport=transport: (transport, ((0,),))
            taken[f"total between two processes, by {transport}"] = medians({"": executor.sync}, seconds=1)[""]
        return taken


def by_senders(model: str, ranks: int) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of a sync of a sharded trainer, and the most bytes that a rank sends, by who sends."""
    graph = grpo("flowrl.demo.verifier:compute_score", kl_coef=0.0)
    engines = {"actor": TorchTrainer(model, SGD(lr=0.1), ranks=ranks), "rollout": TorchRollout(model)}
    every = tuple(range(ranks))
    taken, sent = {}, {}
    with graph.bind(**engines, place=Split(train=ranks, rollout=1)).open() as executor:
        for name, transport, by in (
            ("one sender, by gloo", "gloo", (0,)),
            ("all send, by gloo", "gloo", every),
            ("all send, by object store", "object store", every),
        ):
            delivery.choose = lambda *locations, transport=transport, by=by: (transport, (by,))
            executor.timeline.spans.clear()
            taken[f"{ranks} ranks, {name}"] = medians({"": executor.sync}, seconds=2)[""]
            if transport == "gloo":
                spans = executor.timeline.spans
                sent[f"{ranks} ranks, {name}"] = max(s.bytes for s in spans if s.name.startswith("send by"))
    return taken, sent


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on CPU slots, wherever this runs
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    heads = [""]
    rows: dict[str, list[str]] = {}
    with connected(Colocate(gpus=max(RANKS) + 1)), tempfile.TemporaryDirectory() as base:
        for layers, width in SIZES:
            model = write_model(Path(base) / str(width), layers, width)
            size, taken = parts(model)
            taken |= between_processes(model)
            sent = {"one process": size}
            for ranks in RANKS:
                more, most = by_senders(model, ranks)
                taken, sent = taken | more, sent | most
            heads += [f"{size / 2**20:.1f} MiB, ms", "× memcpy"]
            for part, seconds in taken.items():
                ratio = seconds / taken["memcpy of the same bytes"]
                rows.setdefault(part, [part]).extend([f"{1e3 * seconds:.1f}", f"{ratio:.1f}"])
            for part, nbytes in sent.items():
                head = f"MiB that a rank gathers and sends: {part}"
                rows.setdefault(head, [head]).extend([f"{nbytes / 2**20:.2f}", ""])
    table("A sync, part by part", heads, list(rows.values()))
