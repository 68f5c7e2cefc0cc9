"""Trainers of tiny models, a loss with token weights, the change of weights in an update, and a malicious pickle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.backends import SGD, TorchTrainer
from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import MiniBatch
from tests.support.models import Ragged

CONTEXT: Any = SimpleNamespace(seed=0)
Folder = Callable[[str], str]


def trainer(model: str, **settings: Any) -> Any:
    settings.setdefault("optimizer", SGD(lr=1.0))
    settings.setdefault("grad_clip", None)
    return TorchTrainer(model, device="cpu", **settings).build(CONTEXT)


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@dataclass
class Pull:
    """``-(weights * (pull * log_probs + entropy_coef * entropy)).sum()``, recording its inputs."""

    entropy_coef: float = 0.0
    seen: list[tuple[Tensor, Tensor | None, Ragged, Tensor]] = field(default_factory=list)
    of_distribution = None
    of_tokens = True

    @property
    def wants_entropy(self) -> bool:
        return self.entropy_coef != 0

    def __call__(
        self, output: Tensor, entropy: Tensor | None, batch: Ragged, weights: Tensor, metrics: Metrics
    ) -> Tensor:
        self.seen.append((output.detach().clone(), entropy, batch, weights))
        metrics.mean("actor/pull", (weights * batch.pull).sum(), weights.sum())
        gain = batch.pull * output
        if entropy is not None and self.wants_entropy:
            gain = gain + self.entropy_coef * entropy
        return -(weights * gain).sum()


def seen_by(loss: Pull, batch: Ragged) -> Tensor:
    """The log-probs that `loss` got in one update of all rows, in the order of `batch`."""
    outputs = {uid: row for output, _, part, _ in loss.seen for uid, row in zip(part.uid, output, strict=True)}
    assert sum(len(output) for output, *_ in loss.seen) == len(outputs)
    return torch.stack([outputs[uid] for uid in batch.uid])


def all_rows(batch: Ragged) -> MiniBatch:
    """All rows in one mini-batch, every token under the mask with weight 1."""
    return MiniBatch(torch.arange(len(batch.input_ids)), batch.response_mask.float())


def snapshot(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def change(engine: Any, act: Callable[[], Any]) -> Tensor:
    """The change of all weights by `act`, as one float64 vector."""
    before = snapshot(engine)
    act()
    return torch.cat([(tensor.double() - before[name].double()).flatten() for name, tensor in engine.weights()])
