"""Trainers that a sync reads from, with faults to order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch import Tensor

from flowrl.backends.torch.score.engine import TorchTrainerEngine


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Processes that are not related open CPU tensors by the names of files, and not by descriptors."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Batch(NamedTuple):
    """What `log_probs` reads."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor


class Altered:
    """A trainer under another version, or whose weights leave it with a fault.

    Args:
        trainer: the real one.
        version: to bear.
        fault: ``"missing"``, ``"unknown"``, ``"twice"``, ``"shape"`` or ``"raises"``: of the weight in the middle.
    """

    def __init__(self, trainer: TorchTrainerEngine, version: int = 1, fault: str | None = None) -> None:
        self._trainer, self.version, self.fault = trainer, version, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def log_probs(self, batch: Any) -> Tensor:
        return self._trainer.log_probs(batch)

    # These are here since a Protocol need not look for them through __getattr__.
    @property
    def adapter_of(self) -> str:
        return str(self._trainer.adapter_of)  # type: ignore[attr-defined]

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._trainer.adapter_weights()  # type: ignore[attr-defined]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = list(self._trainer.weights())
        for i, (name, tensor) in enumerate(weights):
            match self.fault if i == len(weights) // 2 else None:
                case None:
                    yield name, tensor
                case "missing":
                    continue
                case "unknown":
                    yield name + ".lora_A", tensor
                case "twice":
                    yield from [(name, tensor)] * 2
                case "shape":
                    yield name, torch.cat([tensor, tensor])
                case "raises":
                    raise ConnectionError("the link broke")
                case unknown:
                    raise ValueError(f"no fault {unknown!r}")


class Crooked(Altered):
    """A trainer that sends other weights than it scores by.

    Args:
        trainer: by which it scores.
        sent: by their names.
        version: to bear.
    """

    def __init__(self, trainer: TorchTrainerEngine, sent: Iterable[tuple[str, Tensor]], version: int = 1) -> None:
        super().__init__(trainer, version)
        self._sent = list(sent)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._sent
