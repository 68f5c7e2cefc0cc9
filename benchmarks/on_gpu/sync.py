"""GB per second of weights: within a device, to another process by CUDA IPC, to another device by NCCL, and digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import medians
from harness.streams import Receiver
from harness.turns import finished

from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.sync.digest import algorithm_for, combine, tensor_digest, weights_digest
from flowrl.sync.hash64 import hash64

from .models import CONTEXT, QWEN3_06B, TINY, qwen3
from .parts import Target
from .report import Report


def measure(target: Target, report: Report) -> None:
    """Measure each way against a copy on the device (memcpy); every weight that arrives is digested."""
    folder = qwen3(target, target.pick(QWEN3_06B, TINY))
    trainer: Any = TorchTrainer(folder, SGD(lr=0.1), device=target.device).build(CONTEXT)
    rollout: Any = TorchRollout(folder, device=target.device).build(CONTEXT)
    weights = [tensor for _, tensor in trainer.weights()]
    elsewhere, size = [torch.empty_like(tensor) for tensor in weights], sum(tensor.nbytes for tensor in weights)

    def on_device(act: Callable[[], object]) -> Callable[[], float]:
        def call() -> float:
            act()
            return finished(target.device)

        return call

    def copy() -> None:
        for there, tensor in zip(elsewhere, weights, strict=True):
            there.copy_(tensor)

    cases = {
        "a copy (memcpy)": on_device(copy),
        "hash64 on the device": on_device(lambda: [hash64(tensor) for tensor in weights]),
        "xxh3 on the CPU": on_device(lambda: weights_digest(trainer.weights())),
        "a sync to an engine of this process": on_device(lambda: rollout.sync(trainer)),
    }
    seconds = medians(cases, seconds=target.pick(10.0, 0.1), least=target.pick(3, 1))
    ways = {"by CUDA IPC" if target.on_gpu else "by shared memory": ("cuda ipc", target.device)}
    if target.count > 1 and target.on_gpu:
        ways["to another GPU by NCCL"] = ("nccl", "cuda:1")
    elif target.on_gpu:
        report.skip("NCCL between two processes", "it needs two GPUs")
    for way, (transport, there) in ways.items():
        receiver = Receiver(transport, there)
        calls = {f"to another process {way}": lambda to=receiver: to.send(trainer.weights)}
        seconds |= medians(calls, seconds=target.pick(5.0, 0.1), least=target.pick(3, 1))
        receiver.close()
    base = seconds["a copy (memcpy)"]
    rows = [[name, f"{size / taken / 1e9:.2f}", f"{taken / base:.1f}"] for name, taken in seconds.items()]
    report.table(f"{size / 1e9:.2f} GB of weights in float32", ["", "GB/s", "times the copy"], rows)
    receipt, named = rollout.sync(trainer), list(trainer.weights())
    digest = combine({name: tensor_digest(name, tensor.cpu(), algorithm_for(tensor)) for name, tensor in named})
    found = f"{receipt.digest[:12]} by {receipt.transport}, {algorithm_for(named[0][1])}"
    report.check("the device computes the digest that a CPU computes", receipt.digest == digest, found)
